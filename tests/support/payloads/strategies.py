"""Hypothesis strategies: metadata, caches and bundles, every byte pattern included."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from omni_kvlink import KVCacheBundle, KVCacheTransferData, KVMetadata, PrefixOf, SameAs, Shard
from support.payloads.random_caches import DTYPES, empty, noise

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import BundleBranch

EXAMPLES = int(os.environ.get("KVLINK_EXAMPLES", "1"))
"""How many times as many examples as usual are tried; see `make test-all`."""

request_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
branch_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,11}", fullmatch=True).filter(
    lambda name: name != "pad"
)
counts = st.integers(0, 2**53)

_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)
extras = st.dictionaries(_texts, json_values, max_size=3)


@st.composite
def lengths(draw: st.DrawFn, *, total: int) -> list[int]:
    """Lengths of one to three sequences that add up to `total`."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=2)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def metadata(
    draw: st.DrawFn,
    *,
    tokens: int | None = None,
    layers: int | None = None,
    layout: str | None = None,
    dtype: str | None = None,
    shard: Shard | None = None,
) -> KVMetadata:
    total = draw(st.integers(0, 9)) if tokens is None else tokens
    kv_lens = draw(lengths(total=total))
    return KVMetadata(
        kv_lens=tuple(kv_lens),
        ropes=tuple(draw(st.lists(counts, min_size=len(kv_lens), max_size=len(kv_lens)))),
        num_layers=draw(st.integers(1, 4)) if layers is None else layers,
        layout=draw(st.sampled_from(["NHD", "ND"])) if layout is None else layout,
        dtype=draw(st.sampled_from(DTYPES)) if dtype is None else dtype,
        block_size=draw(st.sampled_from([0, 1, 16, 2**53])),
        image_shape=draw(st.none() | st.tuples(counts, counts)),
        extra=draw(extras),
        shard=shard,
    )


@st.composite
def caches(draw: st.DrawFn, *, request_id: str | None = None) -> KVCacheTransferData:
    """A cache of odd sizes and random bits, its tensors sometimes strided."""
    layout, dtype = draw(st.sampled_from(["NHD", "ND"])), draw(st.sampled_from(DTYPES))
    sides = draw(st.lists(st.integers(1, 7), min_size=2, max_size=2))
    tokens, layers = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    shape = [tokens, *sides] if layout == "NHD" else [tokens, sides[0] * sides[1]]
    shard = None
    if layout == "NHD" and draw(st.booleans()):
        shard = Shard(rank=1, world=2, heads=(sides[0], 2 * sides[0]))
    about = draw(metadata(tokens=tokens, layers=layers, layout=layout, dtype=dtype, shard=shard))
    seed, strided = draw(st.integers(0, 10**6)), draw(st.booleans())
    parts = ("key_cache", "value_cache") if layout == "NHD" else ("latent_cache",)
    blocks: dict[str, Any] = {part: [] for part in parts}
    for number in range(layers * len(parts)):
        tensor = noise(seed + number, shape, dtype)
        if strided:
            tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        blocks[parts[number % len(parts)]].append(tensor)
    name = draw(request_ids) if request_id is None else request_id
    block_ids = draw(st.lists(counts, max_size=4))
    return KVCacheTransferData(name, blocks, block_ids, about)


@st.composite
def bundles(draw: st.DrawFn) -> KVCacheBundle:
    """One to three caches, and for each perhaps a prefix, a twin, or an empty branch."""
    request_id = draw(request_ids)
    names = draw(st.lists(branch_names, min_size=1, max_size=6, unique=True))
    owners: list[str] = []
    branches: dict[str, BundleBranch] = {}
    for name in names:
        kind = draw(st.sampled_from(["own", "prefix", "same", "empty"])) if owners else "own"
        branches[name] = _branch(draw, request_id, kind, owners, branches)
        if kind == "own":
            owners.append(name)
    order = draw(st.permutations(names))
    return KVCacheBundle(request_id, {name: branches[name] for name in order})


def _branch(
    draw: st.DrawFn, request_id: str, kind: str, owners: list[str], made: dict[str, BundleBranch]
) -> BundleBranch:
    if kind == "own":
        return draw(caches(request_id=request_id))
    if kind == "empty":
        return empty(request_id, layers=draw(st.integers(1, 3)), extra=draw(extras))
    of = draw(st.sampled_from(owners))
    source = made[of]
    assert isinstance(source, KVCacheTransferData)
    like = source.metadata
    if kind == "same" and draw(st.booleans()):
        return SameAs(of)
    tokens = like.seq_len if kind == "same" else draw(st.integers(1, like.seq_len))
    own = draw(
        metadata(tokens=tokens, layers=like.num_layers, layout=like.layout, dtype=like.dtype)
    )
    return SameAs(of, own) if kind == "same" else PrefixOf(of, tokens, own)
