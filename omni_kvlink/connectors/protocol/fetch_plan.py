"""The bytes of a payload that are requested, that have arrived, and that are complete; no I/O."""

from __future__ import annotations

import bisect
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 4 << 20
"""Bytes to request, and to send, at a time. Each chunk costs both sides 0.2 ms, because the copy
evicts the interpreter from the processor's cache; larger chunks are copied out too late."""
WINDOW = 16 << 20
"""Bytes that one consumer may have requested and not yet received."""
EAGER = 16 << 10
"""A payload of at most so many bytes travels with its offer: a request would double the time."""

Label = TypeVar("Label")


class FetchLimits(NamedTuple):
    """Bytes that a consumer requests at a time, and may have requested and not yet received."""

    chunk: int
    window: int


class RangeSet:
    """A set of integers, kept as sorted ranges that neither overlap nor touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges between `start` and `stop` that are not in the set."""
        found, at = [], start
        for first, last in self._ranges[self._near(start, stop)]:
            if first > at:
                found.append((at, first))
            at = max(at, last)
        return [*found, (at, stop)] if at < stop else found

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all integers from `start` to `stop` are in the set."""
        return not self.gaps(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add the integers from `start` to `stop`, without `stop`."""
        if start < stop:
            near = self._near(start, stop)
            joined = [(start, stop), *self._ranges[near]]
            self._ranges[near] = [(min(a for a, _ in joined), max(b for _, b in joined))]

    def remove(self, start: int, stop: int) -> None:
        """Remove the integers from `start` to `stop`, without `stop`."""
        near = self._near(start, stop)
        kept = list[tuple[int, int]]()
        for first, last in self._ranges[near]:
            kept += [(first, min(last, start)), (max(first, stop), last)]
        self._ranges[near] = [(first, last) for first, last in kept if first < last]

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges between `start` and `stop` that are in the set."""
        near = self._ranges[self._near(start, stop)]
        found = [(max(first, start), min(last, stop)) for first, last in near]
        return [(first, last) for first, last in found if first < last]

    def _near(self, start: int, stop: int) -> slice:
        """Return where the ranges are that overlap or touch `start` to `stop`."""
        at = bisect.bisect_left(self._ranges, (start, start))
        if at and self._ranges[at - 1][1] >= start:
            at -= 1
        end = at
        while end < len(self._ranges) and self._ranges[end][0] <= stop:
            end += 1
        return slice(at, end)


class FetchPlan(Generic[Label]):
    """The bytes of a payload and its draft header that a consumer fetches into its memory."""

    def __init__(self, nbytes: int, chunk: int = CHUNK):
        self.nbytes, self._chunk = nbytes, chunk
        self.pending_nbytes = self.received_nbytes = 0
        self._planned, self._requested, self._received = RangeSet(), RangeSet(), RangeSet()
        self._queue: deque[tuple[int, int]] = deque()
        self._again: deque[tuple[int, int]] = deque()
        self._goals: list[tuple[int, int, int, Label]] = []
        self._num_goals = 0
        self._changed_to = -1  # goals that begin behind this byte are known to be open
        self._complete: deque[Label] = deque()

    @property
    def is_active(self) -> bool:
        """Whether bytes are to be requested, or to arrive."""
        return bool(self._queue or self._again) or self.pending_nbytes > 0

    def fetch(self, start: int, stop: int) -> None:
        """Plan to fetch these bytes after earlier ones."""
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start}…{stop} of {self.nbytes}")
        self._queue.extend(self._planned.gaps(start, stop))
        self._planned.add(start, stop)

    def request(self, start: int, stop: int, label: Label) -> None:
        """Plan to fetch these bytes after earlier ones; then `pop_complete` yields `label`."""
        self.fetch(start, stop)
        at = bisect.bisect_right(self._goals, start, key=lambda goal: goal[0])
        self._goals.insert(at, (start, stop, self._num_goals, label))
        self._num_goals += 1
        self._changed_to = max(self._changed_to, stop)

    def fetch_again(self, start: int, stop: int) -> None:
        """Fetch bytes once more, before others: those that arrived are not the right ones."""
        self._requested.remove(start, stop)
        self._received.remove(start, stop)
        self.received_nbytes -= stop - start
        self._again.append((start, stop))

    def cancel(self) -> None:
        """Fetch nothing more, and complete no label; bytes that were requested may arrive."""
        self._queue.clear()
        self._again.clear()
        self._goals.clear()
        self._complete.clear()

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return which of these bytes have been received."""
        return self._received.parts(start, stop)

    def has(self, start: int, stop: int) -> bool:
        """Return whether all of these bytes have been received."""
        return self._received.covers(start, stop)

    def next_range(self, window: int) -> tuple[int, int] | None:
        """Return the next bytes to request; None if there are none, or a chunk exceeds `window`."""
        queue = self._again or self._queue
        if not queue:
            return None
        start, stop = queue[0]
        cut = min(stop, start + self._chunk)
        if cut - start > window:
            return None
        if cut == stop:
            queue.popleft()
        else:
            queue[0] = cut, stop
        self._requested.add(start, cut)
        self.pending_nbytes += cut - start
        return start, cut

    def on_received(self, start: int, nbytes: int) -> None:
        """Record that bytes have been written to the payload's memory; WireError as of `check`."""
        self.check(start, nbytes)
        stop = start + nbytes
        self._received.add(start, stop)
        self.pending_nbytes -= nbytes
        self.received_nbytes += nbytes
        self._changed_to = max(self._changed_to, stop)

    def check(self, start: int, nbytes: int) -> None:
        """Raise WireError if bytes, not written yet, were not requested or arrived before."""
        stop = start + nbytes
        if nbytes <= 0 or not self._requested.covers(start, stop):
            raise WireError(f"bytes {start}…{stop} arrived, which were not requested")
        if self._received.gaps(start, stop) != [(start, stop)]:
            raise WireError(f"bytes {start}…{stop} arrived twice")

    def pop_complete(self) -> Iterator[Label]:
        """Yield the labels whose bytes have all arrived, each once.

        Those that are completed by the same bytes come in the order of `request`: the last layer of
        a stream before its commit.
        """
        self._update()
        while self._complete:
            yield self._complete.popleft()
            self._update()

    def _update(self) -> None:
        """Find the goals that are complete; those that begin behind all changes gained nothing."""
        complete: list[tuple[int, int, int, Label]] = []
        open_goals: list[tuple[int, int, int, Label]] = []
        end = bisect.bisect_right(self._goals, self._changed_to, key=lambda goal: goal[0])
        self._changed_to = -1
        for goal in self._goals[:end]:
            is_complete = self._received.covers(goal[0], goal[1])
            (complete if is_complete else open_goals).append(goal)
        self._goals[:end] = open_goals
        complete.sort(key=lambda goal: goal[2])
        self._complete.extend(label for *_, label in complete)
