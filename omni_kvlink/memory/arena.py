"""Reused memory: `Arena` allocates offsets by best fit, `ArenaPool` adds arenas up to a quota."""

from __future__ import annotations

import bisect
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from omni_kvlink.errors import CapacityError, ClosedError
from omni_kvlink.memory.region import check_available

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Mapping, Region

_logger = logging.getLogger("omni_kvlink")

GRAIN = 4096
"""Blocks start and end on multiples of a page, so that two transfers never share a page."""
MIN_ARENA = 64 << 20


class Arena:
    """An allocator of offsets in `0…nbytes`: best fit, neighbours merged when freed. Has no memory.

    Its state is replaced in one assignment: an exception from a signal handler, which can come at
    any line, cannot leave a block that is allocated twice.
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self._state: tuple[list[_Span], dict[int, int]] = [(0, nbytes)], {}

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not allocated."""
        return sum(length for _, length in self._state[0])

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest free span."""
        return max([length for _, length in self._state[0]], default=0)

    @property
    def blocks(self) -> int:
        """Number of allocated blocks."""
        return len(self._state[1])

    def allocate(self, nbytes: int) -> int:
        """Allocate a block and return its offset; CapacityError if no hole is large enough."""
        holes, used = self._state
        fitting = [(length, offset) for offset, length in holes if length >= nbytes > 0]
        if not fitting:
            largest = self.largest_hole
            message = f"{nbytes} bytes requested, the largest hole has {largest}"
            raise CapacityError(message, requested=nbytes, free=largest)
        length, offset = min(fitting)
        at = holes.index((offset, length))
        rest = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        self._state = [*holes[:at], *rest, *holes[at + 1 :]], {**used, offset: nbytes}
        return offset

    def free(self, offset: int) -> None:
        """Free a block, merging it with the holes on both sides; KeyError if there is none."""
        holes, used = self._state
        start, stop = offset, offset + used[offset]
        first = last = bisect.bisect(holes, (offset, 0))
        if first and sum(holes[first - 1]) == start:
            first -= 1
            start = holes[first][0]
        if last < len(holes) and holes[last][0] == stop:
            stop = sum(holes[last])
            last += 1
        merged = [*holes[:first], (start, stop - start), *holes[last:]]
        rest = used.copy()  # in one call: there may be thousands of blocks
        del rest[offset]
        self._state = merged, rest


_Span: TypeAlias = tuple[int, int]
"""Offset and length in bytes."""


class Block(NamedTuple):
    """A reserved part of a pool: the arena's number, the offset in it, and the length in bytes."""

    arena: int
    offset: int
    nbytes: int


