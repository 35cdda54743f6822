"""Paged KV of an AR stage: its memory, and which blocks of it are free."""

from __future__ import annotations

from collections import deque

import torch

from omni_kvlink.engine.errors import EngineAsleepError
from omni_kvlink.errors import CapacityError


class BlockManager:
    """Which blocks of the pools are free. Not thread-safe: the scheduler alone uses it.

    Args:
        num_blocks: how many blocks there are.
        block_size: tokens in each.
    """

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
        """Take blocks.

        Raises:
            CapacityError: fewer are free.
        """
        if not self.can_allocate(blocks):
            raise CapacityError(
                f"{blocks} blocks of {self.block_size} tokens needed, {len(self._free)} of "
                f"{self.num_blocks} are free: raise num_blocks",
                requested=blocks,
                free=len(self._free),
            )
        taken = [self._free.popleft() for _ in range(blocks)]
        self._taken.update(taken)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Free blocks.

        Raises:
            ValueError: one is free already, or named twice.
        """
        unknown = sorted(set(blocks) - self._taken)
        if unknown or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {unknown or blocks} are free already, or named twice")
        self._taken.difference_update(blocks)
        self._free.extend(blocks)


class KVPools:
    """The memory: K and V of each layer, `[num_blocks, block_size, *row]`.

    Args:
        row: the shape of one token in one layer, `(kv_heads, head_dim)`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        row: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_layers, self.block_size, self.device = num_layers, block_size, device
        self.dtype, self._shape = dtype, (num_blocks, block_size, *row)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.wake_up()

    @property
    def keys(self) -> list[torch.Tensor]:
        """K, a pool for each layer; raises EngineAsleepError while the pools are asleep."""
        self._check_awake()
        return self._keys

    @property
    def values(self) -> list[torch.Tensor]:
        """V, a pool for each layer; raises EngineAsleepError while the pools are asleep."""
        self._check_awake()
        return self._values

    def sleep(self) -> None:
        """Release the memory and its contents."""
        self._keys, self._values = [], []

    def wake_up(self) -> None:
        """Allocate the memory again, uninitialized."""
        if not self._keys:
            self._keys, self._values = (
                [self._pool() for _ in range(self.num_layers)] for _ in range(2)
            )

    def _pool(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self.dtype, device=self.device)

    def _check_awake(self) -> None:
        if not self._keys:
            raise EngineAsleepError("the KV pools are asleep: wake_up(['kv_cache']) first")
