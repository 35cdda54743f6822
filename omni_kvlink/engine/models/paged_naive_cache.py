"""`PagedNaiveCache`: BAGEL's cache in the blocks of an AR stage, sent from there without a copy."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch

from omni_kvlink.adapters import PagedAdapter, PagedCache
from omni_kvlink.errors import CapacityError, SchemaError
from omni_kvlink.models.bagel import NaiveCache
from omni_kvlink.models.bagel.cache import Layer, joined

if TYPE_CHECKING:
    from omni_kvlink import KVCacheTransferData, KVMetadata
    from omni_kvlink.engine.kv.block_manager import KVPools


class SequenceBlocks:
    """One sequence in the pools: its blocks, in token order, and how many slots are claimed.

    The first slots may have K and V already, of the tokens `cached_ids`; they are only read.
    """

    def __init__(self, pools: KVPools, block_ids: list[int], cached_ids: Sequence[int] = ()):
        self.pools, self.block_ids, self.claimed = pools, block_ids, 0
        self.cached_ids = list(cached_ids)
        size = pools.block_size
        blocks = torch.tensor(block_ids, dtype=torch.long)
        self._slots = (blocks[:, None] * size + torch.arange(size)).flatten().to(pools.device)

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


class PagedNaiveCache(NaiveCache):
    """A NaiveCache whose rows are in blocks; reading a layer gathers it.

    Extending it returns a new cache: a longer prefix of the same table if this cache ends where the
    table does, else a copy in memory of its own.
    """

    def __init__(self, table: SequenceBlocks, tokens: int = 0, *, is_snapshot: bool = False):
        self.table, self.tokens = table, tokens
        self._is_snapshot = is_snapshot
        self._rows = range(0)
        self.key_cache = _PagedLayers(table, table.pools.keys, tokens)
        self.value_cache = _PagedLayers(table, table.pools.values, tokens)

    @property
    def seq_lens(self) -> int:
        """How many tokens it has."""
        return self.tokens

    def after(self, rows: int) -> NaiveCache:
        """A prefix of the table that is longer by `rows`."""
        if self._is_snapshot or self.tokens != self.table.claimed:
            return super().after(rows)
        claimed = self.table.claim(rows)
        cache = PagedNaiveCache(self.table, claimed.stop)
        cache._rows = claimed
        return cache

    def with_cached(self, token_ids: Sequence[int]) -> NaiveCache:
        """A prefix of the table that is longer by the tokens that its blocks have already."""
        if self._is_snapshot or self.tokens != self.table.claimed:
            return self
        return PagedNaiveCache(self.table, self.table.claim_cached(token_ids))

    def merge(self, layer: int, past: Layer | None, k: torch.Tensor, v: torch.Tensor) -> Layer:
        """Write the new rows to their slots; returns all rows of the layer, for attention."""
        self.table.write(self.table.pools.keys[layer], self._rows, k)
        self.table.write(self.table.pools.values[layer], self._rows, v)
        return joined(past, k, v)

    def snapshot(self) -> NaiveCache:
        """A cache of the same rows that is continued elsewhere."""
        return PagedNaiveCache(self.table, self.tokens, is_snapshot=True)

    def export(self, request_id: str, metadata: KVMetadata) -> KVCacheTransferData:
        """The rows in their blocks, for a transfer that reads from there."""
        pools, table = self.table.pools, self.table
        cache = PagedCache(pools.keys, pools.values, pools.block_size, table.block_ids)
        return PagedAdapter().export(cache, request_id=request_id, metadata=metadata)


class _PagedLayers(MutableMapping[int, torch.Tensor | None]):
    """K or V by layer, gathered when it is read; `merge` alone writes it."""

    def __init__(self, table: SequenceBlocks, pools: list[torch.Tensor], tokens: int):
        self._table, self._pools, self._tokens = table, pools, tokens

    def __getitem__(self, layer: int) -> torch.Tensor | None:
        pool = self._pools[layer]
        return self._table.read(pool, self._tokens) if self._tokens else None

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._pools)))

    def __len__(self) -> int:
        return len(self._pools)

    def __setitem__(self, layer: int, rows: torch.Tensor | None) -> None:
        raise TypeError("rows of a paged cache are written by merge()")

    def __delitem__(self, layer: int) -> None:
        raise TypeError("a paged cache keeps all its layers")
