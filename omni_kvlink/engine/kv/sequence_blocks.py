"""`SequenceBlocks`: one sequence in the blocks of an AR stage, sent from there without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink.adapters import PagedAdapter, PagedCache
from omni_kvlink.errors import CapacityError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink import KVCacheTransferData, KVMetadata
    from omni_kvlink.engine.kv.block_manager import KVPools


class SequenceBlocks:
    """One sequence in the pools: its blocks, in token order, and how many slots are claimed.

    The first slots may have K and V already, of the tokens `cached_ids`; they are only read.
    """

    def __init__(self, pools: KVPools, block_ids: list[int], cached_ids: Sequence[int] = ()):
        self.pools, self.block_ids, self.claimed = pools, block_ids, 0
        self.cached_ids = list(cached_ids)
        self._total = -1  # of `watch`
        self._on_layer: Callable[[int], None] = _ignore
        size = pools.block_size
        blocks = torch.tensor(block_ids, dtype=torch.long)
        self._slots = (blocks[:, None] * size + torch.arange(size)).flatten().to(pools.device)

    def watch(self, tokens: int, on_layer: Callable[[int], None]) -> None:
        """Have `on_layer` called with each layer in which K and V of so many tokens are written."""
        self._total, self._on_layer = tokens, on_layer

    def on_written(self, layer: int, tokens: int) -> None:
        """K and V of the first tokens are written in a layer: call what `watch` was given."""
        if tokens == self._total:
            self._on_layer(layer)

    def claim(self, rows: int) -> range:
        """Use the next `rows` slots; CapacityError if the blocks have fewer left."""
        start, stop, free = self.claimed, self.claimed + rows, len(self._slots)
        if stop > free:
            text = f"{stop} tokens for {len(self.block_ids)} blocks of {self.pools.block_size}"
            raise CapacityError(text, requested=stop, free=free)
        self.claimed = stop
        return range(start, stop)

    def claim_cached(self, token_ids: Sequence[int]) -> int:
        """Use the slots of those of the next tokens that are cached; returns where they end."""
        expected = self.cached_ids[self.claimed : self.claimed + len(token_ids)]
        if list(token_ids[: len(expected)]) != expected:
            raise SchemaError(
                f"token {self.claimed} and those after it are {token_ids[: len(expected)]!s:.200}, "
                f"their blocks have K and V of {expected!s:.200}"
            )
        return self.claim(len(expected)).stop

    def read(self, pool: torch.Tensor, tokens: int) -> torch.Tensor:
        """Copy the first tokens of a pool into a new tensor, for attention."""
        return pool.flatten(0, 1)[self._slots[:tokens]]

    def write(self, pool: torch.Tensor, rows: range, new: torch.Tensor) -> None:
        """Write rows to the slots that `claim` returned."""
        slots = pool.flatten(0, 1)  # a view: pools are contiguous
        if new.dtype != slots.dtype or new.shape != (len(rows), *slots.shape[1:]):
            raise SchemaError(
                f"new rows are {new.dtype} {list(new.shape)}, the pool's are {slots.dtype} "
                f"{[len(rows), *slots.shape[1:]]}"
            )
        slots[self._slots[rows.start : rows.stop]] = new

    def export(self, request_id: str, metadata: KVMetadata) -> KVCacheTransferData:
        """The first `metadata.seq_len` slots, for a transfer that reads K and V from the blocks."""
        pools = self.pools
        cache = PagedCache(pools.keys, pools.values, pools.block_size, self.block_ids)
        return PagedAdapter().export(cache, request_id=request_id, metadata=metadata)


def _ignore(layer: int) -> None:
    """Nobody waits for the layers."""
