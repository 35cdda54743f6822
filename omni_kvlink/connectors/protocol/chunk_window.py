"""The producer's state of an append stream, without I/O: its chunks, and a cursor a reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
"""The transfer of a chunk."""
Claim: TypeAlias = tuple[Any, int]
"""A peer, and its number of a get."""

MAX_AHEAD = 1024
"""Chunks that one reader may have requested and not released."""


class Cursor:
    """The progress of one reader: it has released each chunk below `position`.

    With `is_strict`, its reader may begin with no later chunk.
    """

    __slots__ = ("_released", "is_strict", "position")

    def __init__(self, position: int = 0, *, is_strict: bool = False):
        self.position, self.is_strict = position, is_strict
        self._released = set[int]()

    def release(self, number: int) -> None:
        """The reader has released a chunk, maybe before an earlier one."""
        if number >= self.position:
            self._released.add(number)
        while self.position in self._released:
            self._released.discard(self.position)
            self.position += 1

    def skip_to(self, number: int) -> None:
        """The reader wants no chunk below this number."""
        self.position = max(self.position, number)
        self._released = {each for each in self._released if each >= self.position}

    def has_released(self, number: int) -> bool:
        """Whether the reader has released this chunk."""
        return number < self.position or number in self._released

    def may_request(self, number: int) -> bool:
        """Whether the reader may have this chunk."""
        return not self.has_released(number) and (number <= self.position or not self.is_strict)


class ChunkWindow(Generic[T]):
    """The chunks of one stream from the oldest that a reader still needs, and its readers.

    A chunk is kept until every declared reader has released it and all chunks before it, so that
    the cursor of a reader that is lost can be given to another one. `size` is the number of
    chunks that may be kept.
    """

    def __init__(self, readers: int, size: int):
        self.size = size
        self.chunks: deque[T] = deque()
        self.first = 0
        """The number of the oldest chunk that is kept."""
        self.readers: dict[Claim, Cursor] = {}
        self.waiting: dict[Claim, tuple[Claim, int]] = {}
        """Gets of chunks that are not written yet: the reader and the number of the chunk."""
        self._reading: dict[Claim, tuple[Cursor, int]] = {}
        self._unclaimed = readers
        self._returned: list[Cursor] = []
        self._refused_starts: dict[Any, int] = {}
        """Peers whose reader was refused, and the chunk with which it was told to begin."""

    @property
    def stop(self) -> int:
        """The number of the next chunk."""
        return self.first + len(self.chunks)

    @property
    def is_full(self) -> bool:
        """Whether a chunk must be released before there may be another."""
        return len(self.chunks) >= self.size

    def describe_readers(self) -> str:
        """Return the numbers of readers that read, that were lost, and that have not come yet."""
        return f"{len(self.readers)} reading, {len(self._returned)} lost, {self._unclaimed} missing"

    def add_reader(self, claim: Claim, start: int) -> None:
        """Give a reader that wants the chunks from `start` on a cursor: a lost reader's, or a new.

        The one that is nearest before `start`, since the chunks in between are given up; if all are
        beyond it, the first one, which `refusal` names to the reader. A `start` that the peer has
        from there, and not from what it has read, gives up no chunk: if another reader has taken
        that cursor meanwhile, the peer is told where this one begins. A second call does nothing.
        """
        if claim in self.readers:
            return
        cursors = [*self._returned, *([Cursor()] if self._unclaimed else ())]
        cursor = min(cursors, key=lambda one: (one.position > start, abs(one.position - start)))
        returned = [one for one in self._returned if one is not cursor]
        unclaimed = self._unclaimed - (len(returned) == len(self._returned))
        if self._refused_starts.get(claim[0]) == start and cursor.position < start:
            cursor = Cursor(cursor.position, is_strict=True)
        else:
            cursor.skip_to(start)
        # In one line: an interrupt comes before it or after it.
        self.readers[claim], self._returned, self._unclaimed = cursor, returned, unclaimed

    def remove_reader(self, claim: Claim, *, is_lost: bool) -> list[Claim]:
        """Remove a reader, and return its gets that waited; another continues for a lost one."""
        cursor = self.readers.pop(claim)
        if is_lost:
            # Without what it released out of order: nobody else has those chunks.
            self._returned.append(Cursor(cursor.position))
        waiting = [get for get, (reader, _) in self.waiting.items() if reader == claim]
        for get in waiting:
            del self.waiting[get]
        return waiting

    def refusal(self, reader: Claim, number: int) -> str:
        """Why a reader cannot have a chunk; "" if it can, now or once it is written."""
        cursor = self.readers[reader]
        if not cursor.may_request(number):
            self._refused_starts[reader[0]] = cursor.position
            what = "was released before" if cursor.has_released(number) else "is not the next"
            begun = f"its reader begins at chunk {cursor.position}"
            return f"chunk {number} {what}: {begun} (start={cursor.position})"
        if number >= cursor.position + MAX_AHEAD:
            return f"chunk {number} is more than {MAX_AHEAD} chunks ahead of its reader"
        return ""

    def find(self, number: int) -> T | None:
        """Return a chunk that is kept; None if it is not written yet."""
        return self.chunks[number - self.first] if number < self.stop else None

    def begin_reading(self, get: Claim, reader: Claim, number: int) -> None:
        """Record that the get holds chunk `number` for its reader, until `end_reading`."""
        self._reading[get] = self.readers[reader], number

    def end_reading(self, get: Claim, *, is_read: bool) -> None:
        """The get's lease has ended; a chunk that was not read may be requested again."""
        cursor, number = self._reading.pop(get)
        if is_read:
            cursor.release(number)

    def take_waiting(self, number: int) -> list[tuple[Claim, Claim]]:
        """Remove and return the gets that wait for a chunk, each with its reader."""
        found = [(get, reader) for get, (reader, chunk) in self.waiting.items() if chunk == number]
        for get, _ in found:
            del self.waiting[get]
        return found

    def take_released(self) -> Iterator[T]:
        """Remove and yield the chunks that every reader has released."""
        positions = [cursor.position for cursor in (*self.readers.values(), *self._returned)]
        if self._unclaimed:
            positions.append(0)
        least = min(positions, default=self.stop)
        while self.chunks and self.first < least:
            self.first += 1
            yield self.chunks.popleft()

    def take_all(self) -> list[T]:
        """Remove and return all chunks: the stream has ended."""
        chunks, self.chunks = list(self.chunks), deque()
        self.first += len(chunks)
        return chunks
