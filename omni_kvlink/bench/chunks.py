"""Chunks and small payloads: what they hold, a bare pipe for them, and who compares them."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.report import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.bench.setups import Paced

_STEP = 32
"""Elements between the starts of two chunks: a cache line, as tensors of an engine begin on one."""
_PIPE_BYTES = 1 << 20


class ChunkBytes:
    """The content of each chunk, by its stream and number; equal in both processes."""

    def __init__(self, paced: Paced):
        self.paced, count = paced, paced.streams * paced.chunks
        self._raw = np.random.default_rng(0).bytes(2 * _STEP * count + paced.nbytes)
        writable = np.frombuffer(bytearray(self._raw), np.uint8)
        self._elements = torch.from_numpy(writable).view(torch.bfloat16)

    def tensor(self, stream: int, number: int) -> torch.Tensor:
        """A chunk, `[tokens, hidden]` bfloat16; not copied."""
        start = _STEP * self.paced.position(stream, number)
        tokens, hidden = self.paced.tokens, self.paced.hidden
        return self._elements[start : start + tokens * hidden].view(tokens, hidden)

    def step(self, number: int) -> torch.Tensor:
        """Chunk `number` of each stream, one behind the other: a new tensor."""
        streams = range(self.paced.streams)
        return torch.cat([self.tensor(stream, number) for stream in streams])

    def raw(self, stream: int, number: int) -> bytes:
        """The bytes of a chunk."""
        start = 2 * _STEP * self.paced.position(stream, number)
        return self._raw[start : start + self.paced.nbytes]

    def raw_all(self) -> list[bytes]:
        """The bytes of each chunk, at its position."""
        chunks, streams = range(self.paced.chunks), range(self.paced.streams)
        return [self.raw(stream, number) for stream in streams for number in chunks]

    def raw_run(self, stream: int, count: int) -> list[bytes]:
        """The bytes of `count` chunks of a stream; after the last one, again from its first."""
        return [self.raw(stream, number % self.paced.chunks) for number in range(count)]

    def flip(self, stream: int, number: int) -> torch.Tensor:
        """A copy of a chunk with a wrong bit."""
        wrong = self.tensor(stream, number).clone()
        bytes_of(wrong)[self.paced.nbytes // 2] ^= 1
        return wrong


class ChunkRecorder:
    """Compares items; the CPU is that of this process from `begin` to `end`, nanoseconds."""

    def __init__(self, expected: Sequence[bytes]):
        self._expected, self._wrong, self.count = expected, 0, len(expected)

    def begin(self) -> None:
        """Start the clock."""
        self._cpu_before = time.process_time_ns()

    def take(self, position: int, data: Any) -> None:
        """Compare an item; `data` has the buffer protocol."""
        self._wrong += bytes(data) != self._expected[position]

    def end(self) -> None:
        """Stop the clock."""
        self._ended, self._cpu = time.monotonic_ns(), time.process_time_ns() - self._cpu_before

    def result(self) -> dict[str, Any]:
        """The number of wrong items, the CPU, and the moment of the end."""
        return {"wrong": self._wrong, "cpu": self._cpu, "ended": self._ended}


class TimedRecorder(ChunkRecorder):
    """Notes when each item came, too; the clock runs from the first item to the last."""

    def __init__(self, expected: Sequence[bytes]):
        super().__init__(expected)
        self._received, self.items_left = [0] * self.count, self.count

    def take(self, position: int, data: Any, now: int = 0) -> None:
        """An item is here, since `now` if it is given."""
        self._received[position] = now or time.monotonic_ns()
        if self.items_left == self.count:
            self.begin()
        super().take(position, data)
        self.items_left -= 1
        if not self.items_left:
            self.end()

    def result(self) -> dict[str, Any]:
        """The moments, the wall time of all, and as usual; a missing item is wrong, too."""
        wall = max(self._received) - min(filter(None, self._received))
        wrong = self._wrong + self._received.count(0)
        return {**super().result(), "received": self._received, "wall": wall, "wrong": wrong}


class Pipe:
    """One end of a bare pipe, and of a second one back, in which each item may be one byte: read.

    Both are FIFOs, in the place of any transport; `path` and `path + "-back"` exist. The sender is
    made first, then the other end, then the sender calls `connect`.
    """

    def __init__(self, path: str, *, is_sender: bool):
        self._path = path
        self._data = -1 if is_sender else _open_fifo(path, os.O_RDONLY)
        self._replies = _open_fifo(path + "-back", os.O_RDONLY if is_sender else os.O_WRONLY)

    def connect(self) -> None:
        """Open the sender's end."""
        self._data = _open_fifo(self._path, os.O_WRONLY)

    def wait_until_ready(self) -> None:
        """Wait until the other end receives, with replies."""
        self._read_replies(1)

    def write(self, item: bytes) -> None:
        """Write an item; blocks while the pipe is full."""
        written = os.write(self._data, item)
        while written < len(item):
            written += os.write(self._data, item[written:])

    def send(self, items: Sequence[bytes], outstanding: int) -> None:
        """Write all items; blocks while `outstanding` of them have not been read and compared."""
        unread = 0
        for item in items:
            written = os.write(self._data, item)
            if written < len(item):
                self.write(item[written:])
            unread += 1
            if unread >= outstanding:
                unread -= self._read_replies(outstanding)
        while unread:
            unread -= self._read_replies(outstanding)

    def receive(
        self, nbytes: int, positions: Sequence[int], into: ChunkRecorder, replies: bool = False
    ) -> None:
        """Read items of `nbytes` bytes each, which come in the order of `positions`; blocks."""
        buffer, filled = memoryview(bytearray(max(_PIPE_BYTES, 2 * nbytes))), 0
        unread, items_left = iter(positions), len(positions)
        if replies:
            os.write(self._replies, b"\0")
        while items_left:
            received = os.readv(self._data, [buffer[filled:]])
            if not received:
                raise EOFError("the pipe was closed")
            filled += received
            stop = filled - filled % nbytes
            for start, position in zip(range(0, stop, nbytes), unread, strict=False):
                into.take(position, buffer[start : start + nbytes])
            if replies:
                os.write(self._replies, bytes(stop // nbytes))
            items_left -= stop // nbytes
            buffer[: filled - stop] = buffer[stop:filled]  # an item whose end has not come
            filled -= stop

    def _read_replies(self, limit: int) -> int:
        count = len(os.read(self._replies, limit))
        if not count:
            raise BenchError("the reader closed its pipe")
        return count

    def close(self) -> None:
        """Close this end."""
        for fd in (self._data, self._replies):
            if fd >= 0:
                os.close(fd)


def _open_fifo(path: str, flags: int) -> int:
    """Open one end of a FIFO: a blocking descriptor of a large pipe."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # it would wait for the other end
    os.set_blocking(fd, True)
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return fd
