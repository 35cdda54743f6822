"""Chunks in LMCache's memory objects, and an adapter whose tasks are run to their end."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from omni_kvlink.integrations.lmcache import KVLinkL2Adapter, KVLinkL2AdapterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPE = (2, 3, 4, 8)
NBYTES = 2 * 3 * 4 * 8 * 2


def key_of(number: int, *, model: str = "llama", rank: int = 0, salt: str = "") -> ObjectKey:
    """LMCache's key of a chunk, of one worker of two."""
    kv_rank = ObjectKey.ComputeKVRank(2, rank, 2, rank)
    return ObjectKey(number.to_bytes(16, "big"), model, kv_rank, cache_salt=salt)


def chunk(
    fill: int | None = None,
    *,
    shape: Sequence[int] = SHAPE,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 64,
) -> TensorMemoryObj:
    """A memory object with padding behind its bytes; random bytes of seed `fill`, or zeros."""
    size = torch.Size(shape)
    nbytes = size.numel() * dtype.itemsize
    raw = torch.zeros(nbytes + padding, dtype=torch.uint8)
    if fill is not None:
        seeded = torch.Generator().manual_seed(fill)
        raw[:nbytes] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=seeded)
    meta = MemoryObjMetadata(
        shape=size,
        dtype=dtype,
        address=0,
        phy_size=raw.numel(),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[size],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, meta, None)


class L2:
    """An adapter as LMCache's controllers use it: submit, poll, query."""

    def __init__(self, serve: str, **params: Any):
        params = {"revision": "main", "timeout": 60.0, "budget": "16MiB", **params}
        config = KVLinkL2AdapterConfig.from_dict({"serve": serve, **params})
        self.adapter = KVLinkL2Adapter(config)

    def store(self, keys: Sequence[ObjectKey], chunks: Sequence[Any]) -> Any:
        """The result of a store task."""
        task = self.adapter.submit_store_task(list(keys), list(chunks))
        return self._wait(
            self.adapter.get_store_event_fd(),
            lambda: self.adapter.pop_completed_store_tasks().get(task),
        )

    def look_up(self, keys: Sequence[ObjectKey]) -> list[int]:
        """The numbers of the keys that a lookup task has found."""
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {})
        fd = self.adapter.get_lookup_and_lock_event_fd()
        bits = self._wait(fd, lambda: self.adapter.query_lookup_and_lock_result(task))
        self.adapter.submit_unlock(list(keys))
        return list(bits.get_indices_list())

    def load(self, keys: Sequence[ObjectKey], chunks: Sequence[Any]) -> list[int]:
        """The numbers of the chunks that a load task has filled."""
        task = self.adapter.submit_load_task(list(keys), list(chunks))
        fd = self.adapter.get_load_event_fd()
        bits = self._wait(fd, lambda: self.adapter.query_load_result(task))
        return list(bits.get_indices_list())

    @property
    def misses(self) -> dict[str, int]:
        """Misses by reason, without those that there were none of."""
        counted: dict[str, int] = self.adapter.report_status()["misses"]
        return {reason: number for reason, number in counted.items() if number}

    @staticmethod
    def _wait(fd: int, begin_lookup: Callable[[], Any]) -> Any:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while (result := begin_lookup()) is None:
            poller.poll()
            consume_fd(fd)
        return result
