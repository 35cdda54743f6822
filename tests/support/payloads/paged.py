"""Paged caches in every layout, and the bytes that must arrive, read a token at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_kvlink import KVCacheTransferData, split_packed, split_stacked
from omni_kvlink._native import host
from omni_kvlink.copier import Copier, NativeCopier, TorchCopier
from support.payloads.random_caches import bits, noise

LAYERS, BLOCKS, SIZE, HEADS, DIM = 2, 9, 4, 3, 5
NEEDS_LIBRARY = pytest.mark.skipif(bool(host.missing()), reason=host.missing() or "")
COPIERS = ["torch", pytest.param("native", marks=NEEDS_LIBRARY)]
Pools = list[torch.Tensor]
Layout = Callable[[str, int], tuple[Pools, Pools]]


def copier(name: str) -> Copier:
    return NativeCopier() if name == "native" else TorchCopier()


def separate(dtype: str, seed: int) -> tuple[Pools, Pools]:
    return tuple(  # type: ignore[return-value]
        [noise(seed + 10 * part + layer, (BLOCKS, SIZE, HEADS, DIM), dtype) for layer in (0, 1)]
        for part in (0, 1)
    )


def stacked(dtype: str, seed: int) -> tuple[Pools, Pools]:
    return split_stacked(
        [noise(seed + layer, (2, BLOCKS, SIZE, HEADS, DIM), dtype) for layer in (0, 1)]
    )


def packed(dtype: str, seed: int) -> tuple[Pools, Pools]:
    return split_packed(
        [noise(seed + layer, (BLOCKS, 2, SIZE, HEADS, DIM), dtype) for layer in (0, 1)]
    )


def heads_first(dtype: str, seed: int) -> tuple[Pools, Pools]:
    keys, values = separate(dtype, seed)
    turned = (0, HEADS, SIZE, DIM)
    return tuple(  # type: ignore[return-value]
        [pool.view(BLOCKS, *turned[1:]).transpose(1, 2) for pool in pools]
        for pools in (keys, values)
    )


LAYOUTS = (separate, stacked, packed, heads_first)


def table(tokens: int, *, by_slot: bool, seed: int = 0) -> dict[str, Any]:
    """Random block ids or slots for the tokens."""
    chance = random.Random(seed)
    if by_slot:
        return {"slot_mapping": chance.sample(range(BLOCKS * SIZE), tokens)}
    return {"block_ids": chance.sample(range(BLOCKS), -(-tokens // SIZE))}


def slots_of(tables: dict[str, list[int]], tokens: int) -> list[tuple[int, int]]:
    if "slot_mapping" in tables:
        return [divmod(slot, SIZE) for slot in tables["slot_mapping"]]
    return [(tables["block_ids"][token // SIZE], token % SIZE) for token in range(tokens)]


def expected_bytes(
    pools: tuple[Pools, Pools], tables: dict[str, list[int]], tokens: int
) -> list[bytes]:
    """The bytes of each tensor, layer by layer, K before V, read a token at a time."""
    return [
        b"".join(bits(pool[block, slot]) for block, slot in slots_of(tables, tokens))
        for layer in zip(*pools, strict=True)
        for pool in layer
    ]


def about(tokens: int, **other: Any) -> dict[str, Any]:
    return {"kv_lens": [tokens], "ropes": [2], **other}


def paged(
    tokens: int = 10,
    *,
    pools: tuple[Pools, Pools] | None = None,
    dtype: str = "bfloat16",
    by_slot: bool = False,
    request_id: str = "r",
) -> KVCacheTransferData:
    keys, values = pools or separate(dtype, 1)
    return KVCacheTransferData.from_paged(
        request_id,
        keys,
        values,
        block_size=SIZE,
        metadata=about(tokens),
        **table(tokens, by_slot=by_slot),
    )


def dense_copy(data: KVCacheTransferData) -> KVCacheTransferData:
    values = data.to_dict()
    values["layer_blocks"] = {
        name: [view.dense() for view in layers] for name, layers in values["layer_blocks"].items()
    }
    return KVCacheTransferData.from_dict(values)
