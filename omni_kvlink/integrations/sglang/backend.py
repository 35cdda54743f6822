"""`KVLinkHiCache`: SGLang's third level as pages that are kept for any number of engines."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink import ReceivedBatch
from omni_kvlink.errors import IntegrityError, KVLinkError, SchemaError, UnavailableError
from omni_kvlink.integrations.sglang.pool_pages import PoolPages
from omni_kvlink.integrations.sglang.pool_rank import PoolRank
from omni_kvlink.integrations.store_settings import StoreSettings

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.memory_pool_host import (
        DeepSeekV4PagedHostPool,
        DeepSeekV4StateHostPool,
        LogicalHostPool,
    )
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
except ImportError as error:
    raise UnavailableError(
        f"SGLang cannot be imported: {error}; `pip install sglang==0.5.23` installs it "
        "(docs/guides/hicache.md)"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )


log = logging.getLogger(f"sglang.{__name__}")

SECTION = "kvlink"
"""The key of the settings in SGLang's extra configuration, which has keys of its own."""

PRUNE_FROM = 4096
"""Names of stored pages, at which those that were evicted are looked for."""

REPLICATED = (
    MLATokenToKVPoolHost,
    DSAIndexerPoolHost,
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
"""Pools of which every tensor rank of an MLA model has the same bytes; others' are its own."""


class _Pool:
    """A registered pool: its pages, and the request ids of their keys."""

    def __init__(self, pages: PoolPages, name: str, key: Callable[[str], str]):
        self.pages, self.name, self.key = pages, name, key


class KVLinkHiCache(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """Keeps pages of the host pools in this process, and reads those of other engines.

    A page is copied once from the pool when it is stored, and once, with each byte checked, into
    the pool when it is loaded. What is not there, is damaged, or is of another layout, is a miss,
    which `counters` counts by its reason. Thread-safe, as SGLang requires.

    Raises:
        SchemaError: a setting is missing or invalid, or SGLang was not told the model's name.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, _options: dict[str, Any] | None = None
    ):
        extra = storage_config.extra_config or {}
        if not isinstance(extra.get(SECTION), dict):
            raise SchemaError(f"{SECTION} is missing in the extra configuration: a map of settings")
        settings = StoreSettings.read(extra[SECTION], f"{SECTION}.")
        if not storage_config.model_name:
            raise SchemaError("SGLang has not named the model: start it with --served-model-name")
        self._config, self._shard = storage_config, PoolRank(storage_config)
        self._settings = dataclasses.replace(
            settings,
            serve=self._shard.serve(settings.serve),
            peers=self._shard.peers(settings.peers, settings.serve),
        )
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._stored: dict[str, None] = {}
        self._prune_at = PRUNE_FROM
        self._client = self._settings.client()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take SGLang's pool of K and V.

        Raises:
            SchemaError: its pages cannot be stored, or are bytes of a dtype that nobody has named.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)
        dtypes = {str(dtype) for dtype in self._pools[PoolName.KV].pages.dtypes}
        if "torch.uint8" in dtypes and not self._settings.dtype:
            raise SchemaError(
                f"{SECTION}.dtype is missing: the pool stores uint8, which may be any 8-bit type; "
                'name it, such as "fp8_e4m3"'
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take one of a hybrid model's pools; SchemaError if its pages cannot be stored."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name, pages = str(host_pool_name), PoolPages(host_pool, str(host_pool_name))
        is_replicated = self._config.is_mla_model and isinstance(host_pool, REPLICATED)
        shard = self._shard.name(is_replicated=is_replicated)
        identity = self._settings.identity(str(self._config.model_name), layout=pages.layout)
        self._pools[host_pool_name] = _Pool(
            pages, name, lambda key: identity.key(f"hicache/{name}/{key}/{shard}")
        )

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """The number of pages of K and V that are kept, up to the first one that is not."""
        return _leading(self._contains(self._pools[PoolName.KV], keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix of which each pool has what its policy needs, and each pool's own."""
        pages = self.batch_exists(keys)
        prefixes, hits = set(range(1, pages + 1)), {PoolName.KV: pages}
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of pages that are there: it limits nothing
            is_there = self._contains(self._pools[transfer.name], keys[:pages])
            window = len(is_there)
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
            ends = range(1, len(is_there) + 1)
            covered = {end for end in ends if all(is_there[max(0, end - window) : end])}
            hits[transfer.name] = max(covered, default=0)
            prefixes &= covered
        counted = {name: number for name, number in hits.items() if number}
        return PoolTransferResult(max(prefixes, default=0), counted, sorted(prefixes))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Keep pages of the pool of K and V; whether each is kept."""
        return self._set(self._pools[PoolName.KV], keys, host_indices)

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages into the pool of K and V, each byte checked; whether each was there."""
        return self._get(self._pools[PoolName.KV], keys, host_indices)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Keep pages of several pools; for each pool, whether each page is kept."""
        return {transfer.name: self._transfer(self._set, transfer) for transfer in transfers}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Copy pages into several pools; for each pool, whether each page was there."""
        return {transfer.name: self._transfer(self._get, transfer) for transfer in transfers}

    def exists(self, key: str) -> bool:
        """Whether a page of K and V is kept."""
        return bool(self.batch_exists([key]))

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep one page, as SGLang made it flat; without `interface_v1` it is copied twice."""
        if value is None:
            raise SchemaError("value=None: a flat page of the pool of K and V")
        pool = self._pools[PoolName.KV]
        return self._put(pool, key, pool.pages.of_flat(value))

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copy one page into a flat tensor, and return that; None if it is not there."""
        if target_location is None:
            raise SchemaError("target_location=None: a flat page of the pool of K and V")
        pool = self._pools[PoolName.KV]
        [is_there] = self._copy_all(pool, [key], [pool.pages.of_flat(target_location)])
        return target_location if is_there else None

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep flat pages; False if one is not kept."""
        return all(self.set(key, value) for key, value in zip(keys, values or (), strict=True))

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Copy pages into flat tensors; None for each that is not there."""
        return [self.get(key, into) for key, into in zip(keys, target_locations or (), strict=True)]

    def clear(self) -> None:
        """Keep none of the pages that this process has stored, here and in the stores."""
        with self._lock:
            stored, self._stored = self._stored, {}
        for name in stored:
            self._client.withdraw(name)

    def counters(self) -> dict[str, Any]:
        """Hits by where they were, misses by their reason, and the state of stores and peers."""
        counted = self._client.stats()
        with self._lock:
            counted["misses"] = {**counted["misses"], **self._counts}
        return counted

    def close(self) -> None:
        """Close the links: pages that no store has fetched are lost."""
        self._client.close()

    def _contains(self, pool: _Pool, keys: Iterable[str]) -> list[bool]:
        return self._client.contains([pool.key(key) for key in keys])

    def _transfer(
        self,
        move: Callable[[_Pool, Sequence[str], torch.Tensor], list[bool]],
        transfer: PoolTransfer,
    ) -> list[bool]:
        keys, slots = transfer.keys or [], transfer.host_indices
        pool = self._pools[transfer.name]
        if slots is None or slots.numel() != len(keys) * pool.pages.slots:
            count = 0 if slots is None else slots.numel()
            log.error("%s: %s slots for %s pages", pool.name, count, len(keys))
            return [False] * len(keys)
        return move(pool, keys, slots)

    def _set(self, pool: _Pool, keys: Sequence[str], slots: torch.Tensor) -> list[bool]:
        firsts = slots[:: pool.pages.slots].tolist()
        return [
            self._put(pool, key, pool.pages.tensors(first))
            for key, first in zip(keys, firsts, strict=True)
        ]

    def _get(self, pool: _Pool, keys: Sequence[str], slots: torch.Tensor) -> list[bool]:
        firsts = slots[:: pool.pages.slots].tolist()
        return self._copy_all(pool, keys, [pool.pages.tensors(first) for first in firsts])

    def _copy_all(
        self, pool: _Pool, keys: Sequence[str], targets: Sequence[dict[str, torch.Tensor]]
    ) -> list[bool]:
        """Copy pages out, which are got and released together; which of them are there."""
        results = self._client.get_many([pool.key(key) for key in keys])
        numbers = [number for number, page in enumerate(results) if page is not None]
        with (batch := ReceivedBatch([page for page in results if page is not None])):
            errors = batch.scatter_each([targets[number] for number in numbers])
        are_copied = [False] * len(keys)
        for number, error in zip(numbers, errors, strict=True):
            are_copied[number] = self._is_copied(error)
        return are_copied

    def _put(self, pool: _Pool, key: str, tensors: dict[str, torch.Tensor]) -> bool:
        name = pool.key(key)
        try:
            self._client.put(name, tensors)
        except KVLinkError as error:
            log.warning("a page of %s is not kept: %s", pool.name, error)
            return False
        self._remember(name)
        return True

    def _remember(self, name: str) -> None:
        """Note what `clear` withdraws, and now and then drop what was evicted since."""
        with self._lock:
            self._stored[name] = None
            if len(self._stored) < self._prune_at:
                return
            stored, self._prune_at = list(self._stored), 2 * self._prune_at
        is_there = self._client.contains(stored)
        gone = [name for name, is_kept in zip(stored, is_there, strict=True) if not is_kept]
        with self._lock:
            for name in gone:
                self._stored.pop(name, None)
            self._prune_at = 2 * len(self._stored) + PRUNE_FROM

    def _is_copied(self, error: KVLinkError | None) -> bool:
        """Whether a page was copied; False, counted, if it is damaged, or of another layout."""
        if error is None:
            return True
        if not isinstance(error, (SchemaError, IntegrityError)):
            raise error
        with self._lock:
            self._counts["layout" if isinstance(error, SchemaError) else "damaged"] += 1
        return False


def _leading(is_there: Sequence[bool]) -> int:
    """The number of pages before the first that is not there."""
    return is_there.index(False) if False in is_there else len(is_there)
