"""A cache in pages: tokens in the blocks of a pool, found by block ids or by a slot mapping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from ..errors import SchemaError

Index: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Pages:
    """Where in a pool of blocks the tokens of one sequence lie; the same for every layer.

    Made by `of_blocks` or `of_slots`; checked against a pool by `Paged`.

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
    ) -> Pages:
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
    def of_slots(cls, slots: Sequence[int] | torch.Tensor, *, block_size: int) -> Pages:
        """Token i lies in slot `slots[i]`: slot % block_size of block slot // block_size.

        Raises:
            SchemaError: there is none, one is negative or stands twice.
        """
        index = _int64(slots)
        _check_sizes(block_size, len(index))
        return cls(index, len(index), block_size, by_slot=True)

    def reach(self) -> int:
        """The highest block used."""
        return self.highest // self.block_size if self.by_slot else self.highest


class Paged:
    """One layer's K, V or latent in a pool; stands where a copier takes a dense tensor.

    Args:
        pool: `[num_blocks, block_size, *token]`, any strides. K of a stacked `[2, …]` or packed
            layout is a view of it, made by whoever knows the layout.
        pages: which tokens.
        where: names it in errors, such as "layer 3, K".

    Raises:
        SchemaError: the pool does not have these pages.
    """

    def __init__(self, pool: torch.Tensor, pages: Pages, where: str = "pool"):
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
        self.pool, self.pages = pool, pages
        self.shape = torch.Size((pages.tokens, *pool.shape[2:]))
        self.dtype, self.device = pool.dtype, pool.device

    def dense(self) -> torch.Tensor:
        """The tokens as a new tensor: a temporary, for copiers that know no pages."""
        blocks, slots = self._rows()
        return self.pool[blocks, slots]

    def fill(self, tokens: torch.Tensor) -> None:
        """Write tokens into their places; the rest of the pool stays as it is."""
        blocks, slots = self._rows()
        self.pool[blocks, slots] = tokens.to(self.device)

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.from_numpy(self.pages.index).to(self.device)
        size = self.pages.block_size
        if not self.pages.by_slot:
            index = (index[:, None] * size + torch.arange(size, device=self.device)).flatten()
            index = index[: self.pages.tokens]
        return index // size, index % size


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
