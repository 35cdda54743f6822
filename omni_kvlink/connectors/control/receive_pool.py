"""The memory that a consumer receives payloads in, if it shares none with the producer."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from omni_kvlink.errors import CapacityError, KVLinkError
from omni_kvlink.memory.arena import ArenaPool
from omni_kvlink.memory.block import Block, Holder
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import CallAtEnd, Region
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import zmq

    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.control.kept_bytes import KeptBytes
    from omni_kvlink.connectors.control.link_lanes import LinkLanes
    from omni_kvlink.connectors.control.security import Credentials
    from omni_kvlink.connectors.runtime.event_loop import EventLoop
    from omni_kvlink.memory.mapping import MakeArena
    from omni_kvlink.payload.layout_cache import LayoutCache


class AllocationWaiter(Protocol):
    """The callbacks of `ReceivePool.allocate`; in the loop's thread."""

    def on_allocated(self, block: Block) -> None:
        """Take the block."""

    def fail(self, error: KVLinkError) -> object:
        """Fail: there will be no block."""


class ReceivePool:
    """Reused memory of a consumer; methods are for the loop's thread, unless they say otherwise.

    The loop is never blocked: a block in mapped memory is given at once, a thread maps more memory,
    and a request for which there is none waits until a block is freed. All blocks and shares in use
    take `quota` bytes at most; `on_empty` is called when the last is freed. `make` maps other
    memory than the host's, and is called once, for all of the quota.
    """

    def __init__(
        self,
        quota: int,
        loop: EventLoop,
        on_empty: Callable[[], None],
        *,
        prefault: int = 0,
        make: MakeArena | None = None,
    ):
        least = None if make is None else quota
        self._pool = ArenaPool(make or Mapping.anonymous, quota, min_arena=least)
        if make is not None:
            self._pool.prefault(1)
        elif prefault:
            self._pool.begin_prefault(prefault)
        self._loop, self._on_empty = loop, on_empty
        self._waiting: dict[AllocationWaiter, int] = {}
        self._blocked: set[AllocationWaiter] = set()  # wait for a block to be freed
        self._is_growing = self._was_freed = False  # a thread maps memory; some was freed meanwhile
        self._borrowed: Counter[Block] = Counter()
        self._quarantined: set[Block] = set()
        self._blocks, self._has_shares = 0, make is None
        # By owner: of the quota, or, if all of it is mapped, a block that is not written to.
        self._shares: dict[Hashable, Holder] = {}
        # By key: gets own them, and look here for what an earlier get of their key has left.
        self.kept: weakref.WeakValueDictionary[str, KeptBytes] = weakref.WeakValueDictionary()
        self._resuming: dict[AllocationWaiter, KeptBytes] = {}  # what waiters get, if it is there

    def allocate(
        self, nbytes: int, waiter: AllocationWaiter, kept: KeptBytes | None = None
    ) -> None:
        """Give a block to `waiter`: now, or as soon as there is memory.

        It is that of `kept`, unless it was freed, as soon as no transport writes to it any more.
        """
        self._waiting[waiter] = nbytes
        if kept is not None:
            self._resuming[waiter] = kept
        self._serve()

    def post_free(self, blocks: list[Block]) -> None:
        """Free the blocks in a list, each once, and empty it; for finalizers."""
        self._loop.call(partial(self._free_all, blocks))

    def free_kept(self) -> None:
        """Free what no get has begun to take up: memory is needed, or the link is closed."""
        for kept in list(self.kept.values()):
            if kept not in self._resuming.values():
                self._free_all(kept.blocks)

    def cancel(self, waiter: AllocationWaiter) -> None:
        """Withdraw a request that may still wait."""
        self._waiting.pop(waiter, None)
        self._resuming.pop(waiter, None)
        self._blocked.discard(waiter)

    def free(self, block: Block) -> None:
        """Free a block; it is quarantined while a transport may still write to it."""
        self._blocks -= 1
        if self._borrowed[block]:
            self._quarantined.add(block)
        else:
            self._free(block)
        if not self.is_in_use:
            self._on_empty()

    @property
    def is_in_use(self) -> bool:
        """Whether a block or a share is not freed."""
        return self._blocks > 0 or any(one.block for one in list(self._shares.values()))

    def share(self, owner: Hashable, nbytes: int) -> bool:
        """Charge the quota for a payload in memory of its own; any thread, never blocks.

        False if there is no room, or if the pool's memory is not the host's; also then the owner
        calls `free_share` once. ClosedError if the pool was closed.
        """
        if not self._has_shares:
            return False
        holder = self._shares.setdefault(owner, Holder())  # first: so `free_share` finds it
        if holder.block is not None:
            return True  # an interrupt came after it was charged
        return self._pool.share(nbytes, holder) or bool(self._pool.try_reserve(nbytes, holder))

    def free_share(self, owner: Hashable) -> None:
        """Undo `share`; does nothing if it was not called."""
        holder = self._shares.pop(owner, None)
        if holder is None or holder.block is None:
            return
        self._pool.release(holder)
        self._serve_again()
        if not self.is_in_use:
            self._on_empty()

    def borrow(self, block: Block, start: int, nbytes: int) -> Region:
        """Return a range of a block for a transport to write to, until the region is freed."""
        piece = self.region(block).slice(start, nbytes)
        self._borrowed[block] += 1
        on_returned = partial(self._loop.call, partial(self._on_returned, block))
        CallAtEnd.of(piece.span, on_returned)
        return piece

    def region(self, block: Block) -> Region:
        """Return the memory of a block; any thread."""
        return self._pool.region(block)

    def stats(self) -> dict[str, Any]:
        """Return the state of the memory, as `ArenaPool.stats` does; any thread."""
        return self._pool.stats()

    def close(self) -> None:
        """Withdraw all requests and free the memory that is not in use."""
        self._waiting.clear()
        self._pool.close()
        self._on_empty = lambda: None  # breaks the cycle with the owner, which has descriptors

    def _on_returned(self, block: Block) -> None:
        self._borrowed[block] -= 1
        if not self._borrowed[block]:
            del self._borrowed[block]
            if block in self._quarantined:
                self._quarantined.discard(block)
                self._free(block)
            elif self._resuming:
                self._serve()

    def _free_all(self, blocks: list[Block]) -> None:
        while blocks:
            self.free(blocks.pop())

    def _free(self, block: Block) -> None:
        self._pool.free(block)
        self._serve_again()

    def _serve_again(self) -> None:
        self._was_freed = True
        self._blocked.clear()
        self._serve()

    def _serve(self) -> None:
        """Serve the requests that fit: a large one that waits holds up no small one."""
        for waiter, nbytes in list(self._waiting.items()):
            kept = self._resuming.get(waiter)
            if kept is not None and kept.blocks:
                if not self._borrowed[kept.blocks[0]]:
                    self._give(waiter, kept.take())
                continue
            self._resuming.pop(waiter, None)  # its block was freed
            block = self._pool.try_reserve(nbytes)
            if block is not None:
                self._blocks += 1
                self._give(waiter, block)
        idle = self._blocked, self._resuming
        first = next((one for one in self._waiting if not any(one in each for each in idle)), None)
        if first is not None and not self._is_growing:
            self._is_growing, self._was_freed = True, False
            map_more = partial(self._map, first, self._waiting[first])
            try:
                start_thread(threading.Thread(target=map_more, name="kvlink-memory", daemon=True))
            except CapacityError as error:
                self._on_mapped(first, error)

    def _map(self, waiter: AllocationWaiter, nbytes: int) -> None:
        """In a thread of its own: mapping and touching takes a second a gigabyte, and more."""
        try:
            self._pool.wait_for_prefault(nbytes)
            self._loop.call(partial(self._on_mapped, waiter, self._pool.reserve(nbytes)))
        except KVLinkError as error:
            self._loop.call(partial(self._on_mapped, waiter, error))

    def _on_mapped(self, waiter: AllocationWaiter, outcome: Block | KVLinkError) -> None:
        self._is_growing = False
        if isinstance(outcome, Block):
            if waiter in self._waiting:
                self._blocks += 1
                self._give(waiter, outcome)
            else:
                self._pool.free(outcome)
        elif waiter in self._waiting:
            self._on_map_failed(waiter, outcome)
        self._serve()

    def _on_map_failed(self, waiter: AllocationWaiter, error: KVLinkError) -> None:
        """Wait for memory to be freed, if some is in use and the request can ever fit."""
        can_fit = isinstance(error, CapacityError) and self._waiting[waiter] <= self._pool.quota
        if can_fit:
            self.free_kept()
        if can_fit and self._was_freed:
            return  # there may be room now: `_serve` tries again
        if can_fit and (self.is_in_use or self._quarantined):
            self._blocked.add(waiter)
        else:
            del self._waiting[waiter]
            waiter.fail(error)

    def _give(self, waiter: AllocationWaiter, block: Block) -> None:
        del self._waiting[waiter]
        self._resuming.pop(waiter, None)
        waiter.on_allocated(block)


class SessionResources(NamedTuple):
    """The address of a consumer, and the parts that all of its sessions share."""

    address: ControlAddress
    credentials: Credentials | None
    context: zmq.Context[Any]
    loop: EventLoop
    receive_pool: ReceivePool
    layouts: LayoutCache
    counters: Counter[str]
    lanes: LinkLanes | None = None  # of the consumer; None if it has none
