"""Paged KV of an AR stage: its memory, and which blocks of it are free."""

from __future__ import annotations

import dataclasses
from collections import deque

import torch

from omni_kvlink.engine.errors import EngineAsleepError
from omni_kvlink.errors import CapacityError


class BlockManager:
    """Which blocks of the pools are free. Not thread-safe: the scheduler alone uses it."""

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: 1 or more of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = deque(range(num_blocks))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks a number of tokens needs."""
        return -(-tokens // self.block_size)

    def can_allocate(self, blocks: int) -> bool:
        """Whether so many blocks are free."""
        return blocks <= len(self._free)

    def allocate(self, blocks: int) -> list[int]:
        """Take blocks; CapacityError if fewer are free."""
        if not self.can_allocate(blocks):
            text = f"{blocks} blocks of {self.block_size} tokens needed, {self.num_free} of "
            text += f"{self.num_blocks} are free: raise num_blocks"
            raise CapacityError(text, requested=blocks, free=self.num_free)
        taken = [self._free.popleft() for _ in range(blocks)]
        self._taken.update(taken)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Free blocks; ValueError if one is free already, or named twice."""
        unknown = sorted(set(blocks) - self._taken)
        if unknown or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {unknown or blocks} are free already, or named twice")
        self._taken.difference_update(blocks)
        self._free.extend(blocks)


@dataclasses.dataclass(eq=False, kw_only=True)
class KVPools:
    """The memory: K and V of each layer, `[num_blocks, block_size, *row]`; asleep after `sleep`.

    `row` is the shape of one token in one layer, `(kv_heads, head_dim)`.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    row: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self._pools: list[list[torch.Tensor]] = []  # K and V
        self.wake_up()

    @property
    def keys(self) -> list[torch.Tensor]:
        """K, a pool for each layer."""
        return self._awake()[0]

    @property
    def values(self) -> list[torch.Tensor]:
        """V, a pool for each layer."""
        return self._awake()[1]

    def sleep(self) -> None:
        """Release the memory and its contents."""
        self._pools = []

    def wake_up(self) -> None:
        """Allocate the memory again, uninitialized."""
        shape, layers = (self.num_blocks, self.block_size, *self.row), range(self.num_layers)
        self._pools = self._pools or [
            [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in layers]
            for _ in ("K", "V")
        ]

    def _awake(self) -> list[list[torch.Tensor]]:
        if not self._pools:
            raise EngineAsleepError("the KV pools are asleep: wake_up(['kv_cache']) first")
        return self._pools
