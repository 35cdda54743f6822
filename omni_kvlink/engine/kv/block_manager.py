"""Paged KV of an AR stage: its memory, and which blocks of it are free."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, deque
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from omni_kvlink.engine.errors import EngineAsleepError
from omni_kvlink.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockManager:
    """The free blocks of the pools, and those whose KV is known by a hash.

    A block may be used by several requests. One that nobody uses is free, and keeps what it is
    known by until it is allocated: blocks without a hash first, then the least recently used.
    Not thread-safe: the scheduler alone uses it.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens: 1 or more of each")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_evicted = 0
        self._free = deque(range(num_blocks))  # without a hash
        self._unused: OrderedDict[int, bytes] = OrderedDict()  # free with a hash, oldest first
        self._users: Counter[int] = Counter()  # of each block that is not free
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """The number of blocks that have a hash."""
        return len(self._hashes)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that so many tokens need."""
        return -(-tokens // self.block_size)

    def can_allocate(self, blocks: int) -> bool:
        """Whether so many blocks are free."""
        return blocks <= self.num_free

    def allocate(self, blocks: int) -> list[int]:
        """Take blocks; CapacityError if fewer are free."""
        if not self.can_allocate(blocks):
            text = f"{blocks} blocks of {self.block_size} tokens needed, {self.num_free} of "
            text += f"{self.num_blocks} are free: raise num_blocks"
            raise CapacityError(text, requested=blocks, free=self.num_free)
        taken = [self._free.popleft() if self._free else self._evict() for _ in range(blocks)]
        self._users.update(taken)
        return taken

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the first hashes, as far as they are known."""
        blocks = takewhile(lambda block: block is not None, map(self._by_hash.get, hashes))
        return [block for block in blocks if block is not None]

    def share(self, blocks: Sequence[int]) -> None:
        """Use blocks that `find` returned, also those that others use."""
        for block in blocks:
            self._unused.pop(block, None)
        self._users.update(blocks)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Let a block in use be found, once its KV is computed; the first of a hash is kept."""
        if not self._users[block]:
            raise ValueError(f"block {block} is free: its KV may change")
        if block_hash not in self._by_hash and block not in self._hashes:
            self._by_hash[block_hash], self._hashes[block] = block, block_hash

    def free(self, blocks: Sequence[int]) -> None:
        """End one use of each; ValueError if one is free already, or named twice."""
        unknown = sorted(block for block in set(blocks) if not self._users[block])
        if unknown or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {unknown or blocks} are free already, or named twice")
        for block in reversed(blocks):  # the end of a prefix is of less use than its beginning
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._hashes:
                self._unused[block] = self._hashes[block]
            else:
                self._free.append(block)

    def forget(self) -> None:
        """Forget all hashes, such as of KV that other weights computed."""
        self._free.extend(self._unused)
        self._unused.clear()
        self._by_hash.clear()
        self._hashes.clear()

    def _evict(self) -> int:
        block, block_hash = self._unused.popitem(last=False)
        del self._by_hash[block_hash], self._hashes[block]
        self.num_evicted += 1
        return block


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

    @property
    def is_awake(self) -> bool:
        """Whether the memory is there."""
        return bool(self._pools)

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
