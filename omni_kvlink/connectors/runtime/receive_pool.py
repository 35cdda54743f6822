"""The memory that payloads are brought to, where the two sides share none."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from omni_kvlink._native import host
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.errors import CapacityError, KVLinkError
from omni_kvlink.memory.arena import ArenaPool, Block
from omni_kvlink.memory.region import Mapping, Region

_MANY = 256 << 10
"""Bytes that are not read again before others have driven them out of the processor's cache."""


class AllocationWaiter(Protocol):
    """Somebody who asked for room; both are called in the loop's thread."""

    def placed(self, block: Block) -> None: ...

    def turned_away(self, error: KVLinkError) -> None: ...


class ReceivePool:
    """Reused memory of a consumer; every method but `region` and `stats` is the loop's.

    The loop is never blocked: a block in memory that is there is given at once, a thread maps more,
    and who waits for room is served when a block comes back.

    Args:
        emptied: told when the last block came back.
    """

    def __init__(
        self, quota: int, loop: EventLoop, emptied: Callable[[], None], *, prefault: int = 0
    ):
        self._pool = ArenaPool(Mapping.anonymous, quota)
        if prefault:
            self._pool.prefault(prefault)
        self._loop, self._emptied = loop, emptied
        self._waiting: dict[AllocationWaiter, int] = {}
        self._refused: set[AllocationWaiter] = set()
        self._growing: AllocationWaiter | None = None
        self._lent: Counter[Block] = Counter()
        self._parked: set[Block] = set()
        self.blocks = 0

    def take(self, nbytes: int, waiter: AllocationWaiter) -> None:
        """Room for a payload: now, or as soon as there is some."""
        self._waiting[waiter] = nbytes
        self._serve()

    def forget(self, waiter: AllocationWaiter) -> None:
        """It wants no room any more."""
        self._waiting.pop(waiter, None)
        self._refused.discard(waiter)

    def give(self, block: Block) -> None:
        """A block comes back; it is parked while somebody may still write to it."""
        self.blocks -= 1
        if self._lent[block]:
            self._parked.add(block)
        else:
            self._free(block)
        if not self.blocks:
            self._emptied()

    def lend(self, block: Block, start: int, nbytes: int) -> Region:
        """A piece of a block for who writes to it by himself; the last view of it ends that."""
        piece = self.region(block).slice(start, nbytes)
        self._lent[block] += 1
        back = partial(self._loop.call, partial(self._returned, block))
        weakref.finalize(piece.span, back).atexit = False
        return piece

    def region(self, block: Block) -> Region:
        return self._pool.region(block)

    def stats(self) -> dict[str, int]:
        return self._pool.stats()

    def close(self) -> None:
        self._waiting.clear()
        self._pool.close()

    def _returned(self, block: Block) -> None:
        self._lent[block] -= 1
        if not self._lent[block]:
            del self._lent[block]
            if block in self._parked:
                self._parked.discard(block)
                self._free(block)

    def _free(self, block: Block) -> None:
        """Perhaps somebody waits for it."""
        self._pool.free(block)
        self._refused.clear()
        self._serve()

    def _serve(self) -> None:
        """Whoever fits goes first: a large payload that waits for room holds up no small one."""
        for waiter, nbytes in list(self._waiting.items()):
            block = self._pool.place(nbytes)
            if block is not None:
                self._let_in(waiter, block)
        if self._growing is None:
            for waiter, nbytes in self._waiting.items():
                if waiter not in self._refused:
                    self._grow(waiter, nbytes)
                    return

    def _grow(self, waiter: AllocationWaiter, nbytes: int) -> None:
        self._growing = waiter
        thread = threading.Thread(
            target=self._map, args=(waiter, nbytes), name="kvlink-memory", daemon=True
        )
        thread.start()

    def _map(self, waiter: AllocationWaiter, nbytes: int) -> None:
        """In a thread: mapping and touching takes a second a gigabyte, and more."""
        try:
            block = self._pool.reserve(nbytes)
        except KVLinkError as error:
            self._loop.call(partial(self._grown, waiter, None, error))
        else:
            self._loop.call(partial(self._grown, waiter, block, None))

    def _grown(
        self, waiter: AllocationWaiter, block: Block | None, error: KVLinkError | None
    ) -> None:
        self._growing = None
        if waiter not in self._waiting:
            if block is not None:
                self._pool.free(block)
        elif block is not None:
            self._let_in(waiter, block)
        elif error is not None:
            self._refuse(waiter, error)
        self._serve()

    def _refuse(self, waiter: AllocationWaiter, error: KVLinkError) -> None:
        """Wait for a block to come back, if one can, and if that would do."""
        is_room = isinstance(error, CapacityError) and self._waiting[waiter] <= self._pool.quota
        if is_room and (self.blocks or self._parked):
            self._refused.add(waiter)
        else:
            del self._waiting[waiter]
            waiter.turned_away(error)

    def _let_in(self, waiter: AllocationWaiter, block: Block) -> None:
        del self._waiting[waiter]
        self.blocks += 1
        waiter.placed(block)


def fill(place: Region, payload: memoryview) -> None:
    """Copy as many bytes as there is room for; many go past the processor's cache."""
    if place.nbytes < _MANY or host.missing():
        place.view()[:] = payload
        return
    batch = host.CopyBatch(place.address, place.nbytes, threads=1, stores=host.STREAM)
    source = np.frombuffer(payload, np.uint8).ctypes.data
    batch.add(0, place.nbytes, host.packed_flat_view(source, payload.nbytes), digest=False)
    batch.gather()
