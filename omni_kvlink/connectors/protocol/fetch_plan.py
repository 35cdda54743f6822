"""Bringing a payload's bytes over: what to ask for, what came, what is complete; without I/O.

A connector whose sides share no memory drives one `FetchPlan` per payload. How the bytes travel is
its own affair; a simulation can drive it as well.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from omni_kvlink.errors import WireError

CHUNK = 4 << 20
"""Bytes asked for, and sent, at a time: each costs both sides 0.2 ms, for every byte that is copied
drives the interpreter out of the processor's cache. Larger ones are copied out too late."""
WINDOW = 16 << 20
"""Bytes one reader has asked for that have not come: what may wait for a slow one."""
EAGER = 16 << 10
"""A payload of no more bytes travels beside its offer: asking for it would take twice as long."""

Label = TypeVar("Label")


class FetchLimits(NamedTuple):
    """Bytes that a reader asks for at a time, and that may be asked for and not have come."""

    chunk: int
    window: int


class Spans:
    """A set of byte numbers, kept as sorted spans that neither overlap nor touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The spans of `start…stop` that are not in the set."""
        found, at = [], start
        for first, last in self._near(start, stop):
            if first > at:
                found.append((at, first))
            at = max(at, last)
        return [*found, (at, stop)] if at < stop else found

    def covers(self, start: int, stop: int) -> bool:
        return not self.gaps(start, stop)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        near = self._near(start, stop)
        at = bisect.bisect_left(self._spans, near[0]) if near else self._after(start)
        first, last = min([start, *(a for a, _ in near)]), max([stop, *(b for _, b in near)])
        self._spans[at : at + len(near)] = [(first, last)]

    def _after(self, start: int) -> int:
        return bisect.bisect_left(self._spans, (start, start))

    def _near(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Spans that overlap or touch `start…stop`."""
        at = self._after(start)
        if at and self._spans[at - 1][1] >= start:
            at -= 1
        end = at
        while end < len(self._spans) and self._spans[end][0] <= stop:
            end += 1
        return self._spans[at:end]


class FetchPlan(Generic[Label]):
    """The bytes of one payload that a reader brings to its own memory.

    Args:
        nbytes: of the payload, and of a draft behind it.
        chunk: the most to ask for at a time.

    Attributes:
        unanswered: bytes asked for that have not come.
        nbytes_come: bytes that have.
    """

    def __init__(self, nbytes: int, chunk: int = CHUNK):
        self.nbytes, self._chunk = nbytes, chunk
        self.unanswered = self.nbytes_come = 0
        self._planned, self._asked, self._come = Spans(), Spans(), Spans()
        self._queue: deque[tuple[int, int]] = deque()
        self._goals: list[tuple[int, int, Label]] = []
        self._finished: deque[Label] = deque()

    @property
    def is_hungry(self) -> bool:
        """Whether there is more to ask for, or to come."""
        return bool(self._queue) or self.unanswered > 0

    def request(self, start: int, stop: int, label: Label) -> None:
        """These bytes are needed, after those wanted before; `finished` will give the label."""
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"bytes {start}…{stop} of {self.nbytes}")
        self._queue.extend(self._planned.gaps(start, stop))
        self._planned.add(start, stop)
        at = bisect.bisect_right(self._goals, start, key=lambda goal: goal[0])
        self._goals.insert(at, (start, stop, label))
        self._settle(stop)

    def ask(self, capacity: int) -> tuple[int, int] | None:
        """The next bytes to ask for: a chunk if `capacity` has space for it, else none."""
        if not self._queue:
            return None
        start, stop = self._queue[0]
        cut = min(stop, start + self._chunk)
        if cut - start > capacity:
            return None
        if cut == stop:
            self._queue.popleft()
        else:
            self._queue[0] = cut, stop
        self._asked.add(start, cut)
        self.unanswered += cut - start
        return start, cut

    def came(self, start: int, nbytes: int) -> None:
        """These bytes are in their place.

        Raises:
            WireError: nobody asked for them, or they came before.
        """
        self.check(start, nbytes)
        stop = start + nbytes
        self._come.add(start, stop)
        self.unanswered -= nbytes
        self.nbytes_come += nbytes
        self._settle(stop)

    def check(self, start: int, nbytes: int) -> None:
        """Whether these bytes may come now; before anything is written.

        Raises:
            WireError: nobody asked for them, or they came before.
        """
        stop = start + nbytes
        if nbytes <= 0 or not self._asked.covers(start, stop):
            raise WireError(f"bytes {start}…{stop} came, for which nobody asked")
        if self._come.gaps(start, stop) != [(start, stop)]:
            raise WireError(f"bytes {start}…{stop} came twice")

    def finished(self) -> Iterator[Label]:
        """Labels whose bytes are all there, each once."""
        while self._finished:
            yield self._finished.popleft()

    def _settle(self, stop: int) -> None:
        """Goals are sorted by their start: those that begin behind `stop` gained nothing."""
        open_goals = []
        end = bisect.bisect_right(self._goals, stop, key=lambda goal: goal[0])
        for goal in self._goals[:end]:
            if self._come.covers(goal[0], goal[1]):
                self._finished.append(goal[2])
            else:
                open_goals.append(goal)
        self._goals[:end] = open_goals
