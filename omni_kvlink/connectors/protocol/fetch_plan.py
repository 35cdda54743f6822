"""The bytes of a payload: which are requested, which have arrived, and are as committed."""

from __future__ import annotations

import bisect
import struct
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from omni_kvlink._native import device_memory, host
from omni_kvlink._native.crc32c import combine
from omni_kvlink.errors import WireError
from omni_kvlink.payload.format import DIGEST_CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import TensorSpec

CHUNK = 4 << 20
"""Bytes to request, and to send, at a time. Each chunk costs both sides 0.2 ms, because the copy
evicts the interpreter from the processor's cache; larger chunks are copied out too late."""
WINDOW = 16 << 20
"""Bytes that one consumer may have requested and not yet received."""
EAGER = 16 << 10
"""A payload of at most so many bytes travels with its offer: a request would double the time."""
_MAX_PIECES = 64
"""Pieces of one MiB that do not touch each other; a sender that goes in order makes two."""

_STREAM_MIN = 256 << 10
"""Bytes; larger copies bypass the processor's cache: they would be evicted before they are read."""

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
        self._ranges = [*self.parts(0, start), *self.parts(stop, sys.maxsize)]

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
        self._is_cancelled = False
        self._changed_to = -1  # goals that begin behind this byte are known to be open
        self._complete: deque[Label] = deque()
        self._digests = ArrivingDigests()

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

    def adopt(self, parts: Sequence[tuple[int, int]]) -> None:
        """Count bytes as received that are in the payload's memory before anything is fetched."""
        for start, stop in parts:
            for ranges in (self._planned, self._requested, self._received):
                ranges.add(start, stop)
            self.received_nbytes += stop - start

    def fetch_again(self, start: int, stop: int) -> None:
        """Fetch bytes once more, before others: those that arrived are not the right ones."""
        self._requested.remove(start, stop)
        self._received.remove(start, stop)
        self.received_nbytes -= stop - start
        self._again.append((start, stop))

    def give_back(self, start: int, stop: int) -> None:
        """Fetch bytes that were requested, and will not come that way, before others."""
        self._requested.remove(start, stop)
        self.pending_nbytes -= stop - start
        if not self._is_cancelled:
            self._again.append((start, stop))

    def cancel(self) -> None:
        """Fetch nothing more, and complete no label; bytes that were requested may arrive."""
        self._is_cancelled = True
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

    def receive(self, region: Region, start: int, payload: memoryview | int) -> list[ArrivingChunk]:
        """Copy bytes to the payload's memory, or take as many as a transport has written there.

        Returns the chunks that are whole now, and not as committed. WireError as of `check`.
        """
        nbytes = payload if isinstance(payload, int) else payload.nbytes
        self.check(start, nbytes)
        pieces = self._digests.split(start, start + nbytes)
        if isinstance(payload, int):
            crcs = crcs_of(region, pieces)
        else:
            crcs = copy_into(region, start, payload, pieces)
        self.on_received(start, nbytes)
        return _wrong_chunks(pieces, crcs)

    def expect(
        self, region: Region, spec: TensorSpec, digest: bytes, data: int
    ) -> list[ArrivingChunk]:
        """Compare a tensor with its digest from now on; return wrong chunks that are here.

        `data` is where the tensors begin.
        """
        self._digests.expect(spec, digest, data)
        parts = self.parts(data + spec.start, data + spec.stop)
        pieces = [piece for part in parts for piece in self._digests.split(*part)]
        return _wrong_chunks(pieces, crcs_of(region, pieces))

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


class HasPlan(Protocol):
    """A payload that is being fetched."""

    plan: FetchPlan[Any]


P = TypeVar("P", bound=HasPlan)


class FetchQueue(deque[P]):
    """The payloads that are being fetched, in turn: small ones overtake large ones."""

    def next_ranges(self, payload: P, window: int) -> Iterator[tuple[P, int, int]]:
        """Yield what may be requested now, of all payloads, one of which may have new ranges.

        At most `window` bytes are requested and not received.
        """
        if payload not in self and payload.plan.is_active:
            self.append(payload)
        window -= sum(payload.plan.pending_nbytes for payload in self)
        idle = 0
        while idle < len(self):
            first = self[0]
            span = first.plan.next_range(window)
            idle = idle + 1 if span is None else 0
            if span is not None:
                window -= span[1] - span[0]
                yield first, *span
            self.rotate(-1)
        for inactive in [payload for payload in self if not payload.plan.is_active]:
            self.remove(inactive)

    def drop(self, payload: P) -> None:
        """Fetch no more of a payload; does nothing if it was not being fetched."""
        if payload in self:
            self.remove(payload)


