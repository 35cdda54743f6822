"""The sleep mode of an engine whose pools are in host memory: their pages are given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from support.vllm.halves import pool_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.vllm.steps import SteppedEngine

PAGE = mmap.PAGESIZE
_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


class PageSleep:
    """Does to pools in host memory what vLLM's allocator does to those of a device.

    `suspend` gives their pages back: the addresses stay, and whoever reads or writes there ends the
    process. `resume` puts empty pages there. Bytes beside the first and the last whole page stay.
    """

    def __init__(self, pools: Iterable[torch.Tensor]):
        self._ranges = []
        for pool in pools:
            start = pool.data_ptr()
            stop = start + pool.untyped_storage().nbytes() - pool.storage_offset()
            first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
            assert last - first >= PAGE, "a pool of less than a page does not sleep"
            self._ranges.append((first, last - first))

    def suspend(self, level: int = 1) -> None:
        for start, nbytes in self._ranges:
            self._call("madvise", start, nbytes, _MADV_DONTNEED)
            self._call("mprotect", start, nbytes, mmap.PROT_NONE if level else mmap.PROT_READ)

    def discard(self, tags: tuple[str, ...]) -> None:
        assert tags == ("kv_cache",)
        self.suspend()

    def resume(self, tags: list[str] | None = None) -> None:
        for start, nbytes in self._ranges:
            self._call("mprotect", start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def _call(self, name: str, start: int, nbytes: int, argument: int) -> None:
        call = getattr(_libc, name)
        if call(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), argument):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def put_to_sleep(engine: SteppedEngine) -> PageSleep:
    """What vLLM 0.33's engine core and workers do at `sleep(level=1, mode="abort")`."""
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    pages = PageSleep(pool_tensors(engine))
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
    pages.suspend()
    return pages


def wake_up(engine: SteppedEngine, pages: PageSleep) -> None:
    """What they do at `wake_up`."""
    pages.resume()
    for rank in engine.ranks:
        rank.connector.restore_kv_caches()
