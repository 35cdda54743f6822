"""Chunks at a pace: what they hold, who sends them, and who receives and compares them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import struct
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
    from collections.abc import Callable, Sequence

    from omni_kvlink.link import ChunkStream, ReceivedChunk

PATIENCE = 30.0
"""Seconds that a reader waits for a chunk."""
_STEP = 32
"""Elements between the starts of two chunks: a cache line, as tensors of an engine begin on one."""
_FRAME = struct.Struct("<II")
_PIPE_BYTES = 1 << 20


class ChunkBytes:
    """What each chunk holds, a function of its stream and number; equal in both processes."""

    def __init__(self, paced: Paced):
        self._paced, rows = paced, paced.streams * paced.chunks
        self._raw = np.random.default_rng(0).bytes(2 * _STEP * rows + paced.nbytes)
        writable = np.frombuffer(bytearray(self._raw), np.uint8)
        self._elements = torch.from_numpy(writable).view(torch.bfloat16)

    def tensor(self, stream: int, number: int) -> torch.Tensor:
        """A chunk, `[tokens, hidden]` bfloat16; not copied."""
        start = _STEP * self._paced.at(stream, number)
        tokens, hidden = self._paced.tokens, self._paced.hidden
        return self._elements[start : start + tokens * hidden].view(tokens, hidden)

    def step(self, number: int) -> torch.Tensor:
        """Chunk `number` of each stream, one behind the other: a new tensor."""
        streams = range(self._paced.streams)
        return torch.cat([self.tensor(stream, number) for stream in streams])

    def raw(self, stream: int, number: int) -> bytes:
        """The bytes of a chunk."""
        start = 2 * _STEP * self._paced.at(stream, number)
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
    late: list[int]
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
    called, returned = [0] * (paced.streams * paced.chunks), [0] * (paced.streams * paced.chunks)
    late, period = list[int](), 1e9 / per_second
    _sleep_until(begin)
    cpu = time.process_time_ns()
    for number in range(paced.chunks):
        for stream in range(paced.streams):
            phase = 0.0 if together else stream / paced.streams
            due = begin + int(period * (number + phase))
            _sleep_until(due)
            at = paced.at(stream, number)
            called[at] = now = time.monotonic_ns()
            send(stream, number)
            returned[at] = time.monotonic_ns()
            late.append(now - due)
    cpu = time.process_time_ns() - cpu
    return Sent(called, returned, late, cpu, time.monotonic_ns() - begin)


def send_steps(paced: Paced, send: Callable[[int], None], *, begin: int, per_second: float) -> Sent:
    """Send step `n`, which has chunk `n` of each stream, `n / per_second` seconds after `begin`."""
    called, returned = [0] * (paced.streams * paced.chunks), [0] * (paced.streams * paced.chunks)
    late, period = list[int](), 1e9 / per_second
    _sleep_until(begin)
    cpu = time.process_time_ns()
    for number in range(paced.chunks):
        due = begin + int(period * number)
        _sleep_until(due)
        now = time.monotonic_ns()
        send(number)
        done = time.monotonic_ns()
        for stream in range(paced.streams):
            at = paced.at(stream, number)
            called[at], returned[at] = now, done
        late += [now - due] * paced.streams
    cpu = time.process_time_ns() - cpu
    return Sent(called, returned, late, cpu, time.monotonic_ns() - begin)


def _sleep_until(due: int) -> None:
    left = due - time.monotonic_ns()
    if left > 0:
        time.sleep(1e-9 * left)


class ChunkRecorder:
    """Notes when each chunk came, and compares it; the clocks start with the first."""

    def __init__(self, paced: Paced):
        self._bytes, self.paced = ChunkBytes(paced), paced
        self._received = [0] * (paced.streams * paced.chunks)
        self._wrong = self._cpu = self._first = 0
        self.left = len(self._received)

    def take(self, stream: int, number: int, data: Any, now: int) -> None:
        """A chunk is here since `now` (monotonic nanoseconds); `data` has the buffer protocol."""
        if not self._first:
            self._first, self._cpu = now, time.process_time_ns()
        self._received[self.paced.at(stream, number)] = now
        self._wrong += bytes(data) != self._bytes.raw(stream, number)
        self.left -= 1
        if not self.left:
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
    left = [into.left // len(streams)] * len(streams)

    def request(at: int) -> None:
        streams[at].when_next().add_done_callback(lambda _: ready.put(at))

    for at in range(len(streams)):
        request(at)
    while into.left:
        at = ready.get(timeout=PATIENCE)
        _take(at, streams[at].receive(timeout=0.0), into)
        left[at] -= 1
        if left[at]:  # another stream's chunks may come after this one's end
            request(at)


def receive_by_asyncio(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks in one thread with asyncio, a task for each stream."""

    async def receive(at: int) -> None:
        stream = AsyncChunkStream(streams[at])
        for _ in range(into.left // len(streams)):
            _take(at, await stream.receive(timeout=PATIENCE), into)

    async def receive_all() -> None:
        await asyncio.gather(*(receive(at) for at in range(len(streams))))

    asyncio.run(receive_all())


def receive_by_streams(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks in this one thread with `ChunkStreams`."""
    number_of = {stream: at for at, stream in enumerate(streams)}
    together = ChunkStreams(streams)
    while into.left:
        stream, chunk = together.receive(timeout=PATIENCE)
        _take(number_of[stream], chunk, into)


def receive_steps(streams: Sequence[ChunkStream[ReceivedChunk]], into: ChunkRecorder) -> None:
    """Receive all chunks from one stream, whose chunks are steps of them all."""
    (stream,) = streams
    while into.left:
        step = stream.receive(timeout=PATIENCE)
        if step is None:
            raise IntegrityError("the stream of steps ended too early")
        found = [
            (int(name), tensors["hidden"], time.monotonic_ns())
            for name, tensors in step.requests().items()
        ]
        for at, hidden, now in found:
            into.take(at, step.number, bytes_of(hidden).data, now)


RECEIVE = dict(
    zip(
        READERS,
        (receive_by_streams, receive_by_callbacks, receive_by_asyncio, receive_steps),
        strict=True,
    )
)
"""How a reader of each name receives."""


def _take(at: int, chunk: ReceivedChunk | None, into: ChunkRecorder) -> None:
    now = time.monotonic_ns()
    if chunk is None:
        raise IntegrityError(f"stream {at} ended too early")
    into.take(at, chunk.number, bytes_of(chunk.data["hidden"]).data, now)


class ChunkPipe:
    """One end of a pipe that carries the same chunks, each behind its stream and number.

    It is a FIFO, in the place of any transport: the reader opens its end first.
    """

    def __init__(self, path: str, *, is_sender: bool):
        flags = os.O_WRONLY if is_sender else os.O_RDONLY
        self._fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._fd, True)
        if is_sender:
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, stream: int, number: int, data: bytes) -> None:
        """Write a chunk; blocks while the pipe is full."""
        frame = _FRAME.pack(stream, number)
        written = os.writev(self._fd, [frame, data])
        whole = len(frame) + len(data)
        while written < whole:
            written += os.write(self._fd, (frame + data)[written:])

    def receive(self, into: ChunkRecorder) -> None:
        """Read all chunks; blocks."""
        size = _FRAME.size + into.paced.nbytes
        buffer = memoryview(bytearray(max(_PIPE_BYTES, 2 * size)))
        filled = 0
        while into.left:
            count = os.readv(self._fd, [buffer[filled:]])
            if not count:
                raise EOFError("the pipe was closed")
            filled, at = filled + count, 0
            while filled - at >= size:
                now = time.monotonic_ns()
                data = buffer[at + _FRAME.size : at + size]
                stream, number = _FRAME.unpack_from(buffer, at)
                into.take(stream, number, data, now)
                at += size
            buffer[: filled - at] = buffer[at:filled]
            filled -= at

    def close(self) -> None:
        """Close this end."""
        os.close(self._fd)
