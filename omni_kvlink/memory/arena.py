"""Reused memory: `Arena` allocates offsets by best fit, `ArenaPool` adds arenas up to a quota.

One long file: each put enters both, and each file on its way costs it. A change of an arena and of
its block's owner is one assignment in the pool, by the names of both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.errors import CapacityError, ClosedError, format_seconds
from omni_kvlink.memory.arena_index import ArenaIndex
from omni_kvlink.memory.block import OUTSIDE, Block, BlockOwner, Holder, Part
from omni_kvlink.memory.mapping import MakeArena, Mapping, available_bytes, check_available
from omni_kvlink.system.threads import lower_priority, start_thread
from omni_kvlink.system.waits import NEVER, check_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region

_logger = logging.getLogger("omni_kvlink")

GRAIN = 4096
"""Blocks start and end on multiples of a page, so that two transfers never share a page."""
MIN_ARENA = 64 << 20
_NICENESS = 10
"""A thread that maps memory unasked gets a tenth of what others get of a busy core."""


class Arena:
    """An allocator of offsets in `0…nbytes`: best fit, neighbours merged when freed. Has no memory.

    Its cost does not depend on the number of blocks; of holes it is logarithmic. A call plans a
    `_Change`, begins it in one assignment, and completes it in steps that can be repeated: what an
    exception from a signal handler cuts, which can come at any line, the next call completes. So no
    block is allocated twice, and none is lost.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._blocks: dict[int, int] = {}  # bytes by offset
        self._holes = {0: nbytes}  # bytes by offset
        self._ends = {nbytes: 0}  # the offset of each hole by its end
        # The holes, sorted by bytes, then by offset, each as one number.
        self._by_size = [nbytes << _OFFSET_BITS]
        self.change: _Change | None = None
        """The change that was begun and is not completed, as after an interrupt."""

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not allocated."""
        self.complete()
        return sum(self._holes.values())

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest free span."""
        if self.change is not None:  # the call costs more than the test
            self.complete()
        return self._by_size[-1] >> _OFFSET_BITS if self._by_size else 0

    @property
    def blocks(self) -> int:
        """Number of allocated blocks."""
        self.complete()
        return len(self._blocks)

    def allocate(self, nbytes: int) -> int:
        """Allocate a block and return its offset; CapacityError if no hole is large enough."""
        self.change = change = self.plan_block(nbytes)
        self.complete()
        return change[2]

    def free(self, offset: int) -> None:
        """Free a block, merging it with the holes on both sides; KeyError if there is none."""
        self.change = self.plan_free(offset)
        self.complete()

    def plan_block(self, nbytes: int) -> _Change:
        """Return the change that allocates a block; CapacityError if no hole is large enough."""
        largest, by_size = self.largest_hole, self._by_size
        if not 0 < nbytes <= largest:
            text = f"{nbytes} bytes requested, the largest hole has {largest}"
            raise CapacityError(text, requested=nbytes, free=largest)
        best = by_size[bisect_left(by_size, nbytes << _OFFSET_BITS)]
        length, offset = best >> _OFFSET_BITS, best & _OFFSETS
        remainder = ((offset + nbytes, length - nbytes),) if length > nbytes else ()
        return ((offset, length),), remainder, offset, nbytes

    def plan_free(self, offset: int) -> _Change:
        """Return the change that frees a block; KeyError if there is none."""
        self.complete()
        start, stop = offset, offset + self._blocks[offset]
        merged: tuple[_Hole, ...] = ()
        if start in self._ends:
            start = self._ends[start]
            merged = ((start, self._holes[start]),)
        if stop in self._holes:
            merged += ((stop, self._holes[stop]),)
            stop += self._holes[stop]
        return merged, ((start, stop - start),), offset, 0

    def complete(self) -> None:
        """Complete the change that was begun, from its first step on."""
        if self.change is None:
            return
        filled, made, offset, nbytes = self.change
        holes, ends, by_size = self._holes, self._ends, self._by_size
        for start, length in filled:
            holes.pop(start, None)
            ends.pop(start + length, None)
            hole = length << _OFFSET_BITS | start
            at = bisect_left(by_size, hole)
            if at < len(by_size) and by_size[at] == hole:
                del by_size[at]
        for start, length in made:
            holes[start], ends[start + length] = length, start
            hole = length << _OFFSET_BITS | start
            at = bisect_left(by_size, hole)
            if at == len(by_size) or by_size[at] != hole:
                by_size.insert(at, hole)
        if nbytes:
            self._blocks[offset] = nbytes
        else:
            self._blocks.pop(offset, None)
        self.change = None


