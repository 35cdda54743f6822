"""A cache in pages: tokens in the blocks of a pool, found by block ids or by a slot mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from omni_kvlink.errors import SchemaError

Index: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

STEP = 512 << 10
"""Bytes copied at a time: what torch makes of them on the way stays in the second-level cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BlockTable:
    """Where in a pool of blocks the tokens of one sequence lie; the same for every layer.

    Made by `of_blocks` or `of_slots`; checked against a pool by `PagedTensor`.

    Attributes:
        tokens: how many there are.
        block_size: tokens in one block of the pool.
        index: int64, block ids in the sequence's order, or one slot a token.
        by_slot: which of the two.
    """

    def __init__(self, index: Index, tokens: int, block_size: int, *, by_slot: bool):
        self.index, self.tokens, self.block_size, self.by_slot = index, tokens, block_size, by_slot
        word = "slot" if by_slot else "block id"
        if index.min() < 0:
            raise SchemaError(f"{word} {index.min()} is negative")
        ordered = np.sort(index)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise SchemaError(f"{word} {twice[0]} stands twice")
        self.address: int = index.ctypes.data
        self.highest = int(ordered[-1])

    @classmethod
    def of_blocks(
        cls, block_ids: Sequence[int] | torch.Tensor, *, block_size: int, tokens: int
    ) -> BlockTable:
        """The first `tokens` tokens of these blocks, in this order; blocks beyond are left out.

        Raises:
            SchemaError: too few blocks, or one twice.
        """
        _check_sizes(block_size, tokens)
        index = _int64(block_ids)
        wanted = -(-tokens // block_size)
        if len(index) < wanted:
            raise SchemaError(
                f"{len(index)} blocks of {block_size} tokens for {tokens} tokens; wanted {wanted}"
            )
        return cls(index[:wanted], tokens, block_size, by_slot=False)

    @classmethod
    def of_slots(cls, slots: Sequence[int] | torch.Tensor, *, block_size: int) -> BlockTable:
        """Token i lies in slot `slots[i]`: slot % block_size of block slot // block_size.

        Raises:
            SchemaError: there is none, one is negative or stands twice.
        """
        index = _int64(slots)
        _check_sizes(block_size, len(index))
        return cls(index, len(index), block_size, by_slot=True)

    def first(self, tokens: int) -> BlockTable:
        """Where the first `tokens` of them lie."""
        entries = tokens if self.by_slot else -(-tokens // self.block_size)
        return BlockTable(self.index[:entries], tokens, self.block_size, by_slot=self.by_slot)

    def blocks(self) -> list[int]:
        """The blocks used, each once, in the order in which the tokens come to them."""
        index = self.index // self.block_size if self.by_slot else self.index
        return list(dict.fromkeys(index.tolist()))

    def reach(self) -> int:
        """The highest block used."""
        return self.highest // self.block_size if self.by_slot else self.highest


class PagedTensor:
    """One layer's K, V or latent in a pool of blocks; stands wherever a dense tensor may.

    Args:
        pool: `[num_blocks, block_size, *token]`, any strides. K of a stacked `[2, …]` or packed
            layout is a view of it, made by whoever knows the layout.
        pages: which tokens.
        where: names it in errors, such as "layer 3, K".

    Attributes:
        shape: `[tokens, *token]`, as if it were dense; `dtype` and `device` are the pool's.

    Raises:
        SchemaError: the pool is no plain memory, or does not have these pages.
    """

    def __init__(self, pool: torch.Tensor, pages: BlockTable, where: str = "pool"):
        check_strided(pool, where)
        if pool.dim() < 3 or pool.shape[1] != pages.block_size:
            raise SchemaError(
                f"{where}: a pool of {list(pool.shape)}; "
                f"wanted [num_blocks, {pages.block_size}, …] for this block size"
            )
        if pages.reach() >= pool.shape[0]:
            word = "slot" if pages.by_slot else "block id"
            raise SchemaError(
                f"{where}: {word} {pages.highest} is outside the pool's {pool.shape[0]} blocks"
            )
        self.pool, self.pages, self.where = pool, pages, where
        self.shape = torch.Size((pages.tokens, *pool.shape[2:]))
        self.dtype, self.device = pool.dtype, pool.device

    @property
    def nbytes(self) -> int:
        """Of the tokens, not of the pool."""
        return self.shape.numel() * self.dtype.itemsize

    def first(self, tokens: int) -> PagedTensor:
        """The first `tokens` tokens: the same pool."""
        return PagedTensor(self.pool, self.pages.first(tokens), self.where)

    def dense(self) -> torch.Tensor:
        """The tokens as a new tensor."""
        tokens = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for _ in self.read(tokens):
            pass
        return tokens

    def fill(self, tokens: torch.Tensor) -> None:
        """Write tokens into their places; the rest of the pool stays as it is."""
        for _ in self.write(tokens):
            pass

    def read(self, target: torch.Tensor) -> Iterator[int]:
        """Copy the tokens into a tensor of their shape, yielding how many are done.

        What torch needs on the way is bounded by `STEP`, or by one block where that is larger.
        """
        pool, target = self._alike(target)
        direct = pool.device == target.device and not pool.is_neg()
        for start, stop, rows in self._steps(pool.device):
            part = target[start:stop]
            if direct and len(rows) == 1:
                part = part.view(-1, self.pages.block_size, *part.shape[1:])
                torch.index_select(pool, 0, rows[0], out=part)
            else:
                part.copy_(pool[rows].reshape(part.shape))
            yield stop

    def write(self, source: torch.Tensor) -> Iterator[int]:
        """Copy a tensor of the tokens' shape into their places, yielding how many are done."""
        pool, source = self._alike(source)
        for start, stop, rows in self._steps(pool.device):
            part = source[start:stop].to(pool.device)
            if len(rows) == 1:
                part = part.view(-1, self.pages.block_size, *part.shape[1:])
            pool[rows] = part
            yield stop

    def _alike(self, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pool and tensor as integers of their size: torch cannot look up every dtype."""
        pool, other = self.pool.detach(), other.detach()
        if pool.is_neg() or other.is_neg():
            return pool, other
        bits = _BITS[pool.dtype.itemsize]
        return pool.view(bits), other.view(bits)

    def _steps(self, device: torch.device) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
        """First token, last token, and where: whole blocks, or block and slot of each token."""
        index = torch.from_numpy(self.pages.index).to(device)
        size, tokens = self.pages.block_size, self.pages.tokens
        at_once = max(1, STEP * tokens // self.nbytes)
        start = 0
        if not self.pages.by_slot:
            start = tokens // size * size
            blocks = max(1, at_once // size)
            for first in range(0, start // size, blocks):
                last = min(first + blocks, start // size)
                yield first * size, last * size, (index[first:last],)
            index = index[-1] * size + torch.arange(tokens - start, device=device)
        for first in range(start, tokens, at_once):
            slots = index[first - start :][:at_once]
            yield first, first + len(slots), (slots // size, slots % size)


def check_strided(tensor: object, where: str) -> None:
    """Refuse what is no tensor in plain memory."""
    if not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"{where} is a {type(tensor).__name__}, wanted a torch.Tensor")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise SchemaError(
            f"{where} is a {tensor.layout} tensor on {tensor.device}, not dense memory"
        )


def _check_sizes(block_size: int, tokens: int) -> None:
    if block_size < 1 or tokens < 1:
        raise SchemaError(f"block_size {block_size}, {tokens} tokens; wanted 1 or more of each")


def _int64(values: Sequence[int] | torch.Tensor) -> Index:
    """A private copy: what was checked cannot change afterwards."""
    plain = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    try:
        array = np.array(plain)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{array.dtype} values")
        return array.astype(np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"block ids and slots are integers: {error}") from None
