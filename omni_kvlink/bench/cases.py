"""The matrix of payloads that must arrive bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink.bench.payloads import (
    Sources,
    empty_cache,
    found_in,
    make_metadata,
    make_sample,
    make_tensor_sample,
)
from omni_kvlink.bench.setups import Shape
from omni_kvlink.payload.bundle import BundleBranch, KVCacheBundle, Payload, PrefixOf, SameAs
from omni_kvlink.payload.dtypes import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES: tuple[Sources, ...] = ("contiguous", "strided", "paged")
BRANCHINGS = ("single", "prefix", "same", "empty", "mixed")
_ROWS = {"4×128": (4, 128), "8×64": (8, 64), "3×80": (3, 80), "latent 576": (0, 576)}
TENSORS = "nested tensors"
"""The `rows` of a case that is a `TensorTransferData`."""
TENSOR_BRANCHINGS = ("single", "beside a cache")
_QUICK_ROWS = ("4×128", "latent 576")


@dataclasses.dataclass(frozen=True)
class Case:
    """One cache, `TensorTransferData` or bundle to send; `rows` and dtype are its table cell."""

    number: int
    shape: Shape
    rows: str
    branching: str
    sources: Sources

    def make(self) -> tuple[str, Payload, dict[str, Any]]:
        """Its key, the payload, and what each branch must hold on arrival."""
        key = f"case-{self.number}"
        rng = np.random.default_rng(self.number)
        if self.rows == TENSORS:
            return self._make_tensors(key, rng)
        sample = make_sample(key, self.shape, rng, sources=self.sources, block_ids=(7, self.number))
        if self.branching == "single":
            return key, sample.cache, {"": sample.expected()}
        branches: dict[str, BundleBranch] = {"gen": sample.cache}
        expected = {"gen": sample.expected()}
        kinds = BRANCHINGS[1:4] if self.branching == "mixed" else (self.branching,)
        if "prefix" in kinds:
            tokens = -(-self.shape.tokens // 2)
            metadata = make_metadata(self.shape, tokens, rng)
            branches["half"] = PrefixOf("gen", tokens, metadata)
            expected["half"] = sample.expected(tokens=tokens, metadata=metadata)
        if "same" in kinds:
            metadata = make_metadata(self.shape, self.shape.tokens, rng)
            branches["same"] = SameAs("gen", metadata)
            expected["same"] = sample.expected(metadata=metadata)
        if "empty" in kinds:
            branches["none"] = empty = empty_cache(key, self.shape)
            expected["none"] = found_in(empty)
        if self.branching == "mixed":
            other = make_sample(key, dataclasses.replace(self.shape, tokens=5), rng)
            branches["other"] = other.cache
            expected["other"] = other.expected()
        return key, KVCacheBundle(key, branches), expected

    def _make_tensors(
        self, key: str, rng: np.random.Generator
    ) -> tuple[str, Payload, dict[str, Any]]:
        tensors, expected = make_tensor_sample(key, self.shape, rng, sources=self.sources)
        if self.branching == "single":
            return key, tensors, {"": expected}
        sample = make_sample(key, dataclasses.replace(self.shape, dtype="bfloat16"), rng)
        bundle = KVCacheBundle(key, {"extra": tensors, "gen": sample.cache})
        return key, bundle, {"gen": sample.expected(), "extra": expected}

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
    for dtype, token, branching, sources in itertools.product(
        KV_DTYPES, tokens, TENSOR_BRANCHINGS, SOURCES
    ):
        yield Case(next(numbers), Shape(2, token, 3, 40, dtype), TENSORS, branching, sources)
