"""Chunks at a pace: who sends them, and who receives them, in one thread each."""

from __future__ import annotations

import asyncio
import queue
import time
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink.aio.consumer import AsyncChunkStream
from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.setups import READERS
from omni_kvlink.errors import IntegrityError
from omni_kvlink.link import ChunkStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.bench.chunks import TimedRecorder
    from omni_kvlink.bench.setups import AppendStreamSetup, Paced
    from omni_kvlink.link import ChunkStream, ReceivedChunk

PATIENCE = 30.0
"""Seconds that a reader waits for a chunk."""
_LEAD_TIME = 50_000_000
"""Nanoseconds in which the reader's first requests arrive."""


class Sent(NamedTuple):
    """When each send was called and returned, how late it was (nanoseconds), and the CPU."""

    called: list[int]
    returned: list[int]
    delays: list[int]
    cpu: int
    wall: int


def send_all(
    setup: AppendStreamSetup, paced: Paced, send: Callable[..., None], *, steps: bool = False
) -> Sent:
    """Call `send(stream, number)` when the chunk is due; one thread, which sleeps in between.

    Chunk `n` of each stream is due `n / setup.rate` seconds after the beginning, the streams evenly
    spread over that time or all at once. With `steps`, one `send(number)` sends that chunk of all.
    """
    streams, period = range(paced.streams), 1e9 / setup.rate
    phases = [0.0 if setup.is_together else stream / paced.streams for stream in streams]
    turns = [(phases[0], streams)] if steps else [(phases[s], range(s, s + 1)) for s in streams]
    count, begin = paced.streams * paced.chunks, time.monotonic_ns() + _LEAD_TIME
    called, returned, delays = [0] * count, [0] * count, list[int]()
    _sleep_until(begin)
    cpu = time.process_time_ns()
    for number in range(paced.chunks):
        for phase, together in turns:
            due = begin + int(period * (number + phase))
            _sleep_until(due)
            now = time.monotonic_ns()
            send(number) if steps else send(together[0], number)
            done = time.monotonic_ns()
            for stream in together:
                position = paced.position(stream, number)
                called[position], returned[position] = now, done
            delays += [now - due] * len(together)
    cpu = time.process_time_ns() - cpu
    return Sent(called, returned, delays, cpu, time.monotonic_ns() - begin)


def sent_positions(paced: Paced) -> list[int]:
    """The positions of all chunks in the order in which `send_all` sends them."""
    streams = range(paced.streams)
    return [paced.position(stream, n) for n in range(paced.chunks) for stream in streams]


def _sleep_until(due: int) -> None:
    nanoseconds = due - time.monotonic_ns()
    if nanoseconds > 0:
        time.sleep(1e-9 * nanoseconds)


class ChunkReader:
    """Receives all chunks of streams in the one thread that calls it."""

    def __init__(
        self, streams: Sequence[ChunkStream[ReceivedChunk]], paced: Paced, into: TimedRecorder
    ):
        self._streams, self._paced, self._into = streams, paced, into

    def by_callbacks(self) -> None:
        """Sleep until a stream's next chunk is there, which the link's thread reports.

        What an engine's own event loop does.
        """
        ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        chunks_left = [self._paced.chunks] * len(self._streams)

        def request(index: int) -> None:
            self._streams[index].when_next().add_done_callback(lambda _: ready.put(index))

        for index in range(len(self._streams)):
            request(index)
        while self._into.items_left:
            index = ready.get(timeout=PATIENCE)
            self._take(index, self._streams[index].receive(timeout=0.0))
            chunks_left[index] -= 1
            if chunks_left[index]:  # another stream's chunks may come after this one's end
                request(index)

    def by_asyncio(self) -> None:
        """Wait with asyncio, in a task for each stream."""

        async def receive(index: int) -> None:
            stream = AsyncChunkStream(self._streams[index])
            for _ in range(self._paced.chunks):
                self._take(index, await stream.receive(timeout=PATIENCE))

        async def receive_all() -> None:
            await asyncio.gather(*(receive(index) for index in range(len(self._streams))))

        asyncio.run(receive_all())

    def by_streams(self) -> None:
        """Wait with `ChunkStreams`."""
        number_of = {stream: index for index, stream in enumerate(self._streams)}
        merged = ChunkStreams(self._streams)
        while self._into.items_left:
            stream, chunk = merged.receive(timeout=PATIENCE)
            self._take(number_of[stream], chunk)

    def by_steps(self) -> None:
        """Receive one stream of `append_requests`, whose chunks have the rows of all streams."""
        (stream,) = self._streams
        while self._into.items_left:
            step = stream.receive(timeout=PATIENCE)
            if step is None:
                raise IntegrityError("the stream of steps ended too early")
            parts = [
                (int(name), tensors["hidden"], time.monotonic_ns())
                for name, tensors in step.requests().items()
            ]
            for index, hidden, now in parts:
                position = self._paced.position(index, step.number)
                self._into.take(position, bytes_of(hidden).data, now)

    def _take(self, index: int, chunk: ReceivedChunk | None) -> None:
        now = time.monotonic_ns()
        if chunk is None:
            raise IntegrityError(f"stream {index} ended too early")
        position = self._paced.position(index, chunk.number)
        self._into.take(position, bytes_of(chunk.data["hidden"]).data, now)


RECEIVE = dict(
    zip(
        READERS,
        (
            ChunkReader.by_streams,
            ChunkReader.by_callbacks,
            ChunkReader.by_asyncio,
            ChunkReader.by_steps,
        ),
        strict=True,
    )
)
"""The function by which a reader of each name receives."""