class QuotaShare:
    """Bytes of a pool's quota that are used outside its arenas, until `release`."""

    __slots__ = ("_nbytes", "_pool")

    def __init__(self, pool: ArenaPool, nbytes: int):
        self._pool, self._nbytes = pool, nbytes

    def release(self) -> None:
        """Return the bytes to the quota and wake who waits for them; a second call does nothing."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._pool._return_share(nbytes)


MakeArena: TypeAlias = "Callable[[int, Callable[[], bool]], Mapping]"
"""Maps an arena of so many bytes, while the function that it is given returns True."""


class ArenaPool:
    """Arenas that are made on demand up to `quota` bytes and kept for reuse; thread-safe.

    Args:
        make: maps a new arena of this many bytes; may be slow, is called without the lock. It may
            ask the function that it is given whether the arena is still wanted, and raise if not.
        quota: bytes that all arenas together may have.
        retire: called with the number of an empty arena that was dropped; must not block.
        keep: reuse arenas. If False, each block has its own arena, dropped when it is freed.
        min_arena: bytes of an arena that is kept, unless a block needs more; `MIN_ARENA` if None.
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
        least = MIN_ARENA if min_arena is None else min_arena
        self._min_arena = least if keep else 0
        self._arenas: dict[int, tuple[Arena, Mapping]] = {}
        self._made = self._mapped = self._waiting = 0
        self._outside = self._shares = 0  # bytes of `_mapped` that lie in no arena, and blocks
        self._prefaulting = 0  # bytes of the arena that a thread is mapping ahead
        self._prefaulted: dict[int, None] = {}  # arenas that were mapped ahead
        self._prefault = {"requested": 0, "mapped": 0, "milliseconds": 0, "error": ""}
        self._closed = False
        # Entered by itself: a signal handler that raises in Condition.__enter__ leaves it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def reserve(self, nbytes: int, *, timeout: float = 0.0) -> Block:
        """Reserve a block of at least `nbytes`, blocking up to `timeout` seconds for free memory.

        Raises:
            CapacityError: larger than the quota, the machine has no more, or the wait timed out.
            ClosedError: the pool was closed.
        """
        nbytes = -(-nbytes // GRAIN) * GRAIN
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("the arena pool is closed")
                block = self._allocate(nbytes)
                if block is not None:
                    return block
                left = deadline - time.monotonic()
                if nbytes <= self._prefaulting and left > 0:
                    self._wait(left)
                    continue
                size = self._claim_growth(nbytes)
                if size is None:
                    if nbytes > self.quota or left <= 0:
                        raise self._full(nbytes, timeout)
                    self._wait(left)
                    continue
            return self._grow(size, nbytes)

    def try_reserve(self, nbytes: int) -> Block | None:
        """Reserve a block in an existing arena, or return None; never blocks, maps nothing."""
        with self._lock:
            return None if self._closed else self._allocate(-(-nbytes // GRAIN) * GRAIN)

    def share(self, nbytes: int) -> QuotaShare | None:
        """Return a share of the quota for memory outside the arenas; None if there is no room.

        Never blocks. Raises ClosedError if the pool was closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the arena pool is closed")
            if self._mapped + nbytes > self.quota:
                return None
            self._mapped += nbytes
            self._outside += nbytes
            self._shares += 1
        return QuotaShare(self, nbytes)

    def share_all(self, sizes: Sequence[int], into: list[QuotaShare]) -> bool:
        """Add a share for each of these numbers of bytes to `into`; False if there is no room.

        Else as `share`. After an error, or an interrupt, the caller releases those that are there.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the arena pool is closed")
            if self._mapped + sum(sizes) > self.quota:
                return False
            for nbytes in sizes:
                share = QuotaShare(self, 0)
                into.append(share)
                taken = nbytes, self._mapped + nbytes, self._outside + nbytes, self._shares + 1
                # In one line: an interrupt comes before it or after it.
                share._nbytes, self._mapped, self._outside, self._shares = taken
        return True

    def free(self, block: Block) -> None:
        """Free a block and wake the threads that wait for memory."""
        with self._lock:
            if block.arena in self._arenas:  # closing drops arenas that still have blocks
                arena = self._arenas[block.arena][0]
                arena.free(block.offset)
                if not self._keep and not arena.blocks:
                    self._drop(block.arena)
                self._changed.notify_all()

    def region(self, block: Block) -> Region:
        """Return the memory of a block."""
        return self.mapping(block.arena).region.slice(block.offset, block.nbytes)

    def mapping(self, arena: int) -> Mapping:
        """Return the mapping of an arena; raise ClosedError if the pool was closed."""
        with self._lock:
            if arena not in self._arenas:
                raise ClosedError(f"the arena pool is closed: there is no arena {arena}")
            return self._arenas[arena][1]

    def prefault(self, nbytes: int) -> None:
        """Map `nbytes` now, so that the first transfers pay no page faults."""
        self.free(self.reserve(nbytes))

    def begin_prefault(
        self, nbytes: int, on_mapped: Callable[[int], None] = lambda arena: None
    ) -> None:
        """Map an arena of `nbytes`, or of the quota if that is less, in a thread; called once.

        A `reserve` that fits into it waits for it, until its timeout. `on_mapped` is called in the
        thread with the number of the arena. If the mapping fails, a warning is logged and `stats`
        has the error: memory is mapped when it is reserved then. CapacityError if the machine has
        too little now.
        """
        nbytes = min(self.quota, -(-nbytes // GRAIN) * GRAIN)
        check_available(nbytes)
        with self._lock:
            size = self._claim_growth(nbytes)
            if size is None:  # memory of the quota is in use already
                return
            self._prefaulting = self._prefault["requested"] = size
        run = threading.Thread(
            target=self._run_prefault, args=(size, on_mapped), name="kvlink-memory", daemon=True
        )
        try:
            run.start()
        except BaseException:
            self._end_prefault(size)
            raise

    def wait_for_prefault(self, nbytes: int) -> None:
        """Block while an arena is mapped ahead into which a block of `nbytes` fits."""
        with self._lock:
            while nbytes <= self._prefaulting and not self._closed:
                self._wait(None)

    @property
    def prefaulted(self) -> list[int]:
        """The numbers of the arenas that were mapped ahead."""
        with self._lock:
            return list(self._prefaulted)

    def stats(self) -> dict[str, Any]:
        """Return bytes (quota, mapped, used), counts (arenas, blocks, waiting threads), `prefault`.

        `prefault` has the bytes requested and mapped, how long that took, and the error.
        """
        with self._lock:
            arenas = [arena for arena, _ in self._arenas.values()]
            free = sum(arena.free_nbytes for arena in arenas)
            return {
                "quota": self.quota,
                "mapped": self._mapped,
                "used": sum(arena.nbytes for arena in arenas) - free + self._outside,
                "arenas": len(arenas),
                "blocks": sum(arena.blocks for arena in arenas) + self._shares,
                "waiting": self._waiting,
                "prefault": dict(self._prefault),
            }

    def close(self) -> None:
        """Drop the arenas and wake waiting threads; views keep their memory mapped."""
        with self._lock:
            self._closed = True
            self._arenas.clear()
            self._prefaulted.clear()
            self._mapped = 0
            self._changed.notify_all()

    def _return_share(self, nbytes: int) -> None:
        with self._lock:
            self._outside -= nbytes
            self._shares -= 1
            self._return_claim(nbytes)

    def _wait(self, seconds: float | None) -> None:
        self._waiting += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def _allocate(self, nbytes: int) -> Block | None:
        if not self._keep:
            return None  # each arena is as large as its block; there are as many as live payloads
        holes = ((arena.largest_hole, number) for number, (arena, _) in self._arenas.items())
        best = min((hole for hole in holes if hole[0] >= nbytes), default=None)
        if best is None:
            return None
        number = best[1]
        return Block(number, self._arenas[number][0].allocate(nbytes), nbytes)

    def _claim_growth(self, nbytes: int) -> int | None:
        """Claim quota for a new arena and return its size; None if the quota does not allow one.

        Drops empty arenas if the quota requires it.
        """
        arenas = self._arenas.items() if self._keep else ()  # else none is empty
        empty = [number for number, (arena, _) in arenas if not arena.blocks]
        reclaimable = sum(self._arenas[number][0].nbytes for number in empty)
        if self._mapped - reclaimable + nbytes > self.quota:
            return None
        for number in empty:
            if self._mapped + nbytes <= self.quota:
                break
            self._drop(number)
        size = min(max(nbytes, self._min_arena), self.quota - self._mapped)
        self._mapped += size
        return size

    def _drop(self, number: int) -> None:
        self._mapped -= self._arenas.pop(number)[0].nbytes
        self._prefaulted.pop(number, None)
        self._retire(number)

    def _grow(self, size: int, nbytes: int) -> Block:
        """Map a new arena, without the lock since it is slow, and reserve its first block."""
        try:
            mapping = self._make(size, self._is_open)
        except BaseException:
            with self._lock:
                self._return_claim(size)
            raise
        with self._lock:
            number = self._add(size, mapping)
            return Block(number, self._arenas[number][0].allocate(nbytes), nbytes)

    def _add(self, size: int, mapping: Mapping) -> int:
        """Add an arena and return its number; the lock is held."""
        if self._closed:
            raise ClosedError("the arena pool was closed while it grew")
        number, self._made = self._made, self._made + 1
        self._arenas[number] = (Arena(size), mapping)
        self._changed.notify_all()
        return number

    def _return_claim(self, size: int) -> None:
        """Return what `_claim_growth` claimed; the lock is held."""
        if not self._closed:
            self._mapped -= size
        if self._waiting:
            self._changed.notify_all()

    def _run_prefault(self, size: int, on_mapped: Callable[[int], None]) -> None:
        """Map the arena, in a thread."""
        began = time.monotonic()
        try:
            mapping = self._make(size, self._is_open)
        except Exception as error:
            self._end_prefault(size, error)
            return
        with self._lock:
            if self._closed:
                return
            number = self._add(size, mapping)
            self._prefaulting, self._prefaulted[number] = 0, None
            milliseconds = round(1e3 * (time.monotonic() - began))
            self._prefault.update(mapped=size, milliseconds=milliseconds)
        on_mapped(number)

    def _end_prefault(self, size: int, error: Exception | None = None) -> None:
        """The arena was not mapped: whoever waits for it maps memory of its own."""
        with self._lock:
            self._prefaulting, self._prefault["error"] = 0, repr(error or "no thread")
            self._return_claim(size)
            is_wanted = not self._closed
        if is_wanted:
            _logger.warning("%d bytes could not be mapped ahead: %r", size, error)

    def _is_open(self) -> bool:
        return not self._closed

    def _full(self, nbytes: int, waited: float) -> CapacityError:
        arenas = [arena for arena, _ in self._arenas.values()]
        reclaimable = sum(arena.nbytes for arena in arenas if not arena.blocks)
        free = max(
            self.quota - self._mapped + reclaimable, *(arena.largest_hole for arena in arenas), 0
        )
        return CapacityError(
            f"{nbytes} bytes requested, {free} free of a quota of {self.quota} after {waited:g} s: "
            "raise quota=, or wait until readers release their payloads",
            requested=nbytes,
            free=free,
        )
