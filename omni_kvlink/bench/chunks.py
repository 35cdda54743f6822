"""Chunks at a pace: what they hold, who sends them, and who receives and compares them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import struct
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from omni_kvlink.aio.consumer import AsyncChunkStream
from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.setups import READERS, Paced
from omni_kvlink.errors import IntegrityError
from omni_kvlink.link import ChunkStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from omni_kvlink.link import ChunkStream, ReceivedChunk

PATIENCE = 30.0
"""Seconds that a reader waits for a chunk."""
_STEP = 32
"""Elements between the starts of two chunks: a cache line, as tensors of an engine begin on one."""
_FRAME = struct.Struct("<II")
_PIPE_BYTES = 1 << 20


class ChunkBytes:
    """The content of each chunk, by its stream and number; equal in both processes."""

    def __init__(self, paced: Paced):
        self._paced, rows = paced, paced.streams * paced.chunks
        self._raw = np.random.default_rng(0).bytes(2 * _STEP * rows + paced.nbytes)
        writable = np.frombuffer(bytearray(self._raw), np.uint8)
        self._elements = torch.from_numpy(writable).view(torch.bfloat16)

    def tensor(self, stream: int, number: int) -> torch.Tensor:
        """A chunk, `[tokens, hidden]` bfloat16; not copied."""
        start = _STEP * self._paced.position(stream, number)
        tokens, hidden = self._paced.tokens, self._paced.hidden
        return self._elements[start : start + tokens * hidden].view(tokens, hidden)

    def step(self, number: int) -> torch.Tensor:
        """Chunk `number` of each stream, one behind the other: a new tensor."""
        streams = range(self._paced.streams)
        return torch.cat([self.tensor(stream, number) for stream in streams])

    def raw(self, stream: int, number: int) -> bytes:
        """The bytes of a chunk."""
        start = 2 * _STEP * self._paced.position(stream, number)
        return self._raw[start : start + self._paced.nbytes]

    def flip(self, stream: int, number: int) -> torch.Tensor:
        """A copy of a chunk with a wrong bit."""
        wrong = self.tensor(stream, number).clone()
        bytes_of(wrong)[self._paced.nbytes // 2] ^= 1
        return wrong


class Sent(NamedTuple):
    """When each send was called and returned, how late it was (nanoseconds), and the CPU."""

    called: list[int]
    returned: list[int]
    delays: list[int]
    cpu: int
    wall: int


def send_all(
    paced: Paced,
    send: Callable[[int, int], None],
    *,
    begin: int,
    per_second: float,
    together: bool,
) -> Sent:
    """Send every chunk when it is due; one thread, which sleeps in between.

    Chunk `n` of each stream is due `n / per_second` seconds after `begin` (monotonic nanoseconds),
    the streams evenly spread over that time or, if `together`, all at once.
    """
    phases = [0.0 if together else stream / paced.streams for stream in range(paced.streams)]
    turns = (
        _Turn(number + phase, (paced.position(stream, number),), (stream, number))
        for number in range(paced.chunks)
        for stream, phase in enumerate(phases)
    )
    return _send_turns(paced, turns, send, begin, per_second)


def send_steps(paced: Paced, send: Callable[[int], None], *, begin: int, per_second: float) -> Sent:
    """Send step `n`, which has chunk `n` of each stream, `n / per_second` seconds after `begin`."""
    streams = range(paced.streams)
    turns = (
        _Turn(number, [paced.position(stream, number) for stream in streams], (number,))
        for number in range(paced.chunks)
    )
    return _send_turns(paced, turns, send, begin, per_second)


class _Turn(NamedTuple):
    """One call of `send`: its moment in periods, the positions of its chunks, its arguments."""

    moment: float
    positions: Sequence[int]
    arguments: tuple[int, ...]


def _send_turns(
    paced: Paced,
    turns: Iterable[_Turn],
    send: Callable[..., None],
    begin: int,
    per_second: float,
) -> Sent:
    count, period = paced.streams * paced.chunks, 1e9 / per_second
    called, returned, delays = [0] * count, [0] * count, list[int]()
    _sleep_until(begin)
    cpu = time.process_time_ns()
    for moment, positions, arguments in turns:
        due = begin + int(period * moment)
        _sleep_until(due)
        now = time.monotonic_ns()
        send(*arguments)
        done = time.monotonic_ns()
        for position in positions:
            called[position], returned[position] = now, done
        delays += [now - due] * len(positions)
    cpu = time.process_time_ns() - cpu
    return Sent(called, returned, delays, cpu, time.monotonic_ns() - begin)


def _sleep_until(due: int) -> None:
    nanoseconds = due - time.monotonic_ns()
    if nanoseconds > 0:
        time.sleep(1e-9 * nanoseconds)


class ChunkRecorder:
    """Notes when each chunk came, and compares it; the clocks start with the first."""

    def __init__(self, paced: Paced):
        self._bytes, self.paced = ChunkBytes(paced), paced
        self._received = [0] * (paced.streams * paced.chunks)
        self._wrong = self._cpu = self._first = 0
        self.chunks_left = len(self._received)

    def take(self, stream: int, number: int, data: Any, now: int) -> None:
        """A chunk is here since `now` (monotonic nanoseconds); `data` has the buffer protocol."""
        if not self._first:
            self._first, self._cpu = now, time.process_time_ns()
        self._received[self.paced.position(stream, number)] = now
        self._wrong += bytes(data) != self._bytes.raw(stream, number)
        self.chunks_left -= 1
        if not self.chunks_left:
            self._cpu = time.process_time_ns() - self._cpu

    def result(self) -> dict[str, Any]:
        """The moments, how many chunks were wrong or missing, CPU and wall nanoseconds."""
        wall = max(self._received) - self._first
        wrong = self._wrong + self._received.count(0)
        return {"received": self._received, "wrong": wrong, "cpu": self._cpu, "wall": wall}


def receive_by_callbacks(
    streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder
) -> None:
    """Receive all chunks in this one thread, which sleeps until a stream's next chunk is there.

    What an engine's own event loop does: the link's thread reports each stream that is ready.
    """
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()
    chunks_left = [into.chunks_left // len(streams)] * len(streams)

    def request(index: int) -> None:
        streams[index].when_next().add_done_callback(lambda _: ready.put(index))

    for index in range(len(streams)):
        request(index)
    while into.chunks_left:
        index = ready.get(timeout=PATIENCE)
        _take(index, streams[index].receive(timeout=0.0), into)
        chunks_left[index] -= 1
        if chunks_left[index]:  # another stream's chunks may come after this one's end
            request(index)


def receive_by_asyncio(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks in one thread with asyncio, a task for each stream."""

    async def receive(index: int) -> None:
        stream = AsyncChunkStream(streams[index])
        for _ in range(into.chunks_left // len(streams)):
            _take(index, await stream.receive(timeout=PATIENCE), into)

    async def receive_all() -> None:
        await asyncio.gather(*(receive(index) for index in range(len(streams))))

    asyncio.run(receive_all())


def receive_by_streams(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks in this one thread with `ChunkStreams`."""
    number_of = {stream: index for index, stream in enumerate(streams)}
    merged = ChunkStreams(streams)
    while into.chunks_left:
        stream, chunk = merged.receive(timeout=PATIENCE)
        _take(number_of[stream], chunk, into)


def receive_steps(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks from one stream, whose chunks are steps of them all."""
    (stream,) = streams
    while into.chunks_left:
        step = stream.receive(timeout=PATIENCE)
        if step is None:
            raise IntegrityError("the stream of steps ended too early")
        parts = [
            (int(name), tensors["hidden"], time.monotonic_ns())
            for name, tensors in step.requests().items()
        ]
        for index, hidden, now in parts:
            into.take(index, step.number, bytes_of(hidden).data, now)


RECEIVE = dict(
    zip(
        READERS,
        (receive_by_streams, receive_by_callbacks, receive_by_asyncio, receive_steps),
        strict=True,
    )
)
"""The function by which a reader of each name receives."""


def _take(index: int, chunk: ReceivedChunk | None, into: ChunkRecorder) -> None:
    now = time.monotonic_ns()
    if chunk is None:
        raise IntegrityError(f"stream {index} ended too early")
    into.take(index, chunk.number, bytes_of(chunk.data["hidden"]).data, now)


@contextlib.contextmanager
def make_fifos(*suffixes: str) -> Iterator[str]:
    """Make a FIFO of each suffix behind the same path, which is yielded; removes them."""
    with tempfile.TemporaryDirectory(prefix="kvlink-bench-") as directory:
        path = os.path.join(directory, "pipe")
        for suffix in suffixes:
            os.mkfifo(path + suffix, 0o600)
        yield path


def open_fifo(path: str, flags: int) -> int:
    """Open one end of a FIFO: a blocking descriptor of a large pipe."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # it would wait for the other end
    os.set_blocking(fd, True)
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return fd


def read_records(fd: int, nbytes: int, count: int) -> Iterator[list[memoryview]]:
    """Read `count` records of `nbytes` bytes each; blocks, and yields those that came together."""
    return _read_into(memoryview(bytearray(max(_PIPE_BYTES, 2 * nbytes))), fd, nbytes, count)


def _read_into(buffer: memoryview, fd: int, nbytes: int, count: int) -> Iterator[list[memoryview]]:
    filled = 0
    while count:
        received = os.readv(fd, [buffer[filled:]])
        if not received:
            raise EOFError("the pipe was closed")
        filled += received
        stop = filled - filled % nbytes
        yield [buffer[start : start + nbytes] for start in range(0, stop, nbytes)]
        count -= stop // nbytes
        buffer[: filled - stop] = buffer[stop:filled]  # a record whose end has not come
        filled -= stop


class ChunkPipe:
    """One end of a pipe that carries the same chunks, each behind its stream and number.

    It is a FIFO, in the place of any transport: the reader opens its end first.
    """

    def __init__(self, path: str, *, is_sender: bool):
        self._fd = open_fifo(path, os.O_WRONLY if is_sender else os.O_RDONLY)

    def send(self, stream: int, number: int, data: bytes) -> None:
        """Write a chunk; blocks while the pipe is full."""
        frame = _FRAME.pack(stream, number)
        written = os.writev(self._fd, [frame, data])
        total = len(frame) + len(data)
        while written < total:
            written += os.write(self._fd, (frame + data)[written:])

    def receive(self, into: ChunkRecorder) -> None:
        """Read all chunks; blocks."""
        size = _FRAME.size + into.paced.nbytes
        for records in read_records(self._fd, size, into.chunks_left):
            for record in records:
                now = time.monotonic_ns()
                stream, number = _FRAME.unpack_from(record)
                into.take(stream, number, record[_FRAME.size :], now)

    def close(self) -> None:
        """Close this end."""
        os.close(self._fd)
