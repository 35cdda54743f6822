"""The sleep mode of an engine whose pools are in host memory: their pages are given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from support.vllm.steps import SteppedEngine

PAGE = mmap.PAGESIZE
_MADV_DONTNEED, _PROT_NONE = 4, 0
_libc = ctypes.CDLL(None, use_errno=True)


class PageSleep:
    """Does to pools in host memory what vLLM's allocator does to those of a device.

    `suspend` gives their pages back: the addresses stay, and whoever reads or writes there ends the
    process. `resume` puts empty pages there. What shares a page with other memory stays.
    """

    def __init__(self, pools: Iterable[torch.Tensor]):
        self._ranges = []
        for memory in (pool.untyped_storage() for pool in pools):
            start = -(-memory.data_ptr() // PAGE) * PAGE
            stop = (memory.data_ptr() + memory.nbytes()) // PAGE * PAGE
            assert stop > start, "a pool of less than a page cannot sleep"
            self._ranges.append((start, stop - start))

    def suspend(self, level: int = 1) -> None:
        for memory in self._ranges:
            _call("madvise", *memory, _MADV_DONTNEED)
            _call("mprotect", *memory, _PROT_NONE)

    def discard(self, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",)
        self.suspend()

    def resume(self, tags: list[str] | None = None) -> None:
        for memory in self._ranges:
            _call("mprotect", *memory, mmap.PROT_READ | mmap.PROT_WRITE)


def _call(name: str, start: int, nbytes: int, argument: int) -> None:
    if getattr(_libc, name)(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), argument):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def pools_of_engine(engine: SteppedEngine) -> list[torch.Tensor]:
    """The pools of all ranks, as the connectors got them."""
    return [pool for rank in engine.ranks for pool in rank.pools.values()]


def move(pools: Sequence[torch.Tensor]) -> list[weakref.ref[Any]]:
    """Give the pools other memory, which is empty; a reference to each of the new ones."""
    made = []
    for pool in pools:
        memory = np.zeros(pool.untyped_storage().nbytes(), np.uint8)
        storage = torch.from_numpy(memory).untyped_storage()
        pool.set_(storage, pool.storage_offset(), pool.shape, pool.stride())
        made.append(weakref.ref(memory))
    return made


def pause(engine: SteppedEngine) -> None:
    """Abort and drain, as vLLM's engine core does before its workers sleep (`mode="abort"`)."""
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def unregister(*engines: SteppedEngine) -> None:
    """What each worker of vLLM 0.33 calls before its pools' memory is discarded."""
    for engine in engines:
        for rank in engine.ranks:
            rank.connector.unregister_kv_caches()


def restore(*engines: SteppedEngine) -> None:
    """What each worker of vLLM 0.33 calls when its pools have memory again."""
    for engine in engines:
        for rank in engine.ranks:
            rank.connector.restore_kv_caches()
