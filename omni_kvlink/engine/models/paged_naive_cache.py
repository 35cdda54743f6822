"""`PagedNaiveCache`: BAGEL's cache in the blocks of an AR stage, sent from there without a copy."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch

from omni_kvlink.models.bagel import NaiveCache
from omni_kvlink.models.bagel.cache import Layer, joined

if TYPE_CHECKING:
    from omni_kvlink import KVCacheTransferData, KVMetadata
    from omni_kvlink.engine.kv.sequence_blocks import SequenceBlocks


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
        """The number of its tokens."""
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
        self.table.on_written(layer, self.tokens)
        return joined(past, k, v)

    def snapshot(self) -> NaiveCache:
        """A cache of the same rows that is continued elsewhere."""
        return PagedNaiveCache(self.table, self.tokens, is_snapshot=True)

    def export(self, request_id: str, metadata: KVMetadata) -> KVCacheTransferData:
        """The rows in their blocks, for a transfer that reads from there."""
        return self.table.export(request_id, metadata)


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
