"""Messages between two processes of an engine, over a socket pair."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from functools import partial
from typing import Any, NamedTuple

import msgspec

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.codec import pack, unpack
from omni_kvlink.engine.ipc.shm_tensors import QUOTA, ShmTensorReader, ShmTensorWriter, close_all
from omni_kvlink.errors import ClosedError, PeerLostError, SchemaError, WireError
from omni_kvlink.memory.arena import Block
from omni_kvlink.memory.region import Mapping

_LENGTH = struct.Struct("!Q")
_MAX = 1 << 32
_FDS = 64
"""Descriptors that may come with one message."""


class _Frame(NamedTuple):
    """A message as bytes, and the arenas that the other side hears of with it."""

    body: bytes
    arenas: list[Mapping]


class RpcChannel:
    """Whatever `codec.pack` takes, there and back, in order; many may send, one receives.

    Sending never waits for the other side, which may be frozen: a thread writes what was sent.
    Large tensors cross in shared memory, which comes back when the other side has taken them.

    Args:
        sock: connected, blocking; owned.
        quota: bytes of large tensors that may be on their way at once.
    """

    def __init__(self, sock: socket.socket, *, quota: int = QUOTA):
        self._sock = sock
        self._outbox, self._inbox = ShmTensorWriter(quota), ShmTensorReader()
        self._sending = threading.Lock()
        self._frames: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._broken: OSError | None = None
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._writer.start()

    def send(self, message: dict[str, Any]) -> None:
        """Send, and return.

        Raises:
            EngineDeadError: the other side is gone, as far as is known.
            SchemaError: something in the message cannot cross.
            CapacityError: its tensors have no room, now or ever.
        """
        if self._broken is not None or self._closed:
            raise EngineDeadError(f"the other process is gone: {self._broken or 'closed'}")
        blocks: list[Block] = []
        try:
            self._enqueue(pack(message, partial(self._outbox.stow, blocks)), blocks, [])
        except ClosedError:
            raise EngineDeadError("the other process is gone") from None
        except BaseException:
            self._outbox.free(blocks)
            raise

    def receive(self) -> dict[str, Any]:
        """The next message; waits for as long as the other side lives.

        Raises:
            PeerLostError: it is gone, or this side was closed.
        """
        try:
            while (message := self._receive()) is None:
                pass  # it was about memory alone
        except BaseException:
            self._outbox.close()  # who waits for room waits in vain
            raise
        return self._unpacked(message)

    def stats(self) -> dict[str, int]:
        """Of the memory that large tensors cross in, on their way from here."""
        return self._outbox.stats()

    def close(self) -> None:
        """End the channel, once all that was sent is written; again does nothing.

        This side's `receive` raises at once, the other's when it has read everything.
        """
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):  # it is gone already
                self._sock.shutdown(socket.SHUT_RD)
            self._frames.put(None)

    def release(self) -> None:
        """Close, give back everything; waits until the other side has read all, or is gone."""
        self.close()
        self._writer.join()
        self._sock.close()
        self._outbox.close()

    def _receive(self) -> Any:
        (length,), descriptors = self._read_head()
        if length > _MAX:
            close_all(descriptors)
            raise WireError(f"a message of {length} bytes; the limit is {_MAX}")
        message, arenas, retired, freed = msgspec.msgpack.decode(self._read(length))
        self._inbox.learn(arenas, descriptors, retired)
        self._outbox.free([Block(*block) for block in freed])
        return message

    def _unpacked(self, message: Any) -> dict[str, Any]:
        """A message with its tensors, whose memory is the sender's again."""
        taken: list[Block] = []
        found = unpack(message, partial(self._inbox.take, taken))
        if taken:
            with contextlib.suppress(ClosedError):  # a sender that is gone has it back
                self._enqueue(None, [], taken)
        if not isinstance(found, dict):
            raise WireError(f"a message is a map, not {type(found).__name__}")
        return found

    def _enqueue(self, message: Any, blocks: list[Block], taken: list[Block]) -> None:
        try:
            plain = msgspec.Raw(msgspec.msgpack.encode(message))
        except (ValueError, OverflowError) as error:
            raise SchemaError(f"a message cannot be written: {error}") from None
        with self._sending:  # an arena is named in the first message that has something in it
            arenas, numbers, retired = self._outbox.news(blocks)
            body = msgspec.msgpack.encode([plain, numbers, retired, taken])
            self._frames.put(_Frame(body, arenas))

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            if self._broken is not None:
                continue
            descriptors = [arena.fd for arena in frame.arenas]
            try:
                head = _LENGTH.pack(len(frame.body))
                socket.send_fds(self._sock, [head], descriptors)
                self._sock.sendall(frame.body)
            except OSError as error:
                self._broken = error
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read_head(self) -> tuple[tuple[int], list[int]]:
        """A message's length, and the descriptors that come with it."""
        try:
            head, descriptors, flags, _ = socket.recv_fds(
                self._sock, _LENGTH.size, _FDS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise PeerLostError(f"the channel broke: {error}") from None
        if not head:
            raise PeerLostError("the other process closed the channel")
        if flags & socket.MSG_CTRUNC:
            close_all(descriptors)
            raise WireError("more descriptors came with a message than this process may open")
        rest = self._read(_LENGTH.size - len(head))
        return _LENGTH.unpack(head + rest), descriptors

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, at = memoryview(buffer), 0
        while at < count:
            try:
                got = self._sock.recv_into(view[at:])
            except OSError as error:
                raise PeerLostError(f"the channel broke: {error}") from None
            if not got:
                raise PeerLostError("the other process closed the channel")
            at += got
        return buffer