_Hole: TypeAlias = "tuple[int, int]"
"""Offset and length in bytes."""
_Change: TypeAlias = "tuple[tuple[_Hole, ...], tuple[_Hole, ...], int, int]"
"""The holes that go and that come, and a block: its offset, and its bytes, or 0 if it is freed."""
_OFFSET_BITS = 63
_OFFSETS = (1 << _OFFSET_BITS) - 1


class _Growth:
    """The means of a `reserve` that needs an arena: the quota for it, or a lock that wakes it."""

    nbytes = 0
    """Bytes of the quota that are claimed for an arena which is being mapped."""
    waiter: threading.Lock | None = None
    is_optional = False
    """Whether the arena is mapped ahead unasked: who needs memory meanwhile takes its quota."""


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class ArenaPool:
    """Arenas that are made on demand up to `quota` bytes and kept for reuse; thread-safe.

    Args:
        make: maps a new arena of this many bytes; may be slow, is called without the lock. It may
            ask the function that it is given whether the arena is still wanted, and raise if not;
            that function raises TransferTimeout at a deadline.
        quota: bytes that all arenas together may have.
        retire: called with the number of an empty arena that was dropped; must not block.
        keep: reuse arenas. If False, each block has its own arena, dropped when it is freed.
        min_arena: bytes of an arena that is kept, unless a block needs more; `MIN_ARENA` if None.

    Attributes:
        make_room: called by a `reserve` that finds no memory, before it waits and without the lock;
            it may free a block, and returns whether it did.
    """

    def __init__(
        self,
        make: MakeArena,
        quota: int,
        retire: Callable[[int], None] = lambda number: None,
        *,
        keep: bool = True,
        min_arena: int | None = None,
    ):
        self.quota = quota
        self._make, self._retire, self._keep = make, retire, keep
        self._min_arena = (MIN_ARENA if min_arena is None else min_arena) if keep else 0
        self._arenas: dict[int, tuple[Arena, Mapping]] = {}
        self._index = ArenaIndex()
        self._changed: int | None = None  # an arena that `_index` does not know as it is now
        self._used = self._blocks = 0  # bytes of blocks in arenas, and their number
        self._next_number = self._mapped = 0
        self._outside = self._shares = 0  # bytes of `_mapped` that lie in no arena, and blocks
        self._prefaulting = 0  # bytes of the arena that a thread is mapping ahead
        self._ahead = _Growth()  # of an arena that nobody waits for
        self._prefaulted: dict[int, None] = {}  # arenas that were mapped ahead
        self._prefault = {"requested": 0, "mapped": 0, "milliseconds": 0, "error": ""}
        self._closed = False
        self.make_room: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        # Each thread that waits has one, locked. A `Condition` is left locked, or unlocked, by a
        # signal handler that raises in one of its methods.
        self._waiters: dict[threading.Lock, None] = {}

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<ArenaPool: {self._mapped} of {self.quota} bytes mapped{state}>"

    def reserve(
        self, nbytes: int, owner: BlockOwner | None = None, *, timeout: float = 0.0
    ) -> Block:
        """Reserve a block of at least `nbytes`, blocking up to `timeout` seconds for free memory.

        It is `owner.block` in the step that takes it, so that after an exception of a signal
        handler the caller can `release` it. In a thread that has none, no owner is needed.
        With a timeout of 0 it waits for none; to map new memory may take as long as it takes then.

        Raises:
            CapacityError: larger than the quota, the machine has no more, or the wait timed out.
            TransferTimeout: the timeout passed while memory was being mapped.
            ClosedError: the pool was closed.
        """
        nbytes, growth, owner = -(-nbytes // GRAIN) * GRAIN, _Growth(), owner or Holder()
        deadline = time.monotonic() + timeout
        try:
            while (block := self._find(nbytes, owner, growth, deadline, timeout)) is None:
                if not growth.nbytes:
                    waiter = growth.waiter
                    assert waiter is not None
                    if self.make_room():
                        self._waiters.pop(waiter, None)  # first: an interrupt loses none
                        growth.waiter = None
                    else:
                        self._wait(waiter, max(0.0, deadline - time.monotonic()))
                    continue
                is_wanted = partial(self._is_wanted, growth.nbytes, deadline if timeout else NEVER)
                mapping = self._make(growth.nbytes, is_wanted)  # without the lock: it is slow
                with self._lock:
                    number = self._add(growth, mapping)
                    return self._take(number, nbytes, owner)
            return block
        except BaseException:
            with self._lock:
                self._return_growth(growth)
            raise

    def try_reserve(self, nbytes: int, owner: BlockOwner | None = None) -> Block | None:
        """Reserve a block in an existing arena, or return None; never blocks, maps nothing."""
        with self._lock:
            is_open, nbytes = not self._closed, -(-nbytes // GRAIN) * GRAIN
            return self._allocate(nbytes, owner or Holder()) if is_open else None

    def share(self, nbytes: int, owner: BlockOwner) -> bool:
        """Reserve a part of the quota for memory outside the arenas; False if there is no room.

        Never blocks. Raises ClosedError if the pool was closed.
        """
        return self.share_all([nbytes], [owner])

    def share_all(self, sizes: Sequence[int], owners: Sequence[BlockOwner]) -> bool:
        """Reserve a part of the quota for each owner, or for none: False if there is no room.

        Else as `share`. After an error, or an interrupt, the caller releases all owners.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the arena pool is closed")
            if self._mapped + sum(sizes) > self.quota:
                return False
            for nbytes, owner in zip(sizes, owners, strict=True):
                block = OUTSIDE, 0, nbytes
                taken = block, self._mapped + nbytes, self._outside + nbytes, self._shares + 1
                # In one line: an interrupt comes before it or after it.
                owner.block, self._mapped, self._outside, self._shares = taken
        return True

    def wake(self) -> None:
        """Have the threads that wait for memory look again: `make_room` may make some now."""
        if self._waiters:
            with self._lock:
                self._wake_all()

    def free(self, block: Part) -> None:
        """Free a block and wake the threads that wait for memory."""
        self.release(Holder(block))

    def release(self, owner: BlockOwner) -> None:
        """Free the block of an owner, if it has one, and wake the threads that wait for memory."""
        with self._lock:
            if owner.block is None:
                return
            number, offset, nbytes = owner.block
            if number == OUTSIDE:
                mapped = self._mapped if self._closed else self._mapped - nbytes
                values = None, mapped, self._outside - nbytes, self._shares - 1
                owner.block, self._mapped, self._outside, self._shares = values
            elif number not in self._arenas:  # closing drops arenas that still have blocks
                owner.block = None
            else:
                self._complete()
                arena = self._arenas[number][0]
                used, blocks = self._used - nbytes, self._blocks - 1
                freed = arena.plan_free(offset), None, number, used, blocks
                # In one line: an interrupt comes before it or after it.
                arena.change, owner.block, self._changed, self._used, self._blocks = freed
                self._complete()
                if not self._keep and not arena.blocks:
                    self._drop(number)
            self._wake_all()

    def region(self, block: Part) -> Region:
        """Return the memory of a block."""
        number, offset, nbytes = block
        return self.mapping(number).region.slice(offset, nbytes)

    def mapping(self, arena: int) -> Mapping:
        """Return the mapping of an arena; raise ClosedError if the pool was closed."""
        with self._lock:
            if arena not in self._arenas:
                raise ClosedError(f"the arena pool is closed: there is no arena {arena}")
            return self._arenas[arena][1]

    def prefault(self, nbytes: int) -> None:
        """Map `nbytes` now, so that the first transfers pay no page faults."""
        holder = Holder()
        try:
            self.reserve(nbytes, holder)
        finally:
            self.release(holder)

    def begin_ahead(self, on_mapped: Callable[[int], None]) -> None:
        """Map the first arena in a thread of low priority, where there is plenty of memory.

        That is, if it takes an eighth of the quota and a sixteenth of what is available at most. A
        `reserve` that comes before it is mapped does not wait for it, but maps memory of its own,
        and the thread gives up. `on_mapped` as in `begin_prefault`. Nothing is raised or logged.
        """
        if 8 * self._min_arena <= self.quota and 16 * self._min_arena <= available_bytes():
            with contextlib.suppress(CapacityError):  # no more threads
                self.begin_prefault(self._min_arena, on_mapped, is_optional=True)

    def begin_prefault(
        self,
        nbytes: int,
        on_mapped: Callable[[int], None] = lambda arena: None,
        *,
        is_optional: bool = False,
    ) -> None:
        """Map an arena of `nbytes`, or of the quota if that is less, in a thread; called once.

        A `reserve` that fits into it waits for it, until its timeout. `on_mapped` is called in the
        thread with the number of the arena. If the mapping fails, a warning is logged and `stats`
        has the error: memory is mapped when it is reserved then. CapacityError if the machine has
        too little now, or no more threads.
        """
        nbytes = min(self.quota, -(-nbytes // GRAIN) * GRAIN)
        check_available(nbytes)
        growth = _Growth()
        growth.is_optional = is_optional
        run = threading.Thread(
            target=self._run_prefault, args=(growth, on_mapped), name="kvlink-memory", daemon=True
        )
        try:
            with self._lock:
                if not self._claim_growth(nbytes, growth):
                    return  # memory of the quota is in use already
                self._prefault["requested"] = growth.nbytes
                if is_optional:
                    self._ahead = growth
                else:
                    self._prefaulting = growth.nbytes
            start_thread(run)
        except BaseException:
            self._end_prefault(growth)  # of a thread that did start, it does nothing
            raise

    def wait_for_prefault(self, nbytes: int) -> None:
        """Block while an arena is mapped ahead into which a block of `nbytes` fits."""
        while True:
            waiter = _locked()
            with self._lock:
                if nbytes > self._prefaulting or self._closed:
                    return
                self._waiters[waiter] = None
            self._wait(waiter, None)

    @property
    def prefaulted(self) -> list[int]:
        """The numbers of the arenas that were mapped ahead."""
        with self._lock:
            return list(self._prefaulted)

    def find_first(self, nbytes: int) -> list[int]:
        """The numbers of the oldest arenas that are kept for reuse, of `nbytes` together at most.

        Those that were mapped ahead come first, however large they are.
        """
        with self._lock:
            numbers = dict(self._prefaulted)
            for number, (arena, _) in self._arenas.items() if self._keep else ():
                nbytes -= arena.nbytes
                if nbytes < 0:
                    break
                numbers[number] = None
            return list(numbers)

    def stats(self) -> dict[str, Any]:
        """Return bytes (quota, mapped, used), counts (arenas, blocks, waiting threads), `prefault`.

        `prefault` has the bytes requested and mapped, how long that took, and the error.
        """
        with self._lock:
            return {
                "quota": self.quota,
                "mapped": self._mapped,
                "used": self._used + self._outside,
                "arenas": len(self._arenas),
                "blocks": self._blocks + self._shares,
                "waiting": len(self._waiters),
                "prefault": dict(self._prefault),
            }

    def close(self) -> None:
        """Drop the arenas and wake waiting threads; views keep their memory mapped."""
        with self._lock:
            self._closed = True
            self._arenas.clear()
            self._index, self._changed = ArenaIndex(), None
            self._prefaulted.clear()
            self._mapped = self._used = self._blocks = 0
            self._wake_all()

    def _find(
        self, nbytes: int, owner: BlockOwner, growth: _Growth, deadline: float, timeout: float
    ) -> Block | None:
        """Reserve a block; if there is no room, claim quota to grow, or be woken when it changes.

        CapacityError if the time is over, or the block can never fit.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the arena pool is closed")
            block = self._allocate(nbytes, owner)
            if block is not None:
                return block
            if self._ahead.nbytes:
                self._return_growth(self._ahead)
            seconds = deadline - time.monotonic()
            is_mapping = nbytes <= self._prefaulting and seconds > 0
            if is_mapping or not self._claim_growth(nbytes, growth):
                if nbytes > self.quota or (seconds <= 0 and growth.waiter is not None):
                    raise self._full(nbytes, timeout)
                growth.waiter = _locked()
                self._waiters[growth.waiter] = None
        return None

    def _wait(self, waiter: threading.Lock, seconds: float | None) -> None:
        """Block until `waiter`, which is in `_waiters`, is woken; without the lock."""
        try:
            waiter.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._waiters.pop(waiter, None)

    def _wake_all(self) -> None:
        """Wake the threads that wait; the lock is held."""
        for waiter in list(self._waiters):
            if waiter.locked():  # else it was woken, and will go on
                waiter.release()

    def _allocate(self, nbytes: int, owner: BlockOwner) -> Block | None:
        if not self._keep:
            return None  # each arena is as large as its block; there are as many as live payloads
        self._complete()
        best = self._index.find(nbytes)
        return None if best is None else self._take(best, nbytes, owner)

    def _take(self, number: int, nbytes: int, owner: BlockOwner) -> Block:
        """Reserve a block in an arena that has room; the caller has called `_complete`."""
        arena = self._arenas[number][0]
        change = arena.plan_block(nbytes)
        block, used, blocks = (number, change[2], nbytes), self._used + nbytes, self._blocks + 1
        values = change, block, number, used, blocks
        # In one line: an interrupt comes before it or after it.
        arena.change, owner.block, self._changed, self._used, self._blocks = values
        self._complete()
        return Block(*block)

    def _complete(self) -> None:
        """Have `_index` know the arena that was changed last; the lock is held.

        Each change begins with it: what an interrupt has cut is completed before anything else.
        """
        number = self._changed
        if number is None:
            return
        if number in self._arenas:
            arena = self._arenas[number][0]
            self._index.set(number, arena.largest_hole, 0 if arena.blocks else arena.nbytes)
        else:
            self._index.set(number, 0, 0)
        self._changed = None

    def _claim_growth(self, nbytes: int, growth: _Growth) -> bool:
        """Claim quota for a new arena; False if the quota does not allow one.

        Drops empty arenas if the quota requires it.
        """
        self._complete()
        empty = dict(self._index.empty) if self._keep else {}  # else none is empty
        reclaimable = sum(empty.values())
        if self._mapped - reclaimable + nbytes > self.quota:
            return False
        for number in empty:
            if self._mapped + nbytes <= self.quota:
                break
            self._drop(number)
        size = min(max(nbytes, self._min_arena), self.quota - self._mapped)
        self._mapped, growth.nbytes = self._mapped + size, size
        return True

    def _drop(self, number: int) -> None:
        arenas = self._arenas.copy()
        arena, _ = arenas.pop(number)
        mapped = self._mapped - arena.nbytes
        self._arenas, self._mapped, self._changed = arenas, mapped, number
        self._complete()
        self._prefaulted.pop(number, None)
        self._retire(number)

    def _add(self, growth: _Growth, mapping: Mapping) -> int:
        """Add an arena and return its number; the lock is held."""
        if self._closed:
            raise ClosedError("the arena pool was closed while it grew")
        self._complete()
        number, arena = self._next_number, Arena(growth.nbytes)
        values = (arena, mapping), number + 1, 0, number
        self._arenas[number], self._next_number, growth.nbytes, self._changed = values
        self._complete()
        self._wake_all()
        return number

    def _return_growth(self, growth: _Growth) -> None:
        """Return what `_claim_growth` claimed and `_add` has not used; the lock is held."""
        mapped = self._mapped if self._closed else self._mapped - growth.nbytes
        self._mapped, growth.nbytes = mapped, 0
        if growth.waiter is not None:
            self._waiters.pop(growth.waiter, None)
        self._wake_all()

    def _run_prefault(self, growth: _Growth, on_mapped: Callable[[int], None]) -> None:
        """Map the arena, in a thread."""
        began, size = time.monotonic(), growth.nbytes
        if growth.is_optional:
            lower_priority(_NICENESS)
        try:
            mapping = self._make(size, lambda: not self._closed and growth.nbytes > 0)
        except Exception as error:
            self._end_prefault(growth, error)
            return
        with self._lock:
            if self._closed or not growth.nbytes:
                return
            number = self._add(growth, mapping)
            self._prefaulting, self._prefaulted[number] = 0, None
            milliseconds = round(1e3 * (time.monotonic() - began))
            self._prefault.update(mapped=size, milliseconds=milliseconds)
        on_mapped(number)

    def _end_prefault(self, growth: _Growth, error: Exception | None = None) -> None:
        """The arena was not mapped: whoever waits for it maps memory of its own."""
        with self._lock:
            size, is_wanted = growth.nbytes, not self._closed and not growth.is_optional
            self._return_growth(growth)
            if growth.is_optional:
                self._prefault["requested"] = 0
                return
            self._prefaulting, self._prefault["error"] = 0, repr(error or "no thread")
        if is_wanted:
            _logger.warning("%d bytes could not be mapped ahead: %r", size, error)

    def _is_wanted(self, nbytes: int, deadline: float) -> bool:
        """Whether an arena is still to be mapped; TransferTimeout at the deadline."""
        check_deadline(deadline, f"mapping {nbytes} bytes of memory")
        return not self._closed

    def _full(self, nbytes: int, waited: float) -> CapacityError:
        self._complete()
        reclaimable = sum(self._index.empty.values())
        free = max(self.quota - self._mapped + reclaimable, self._index.largest_hole)
        if nbytes > self.quota:
            text = f"{nbytes} bytes never fit into a quota of {self.quota}: open the link with "
            return CapacityError(f"{text}quota={nbytes} or more", requested=nbytes, free=free)
        return CapacityError(
            f"{nbytes} bytes requested, {free} free of a quota of {self.quota} after "
            f"{format_seconds(waited)}: raise quota=, or wait until readers release their payloads",
            requested=nbytes,
            free=free,
        )
