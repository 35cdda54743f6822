"""Paged tensors: tokens in the blocks of a pool, found by block ids or by a slot mapping.

Pools of layers hold K, V or both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from omni_kvlink._native import host
from omni_kvlink.errors import SchemaError
from omni_kvlink.payload.branches import PART_WORDS, PARTS, as_int
from omni_kvlink.payload.tensor_memory import (
    Where,
    address_of,
    check_strided,
    extent_of,
    readable,
    writable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Index: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

PoolLayers: TypeAlias = Sequence[torch.Tensor]
"""One pool `[num_blocks, block_size, *token]` a layer."""

IndexLike: TypeAlias = Sequence[int] | torch.Tensor | None

STEP = 512 << 10
"""Bytes copied at a time, so that temporaries of torch stay in the second-level cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BlockTable:
    """The places of one sequence's tokens in a pool of blocks; the same for every layer.

    Made by `of_blocks` or `of_slots`; checked against a pool by `PagedTensor`. `index` (int64) has
    block ids in the sequence's order or, if `by_slot`, one slot a token.
    """

    def __init__(self, index: Index, tokens: int, block_size: int, *, by_slot: bool):
        self.index, self.tokens, self.block_size, self.by_slot = index, tokens, block_size, by_slot
        word = "slot" if by_slot else "block id"
        if index.min() < 0:
            raise SchemaError(f"{word} {index.min()} is negative")
        ordered = np.sort(index)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise SchemaError(f"{word} {twice[0]} occurs twice")
        self.address: int = index.ctypes.data
        self.highest = int(ordered[-1])

    def __repr__(self) -> str:
        what = "slots" if self.by_slot else f"blocks of {self.block_size}"
        return f"<BlockTable: {self.tokens} tokens in {len(self.index)} {what}>"

    @classmethod
    def of_blocks(
        cls, block_ids: Sequence[int] | torch.Tensor, *, block_size: int, tokens: int
    ) -> BlockTable:
        """The table of the first `tokens` tokens in these blocks, in this order.

        Blocks beyond the tokens are left out; the last one may be partly filled. SchemaError if
        there are too few blocks, or one occurs twice.
        """
        block_size, tokens = _check_sizes(block_size, tokens)
        index = _int64(block_ids)
        needed = -(-tokens // block_size)
        if len(index) < needed:
            raise SchemaError(
                f"{len(index)} blocks of {block_size} tokens for {tokens} tokens; wanted {needed}"
            )
        return cls(index[:needed], tokens, block_size, by_slot=False)

    @classmethod
    def of_slots(cls, slots: Sequence[int] | torch.Tensor, *, block_size: int) -> BlockTable:
        """The table of tokens of which number i lies in slot `slots[i]`.

        That is slot % block_size of block slot // block_size. SchemaError if there is none, one is
        negative, or one occurs twice.
        """
        index = _int64(slots)
        block_size, tokens = _check_sizes(block_size, len(index))
        return cls(index, tokens, block_size, by_slot=True)

    def first(self, tokens: int) -> BlockTable:
        """The table of the first `tokens` tokens."""
        entries = tokens if self.by_slot else -(-tokens // self.block_size)
        return BlockTable(self.index[:entries], tokens, self.block_size, by_slot=self.by_slot)

    def blocks(self) -> list[int]:
        """The blocks used, each once, in the order of the tokens."""
        index = self.index // self.block_size if self.by_slot else self.index
        return list(dict.fromkeys(index.tolist()))

    def reach(self) -> int:
        """The highest block used."""
        return self.highest // self.block_size if self.by_slot else self.highest


class PagedTensor:
    """One layer's K, V or latent in a pool of blocks; accepted wherever a dense tensor is.

    Args:
        pool: `[num_blocks, block_size, *token]`, any strides. `split_stacked` and `split_packed`
            make such views of pools that hold K and V.
        block_table: which tokens; SchemaError if the pool does not have these blocks.
        where: the tensor's name in errors, such as "layer 3, K".

    Its `shape` is `[tokens, *token]`, as if it were dense.
    """

    def __init__(self, pool: torch.Tensor, block_table: BlockTable, where: str = "pool"):
        pool = check_strided(pool, where)
        if not isinstance(block_table, BlockTable):
            text = f"block_table: a {type(block_table).__name__}, wanted a BlockTable"
            raise SchemaError(f"{where}: {text}; BlockTable.of_blocks and of_slots make one")
        if pool.dim() < 3 or pool.shape[1] != block_table.block_size:
            raise SchemaError(
                f"{where}: a pool of {list(pool.shape)}; "
                f"wanted [num_blocks, {block_table.block_size}, …] for this block size"
            )
        if block_table.reach() >= pool.shape[0]:
            word = "slot" if block_table.by_slot else "block id"
            raise SchemaError(
                f"{where}: {word} {block_table.highest} is outside the pool's "
                f"{pool.shape[0]} blocks"
            )
        self.pool, self.block_table, self.where = pool, block_table, where
        self.shape = torch.Size((block_table.tokens, *pool.shape[2:]))
        self.dtype, self.device = pool.dtype, pool.device
        self._blocks = pool.shape[0]

    def __repr__(self) -> str:
        return f"<PagedTensor {list(self.shape)} {self.dtype} on {self.device}: {self.where}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, not of the pool."""
        return self.shape.numel() * self.dtype.itemsize

    def alias(self) -> torch.Tensor:
        """The pool, whatever becomes of it; SchemaError if its shape is another one by now."""
        pool = self.pool.detach()
        before = (self._blocks, self.block_table.block_size, *self.shape[1:])
        if pool.shape != before or pool.dtype != self.dtype:
            raise SchemaError(
                f"{self.where}: the pool is {pool.dtype} {list(pool.shape)} now, and was "
                f"{self.dtype} {list(before)} when its block table was checked"
            )
        return pool

    def packed(self, where: Where, *, writing: bool) -> host.PackedView:
        """Do what `packed_view` does, for the pool and the block table."""
        pool, table = self.alias(), self.block_table
        shape, size = pool.shape, pool.element_size()
        template = _packed_pool(shape, pool.stride(), size, len(table.index), table.by_slot)
        if not template or pool.is_neg():
            return ()
        address = address_of(pool, where, writing=writing)
        return host.packed_view_at(template, address, extent_of(pool), index=table.address)

    def first(self, tokens: int) -> PagedTensor:
        """The first `tokens` tokens, in the same pool."""
        return PagedTensor(self.pool, self.block_table.first(tokens), self.where)

    def dense(self) -> torch.Tensor:
        """The tokens as a new tensor."""
        tokens = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for _ in self.read(tokens):
            pass
        return tokens

    def fill(self, tokens: torch.Tensor) -> None:
        """Write tokens of this shape and dtype, on any device, into the pool."""
        for _ in self.write(tokens):
            pass

    def read(self, target: torch.Tensor) -> Iterator[int]:
        """Copy the tokens into a tensor of their shape, yielding how many are done.

        Temporary memory is bounded by `STEP`, or by one block where that is larger.
        """
        pool, target = _alike(readable(self.alias(), self.where), target)
        direct = pool.device == target.device and not pool.is_neg()
        for start, stop, rows in self._steps(pool.device):
            part = target[start:stop]
            if direct and len(rows) == 1:
                part = part.view(-1, self.block_table.block_size, *part.shape[1:])
                torch.index_select(pool, 0, rows[0], out=part)
            else:
                part.copy_(pool[rows].reshape(part.shape))
            yield stop

    def write(self, source: torch.Tensor) -> Iterator[int]:
        """Copy a tensor of the tokens' shape into the pool, yielding how many are done."""
        pool, source = _alike(writable(self.alias(), self.where), source)
        for start, stop, rows in self._steps(pool.device):
            part = source[start:stop].to(pool.device)
            if len(rows) == 1:
                part = part.view(-1, self.block_table.block_size, *part.shape[1:])
            pool[rows] = part
            yield stop

    def _steps(self, device: torch.device) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
        """First and last token of each step, and its blocks, or block and slot of each token."""
        table = self.block_table
        index = torch.from_numpy(table.index).to(device)
        size, tokens = table.block_size, table.tokens
        at_once = max(1, STEP * tokens // self.nbytes)
        start = 0
        if not table.by_slot:
            start = tokens // size * size
            blocks = max(1, at_once // size)
            for first in range(0, start // size, blocks):
                last = min(first + blocks, start // size)
                yield first * size, last * size, (index[first:last],)
            index = index[-1] * size + torch.arange(tokens - start, device=device)
        for first in range(start, tokens, at_once):
            slots = index[first - start :][:at_once]
            yield first, first + len(slots), (slots // size, slots % size)


@functools.lru_cache(maxsize=64)
def _packed_pool(
    shape: torch.Size, strides: tuple[int, ...], itemsize: int, entries: int, by_slot: bool
) -> host.PackedView:
    """A pool's packed view without addresses, the same for all layers; empty if it has none."""
    inner = 2 if by_slot else 1  # the dimensions that are not looked up
    unused = (host.DIMS - 1) - (len(shape) - inner)
    if unused < 0:
        return ()
    sizes = (entries, *(1,) * unused, *shape[inner:])
    steps = (strides[0], *(0,) * unused, *strides[inner:])
    view = host.packed_view(
        0, 0, itemsize, sizes=sizes, strides=[stride * itemsize for stride in steps]
    )
    if not by_slot:
        return host.packed_indexed_view(view, 0, limit=shape[0])
    return host.packed_indexed_view(
        view, 0, limit=shape[0] * shape[1], split=shape[1], stride=strides[1] * itemsize
    )


def _alike(pool: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool and tensor as integers of one width: torch cannot index every dtype."""
    other = other.detach()
    if pool.is_neg() or other.is_neg():
        return pool, other
    bits = _BITS[pool.dtype.itemsize]
    return pool.view(bits), other.view(bits)


def _check_sizes(block_size: int, tokens: int) -> tuple[int, int]:
    size, count = as_int(block_size), as_int(tokens)
    if type(size) is not int or type(count) is not int or size < 1 or count < 1:
        raise SchemaError(f"block_size {block_size!r}, {tokens!r} tokens; both must be 1 or more")
    return size, count


def _int64(values: Sequence[int] | torch.Tensor) -> Index:
    """A private copy: what was checked cannot change afterwards."""
    plain: object = values
    if isinstance(values, torch.Tensor):
        plain = readable(check_strided(values, "block ids or slots"), "").cpu().numpy()
    try:
        array = np.array(plain)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{array.dtype} values")
        return array.astype(np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"block ids and slots are integers: {error}") from None


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
