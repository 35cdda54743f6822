"""`KVLinkL2Adapter`: LMCache's second level as payloads that are kept for any number of engines."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from omni_kvlink import ReceivedBatch, TensorTransferData
from omni_kvlink.errors import IntegrityError, KVLinkError, SchemaError, UnavailableError
from omni_kvlink.integrations.lmcache.chunks import PART, bytes_of, layout_of, name_of
from omni_kvlink.integrations.store_settings import StoreSettings

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

    from omni_kvlink.integrations.lmcache.tasks import TaskThread
except ImportError as error:
    raise UnavailableError(
        f"LMCache cannot be imported: {error}; `pip install lmcache==0.5.6` installs it "
        "(docs/guides/lmcache.md)"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

    from omni_kvlink import Received

log = logging.getLogger(f"lmcache.{__name__}")


class KVLinkL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc, unused-ignore]
    """The adapter's settings, from `adapter_params` of LMCache's `--l2-adapter`."""

    def __init__(self, settings: StoreSettings):
        self.settings = settings

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVLinkL2AdapterConfig:
        """Read the settings.

        Raises:
            SchemaError: a ValueError, as LMCache expects; it names the setting.
        """
        return cls(StoreSettings.read(values, "adapter_params."))

    @classmethod
    def help(cls) -> str:
        """Return a text that LMCache prints of the adapter."""
        return "adapter_params: serve, revision, stores, peers, budget, …: docs/guides/lmcache.md"


class KVLinkL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]
    """Keeps chunks in this process, offers them to stores, and reads those of other engines.

    A chunk is copied once when it is stored, and once, with each byte checked, when it is loaded.
    What is not there, is damaged, or has another size, shape or dtype than the memory to load it
    into, is a miss, which `report_status` counts by its reason.

    Thread-safe, as LMCache requires: stores run in one thread, lookups and loads in another. A
    lookup marks chunks as used; it does not lock them, so that a load may miss what was evicted
    since. Chunks are evicted by the link's budget; LMCache need not.
    """

    def __init__(self, config: KVLinkL2AdapterConfig, l1_memory_desc: object = None):
        super().__init__()
        self._settings = config.settings
        self._client = config.settings.client()
        self._key = functools.lru_cache(maxsize=65_536)(self._new_key)
        self._stores, self._lookups = TaskThread[L2StoreResult]("store"), TaskThread[Bitmap]("look")
        self._loads = TaskThread[Bitmap]("load")
        self._sizes: dict[ObjectKey, int] = {}
        self._counting = threading.Lock()
        self._misses = Counter[str]()

    def get_store_event_fd(self) -> int:
        """Readable when a store task has ended."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a lookup task has ended."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Readable when a load task has ended."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Keep chunks; the task succeeds if all are kept."""
        work = functools.partial(self._store, keys, objects)
        return self._stores.submit(work, functools.partial(L2StoreResult, False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """The results of the store tasks that have ended since."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Ask which chunks are kept, here, by stores and by peers; no layout is needed for it."""
        work = functools.partial(self._look_up, keys)
        return self._lookups.submit(work, functools.partial(Bitmap, len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A bit for each key, once; None before."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: a lookup locks nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Copy chunks into LMCache's memory, each byte checked."""
        work = functools.partial(self._load, keys, objects)
        return self._loads.submit(work, functools.partial(Bitmap, len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A bit for each chunk that was loaded, once; None before."""
        return self._loads.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Keep chunks no more, here and in the stores; blocks for no answer."""
        for key in keys:
            self._client.withdraw(self._key(key))
        self._forget(keys)

    def get_usage(self) -> AdapterUsage:
        """Bytes that are kept for this process, by salt; what was evicted is no longer counted."""
        with self._counting:
            keys = list(self._sizes)
        is_kept_list = self._client.contains(map(self._key, keys))
        self._forget([key for key, is_kept in zip(keys, is_kept_list, strict=True) if not is_kept])
        return super().get_usage()

    def report_status(self) -> dict[str, Any]:
        """Chunks kept and missed, and the state of each store and peer."""
        with self._counting:
            misses = dict(self._misses)
        counted = self._client.stats()
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "url": self._client.url,
            "misses": {**counted["misses"], **misses},
            **{name: counted[name] for name in ("hits", "puts", "sources", "offers")},
        }

    def close(self) -> None:
        """End the threads and close the links; chunks that no store has fetched are lost."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._client.close()

    def _new_key(self, key: ObjectKey) -> str:
        identity = self._settings.identity(key.model_name, salt=key.cache_salt)
        return identity.key(name_of(key))

    def _store(self, keys: Sequence[ObjectKey], chunks: Sequence[MemoryObj]) -> L2StoreResult:
        stored, is_whole = {}, True
        for key, chunk in zip(keys, chunks, strict=True):
            tensor = bytes_of(chunk)
            try:
                is_new = self._client.put(self._key(key), {PART: tensor}, layout_of(chunk))
            except KVLinkError as error:
                log.warning("a chunk of %s bytes is not kept: %s", tensor.nbytes, error)
                is_whole = False
                continue
            if is_new:
                stored[key] = tensor.nbytes
        self._forget(stored)  # those that were evicted before
        with self._counting:
            self._sizes.update(stored)
        if stored:
            self._notify_keys_stored(list(stored), list(stored.values()))
        return L2StoreResult(is_whole, sum(stored.values()))

    def _forget(self, keys: Iterable[ObjectKey]) -> None:
        """Tell LMCache that chunks of this process are kept no more."""
        with self._counting:
            sizes = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))

    def _look_up(self, keys: Sequence[ObjectKey]) -> Bitmap:
        bits = Bitmap(len(keys))
        for number, is_kept in enumerate(self._client.contains(map(self._key, keys))):
            if is_kept:
                bits.set(number)
        return bits

    def _load(self, keys: Sequence[ObjectKey], chunks: Sequence[MemoryObj]) -> Bitmap:
        bits, loaded = Bitmap(len(keys)), []
        results = self._client.get_many(map(self._key, keys))
        with ReceivedBatch([received for received in results if received is not None]):
            payloads = [
                (number, received, {PART: bytes_of(chunk)})
                for number, (received, chunk) in enumerate(zip(results, chunks, strict=True))
                if received is not None and self._has_layout(received, chunk)
            ]
            batch = ReceivedBatch([received for _, received, _ in payloads])
            errors = batch.scatter_each([into for _, _, into in payloads])
        for error, (number, *_) in zip(errors, payloads, strict=True):
            if self._is_copied(error):
                bits.set(number)
                loaded.append(keys[number])
        if loaded:
            self._notify_keys_accessed(loaded)
        return bits

    def _has_layout(self, received: Received, chunk: MemoryObj) -> bool:
        """Whether a payload has the layout of a chunk; False is counted."""
        data = received.data
        if isinstance(data, TensorTransferData) and data.metadata == layout_of(chunk):
            return True
        self._count("layout")
        return False

    def _is_copied(self, error: KVLinkError | None) -> bool:
        """Whether a chunk was copied; False, counted, if it is damaged, or of another layout."""
        if error is None:
            return True
        if not isinstance(error, (SchemaError, IntegrityError)):
            raise error
        self._count("layout" if isinstance(error, SchemaError) else "damaged")
        return False

    def _count(self, reason: str) -> None:
        with self._counting:
            self._misses[reason] += 1
