"""Pools of blocks that hold K, V or both, and the layers of a cache in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import PART_WORDS, PARTS
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.payload.tensor_memory import check_strided

PoolLayers: TypeAlias = Sequence[torch.Tensor]
"""One pool `[num_blocks, block_size, *token]` a layer."""

IndexLike: TypeAlias = Sequence[int] | torch.Tensor | None


def split_stacked(layers: PoolLayers) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of the K and V pools of layers `[2, num_blocks, block_size, kv_heads, head_dim]`."""
    return _split(layers, 0, "[2, num_blocks, block_size, kv_heads, head_dim]")


def split_packed(layers: PoolLayers) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views of the K and V pools of layers `[num_blocks, 2, block_size, kv_heads, head_dim]`."""
    return _split(layers, 1, "[num_blocks, 2, block_size, kv_heads, head_dim]")


def block_table_of(
    kv_lens: Sequence[int],
    *,
    block_size: int,
    block_ids: IndexLike = None,
    slot_mapping: IndexLike = None,
) -> BlockTable:
    """The block table of a cache that is not empty; block ids are those of a single sequence."""
    if (block_ids is None) == (slot_mapping is None):
        raise SchemaError("give either block_ids or slot_mapping")
    tokens = sum(kv_lens)
    try:
        if slot_mapping is not None:
            table = BlockTable.of_slots(slot_mapping, block_size=block_size)
            if table.tokens != tokens:
                raise SchemaError(f"{table.tokens} slots, but kv_lens say {tokens} tokens")
            return table
        assert block_ids is not None
        if len(kv_lens) != 1:
            raise SchemaError(
                f"block_ids are one sequence's, but there are {len(kv_lens)} kv_lens; "
                "give a slot_mapping"
            )
        return BlockTable.of_blocks(block_ids, block_size=block_size, tokens=tokens)
    except SchemaError as error:
        raise SchemaError(f"K and V of every layer: {error}") from None


def paged_layers(
    key_cache: PoolLayers, value_cache: PoolLayers | None, block_table: BlockTable, layout: str
) -> dict[str, list[PagedTensor]]:
    """The layers by the wire's name of the part; in layout "ND", `key_cache` holds the latents."""
    if layout not in PARTS:
        raise SchemaError(f"layout {layout!r}; must be one of {', '.join(PARTS)}")
    parts = PARTS[layout]
    given = [key_cache] if value_cache is None else [key_cache, value_cache]
    if len(parts) != len(given):
        raise SchemaError(f"layout {layout!r} has {len(parts)} pools a layer, {len(given)} given")
    layers: dict[str, list[PagedTensor]] = {part: [] for part in parts}
    for part, pools in zip(parts, given, strict=True):
        for layer, pool in enumerate(pools):
            where = f"layer {layer}, {PART_WORDS[part]}"
            if pool is None:
                raise SchemaError(f"{where} is missing")
            layers[part].append(PagedTensor(pool, block_table, where))
    for key, value in zip(layers[parts[0]], layers[parts[-1]], strict=False):
        if key.pool.shape != value.pool.shape:
            raise SchemaError(
                f"{value.where}: a pool of {list(value.pool.shape)}, "
                f"while its K is {list(key.pool.shape)}"
            )
    return layers


def _split(
    layers: PoolLayers, side: int, shape: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plain = [check_strided(layer, f"layer {n}, K and V") for n, layer in enumerate(layers)]
    for index, layer in enumerate(plain):
        if layer.dim() != 5 or layer.shape[side] != 2:
            raise SchemaError(f"layer {index}, K and V: {list(layer.shape)}; wanted {shape}")
    keys, values = ([layer.select(side, which) for layer in plain] for which in (0, 1))
    return keys, values