class ArrivingChunk:
    """Bytes `start` to `stop` of a payload, which have a digest of their own, and arrive in pieces.

    They are chunk `number` of tensor `spec`. `is_again` is for the owner: they were fetched twice.
    """

    __slots__ = ("_committed", "_pieces", "is_again", "number", "spec", "start", "stop")

    def __init__(self, spec: TensorSpec, number: int, data: int, committed: int):
        self.spec, self.number, self._committed = spec, number, committed
        self.start = data + spec.start + number * DIGEST_CHUNK
        self.stop = min(self.start + DIGEST_CHUNK, data + spec.stop)
        self._pieces: list[tuple[int, int, int]] = []
        self.is_again = False

    def is_wrong(self, start: int, stop: int, crc: int) -> bool:
        """Record a piece and its CRC-32C; return whether the chunk is whole, and not as committed.

        No byte may be in two pieces; after a wrong chunk, all of it is expected again. WireError
        if it arrives in too many pieces.
        """
        at = bisect.bisect_left(self._pieces, (start, stop, crc))
        self._pieces.insert(at, (start, stop, crc))
        for left in (at, at - 1):  # join it with its neighbours
            pair = self._pieces[max(0, left) : left + 2]
            if len(pair) == 2 and pair[0][1] == pair[1][0]:
                (start, _, first), (middle, stop, second) = pair
                joined = start, stop, combine(first, second, stop - middle)
                self._pieces[left : left + 2] = [joined]
        if len(self._pieces) > _MAX_PIECES:
            raise WireError(f"{self.spec.where()} arrives in more than {_MAX_PIECES} pieces")
        if self._pieces[0][:2] != (self.start, self.stop):
            return False
        (_, _, found) = self._pieces.pop()
        return found != self._committed


Piece: TypeAlias = "tuple[int, int, ArrivingChunk | None]"
"""Bytes of a payload from a start to a stop, and the chunk that they are a part of, if any."""


class ArrivingDigests:
    """The chunks of a payload that arrives in pieces, in any order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._chunks: list[ArrivingChunk] = []

    def expect(self, spec: TensorSpec, digest: bytes, data: int) -> None:
        """Take the digest of a tensor, as messages carry it; `data` is where the tensors begin."""
        for number in range(len(digest) // 4):
            committed = int.from_bytes(digest[4 * number : 4 * number + 4], "big")
            chunk = ArrivingChunk(spec, number, data, committed)
            at = bisect.bisect_left(self._starts, chunk.start)
            self._starts.insert(at, chunk.start)
            self._chunks.insert(at, chunk)

    def split(self, start: int, stop: int) -> list[Piece]:
        """Divide bytes into pieces that lie in one chunk each, or in none."""
        pieces, at = list[Piece](), start
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for chunk in self._chunks[first : bisect.bisect_left(self._starts, stop)]:
            if chunk.stop <= at:
                continue
            if chunk.start > at:
                pieces.append((at, chunk.start, None))
                at = chunk.start
            pieces.append((at, min(stop, chunk.stop), chunk))
            at = min(stop, chunk.stop)
        return [*pieces, (at, stop, None)] if at < stop else pieces


def _wrong_chunks(pieces: Sequence[Piece], crcs: Sequence[int]) -> list[ArrivingChunk]:
    """Record pieces with their CRC-32C; return the chunks that are whole, and not as committed."""
    checked = ((start, stop, chunk) for start, stop, chunk in pieces if chunk is not None)
    return [
        chunk
        for (start, stop, chunk), crc in zip(checked, crcs, strict=True)
        if chunk.is_wrong(start, stop, crc)
    ]


def copy_into(
    region: Region, start: int, payload: memoryview, pieces: Sequence[Piece]
) -> list[int]:
    """Copy bytes to byte `start` of a region; many of them bypass the processor's cache.

    `pieces` divide them. Returns the CRC-32C of those with a digest, in the same pass.
    """
    if payload.nbytes < _STREAM_MIN or not host.is_loaded() or region.device != "cpu":
        region.write(start, payload)
        return [
            host.crc32c(payload[first - start : stop - start])
            for first, stop, chunk in pieces
            if chunk is not None
        ]
    batch = host.CopyBatch(region.address, region.nbytes, threads=1, stores=host.STREAM)
    source = np.frombuffer(payload, np.uint8).ctypes.data - start
    for first, stop, chunk in pieces:
        view = host.packed_flat_view(source + first, stop - first)
        batch.add(first, stop - first, view, digest=chunk is not None)
    digests = batch.gather()
    return list(struct.unpack(f">{len(digests) // 4}I", digests))


def crcs_of(region: Region, pieces: Sequence[Piece]) -> list[int]:
    """Return what `copy_into` returns, for bytes that are in the region already.

    Bytes of a device are hashed there; this blocks until it has done so.
    """
    spans = [(start, stop) for start, stop, chunk in pieces if chunk is not None]
    if not spans:
        return []
    if region.device != "cpu":
        return device_memory.crcs_of(region, spans)
    if not host.is_loaded():
        return [host.crc32c(region.view(start, stop)) for start, stop in spans]
    batch = host.CopyBatch(region.address, region.nbytes, threads=1)
    for start, stop in spans:
        batch.add(start, stop - start, digest=True)
    digests = batch.digest()
    return list(struct.unpack(f">{len(digests) // 4}I", digests))
