"""The matrix of caches that must arrive bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from omni_kvlink.bench.payloads import (
    Shape,
    Sources,
    empty_cache,
    expected_empty,
    make_sample,
    prefix_metadata,
)
from omni_kvlink.link import Payload
from omni_kvlink.payload.branch import KV_DTYPES
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, PrefixOf, SameAs

SOURCES: tuple[Sources, ...] = ("contiguous", "strided", "paged")
BRANCHINGS = ("single", "prefix", "same", "empty", "mixed")
_ROWS = {"4×128": (4, 128), "8×64": (8, 64), "3×80": (3, 80), "latent 576": (0, 576)}
_QUICK_ROWS = ("4×128", "latent 576")


@dataclasses.dataclass(frozen=True)
class Case:
    """One cache or bundle to send."""

    number: int
    shape: Shape
    rows: str
    branching: str
    sources: Sources

    def make(self) -> tuple[str, Payload, dict[str, Any]]:
        """Its key, the payload, and what each branch must hold on arrival."""
        key = f"case-{self.number}"
        rng = np.random.default_rng(self.number)
        sample = make_sample(key, self.shape, rng, sources=self.sources, block_ids=(7, self.number))
        if self.branching == "single":
            return key, sample.cache, {"": sample.expected()}
        branches: dict[str, BundleBranch] = {"gen": sample.cache}
        expected = {"gen": sample.expected()}
        wanted = BRANCHINGS[1:4] if self.branching == "mixed" else (self.branching,)
        if "prefix" in wanted:
            tokens = -(-self.shape.tokens // 2)
            metadata = prefix_metadata(sample, tokens, rng)
            branches["half"] = PrefixOf("gen", tokens, metadata)
            expected["half"] = sample.expected(tokens=tokens, metadata=metadata)
        if "same" in wanted:
            metadata = prefix_metadata(sample, self.shape.tokens, rng)
            branches["same"] = SameAs("gen", metadata)
            expected["same"] = sample.expected(metadata=metadata)
        if "empty" in wanted:
            branches["none"] = nothing = empty_cache(key, self.shape)
            expected["none"] = expected_empty(nothing)
        if self.branching == "mixed":
            other = make_sample(key, dataclasses.replace(self.shape, tokens=5), rng)
            branches["other"] = other.cache
            expected["other"] = other.expected()
        return key, KVCacheBundle(key, branches), expected

    def __str__(self) -> str:
        return f"case {self.number}: {self.shape}, {self.branching}, {self.sources}"


def cases(*, quick: bool) -> Iterator[Case]:
    """All cases in a fixed order; `quick` keeps every dtype, branching, layout and source."""
    numbers = itertools.count()
    layers = (2,) if quick else (1, 5)
    tokens = (1, 7, 255) if quick else (1, 7, 255, 1023)
    rows = _QUICK_ROWS if quick else tuple(_ROWS)
    for dtype, row, layer, token, branching, sources in itertools.product(
        KV_DTYPES, rows, layers, tokens, BRANCHINGS, SOURCES
    ):
        heads, dim = _ROWS[row]
        shape = Shape(layer, token, heads, dim, dtype)
        yield Case(next(numbers), shape, row, branching, sources)
