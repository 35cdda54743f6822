"""`RpcChannel`: messages between two processes of an engine, over a socket pair."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from functools import partial
from typing import Any, TypeAlias

import msgspec

from omni_kvlink.engine.errors import EngineDeadError
from omni_kvlink.engine.ipc.codec import pack, unpack
from omni_kvlink.engine.ipc.shm_tensors import (
    QUOTA_NBYTES,
    ShmTensorReader,
    ShmTensorWriter,
    close_all,
)
from omni_kvlink.errors import (
    ClosedError,
    PeerLostError,
    SchemaError,
    WireError,
    without_frames,
)
from omni_kvlink.lowlevel import Block, Mapping

_LENGTH = struct.Struct("!Q")
_MAX_NBYTES = 1 << 32
_MAX_DESCRIPTORS = 64
"""File descriptors that may come with one message."""


_Frame: TypeAlias = tuple[bytes, list[Mapping]]
"""An encoded message, and the arenas whose descriptors are sent with it."""


class RpcChannel:
    """Sends and receives what `codec.pack` encodes, in order.

    Any thread may send, one thread receives. A thread of this channel writes to the socket
    (blocking; owned), so that `send` does not block on a receiver that is frozen. Large tensors
    travel in shared memory, at most `quota` bytes, reused once the receiver has copied them out.
    """

    def __init__(self, sock: socket.socket, *, quota: int = QUOTA_NBYTES):
        self._sock = sock
        self._tensors_out, self._tensors_in = ShmTensorWriter(quota), ShmTensorReader()
        self._sending = threading.Lock()
        self._frames: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._broken: OSError | None = None
        self._closed = False
        self._writer = threading.Thread(target=self._write, name="channel-writer", daemon=True)
        self._writer.start()

    def send(self, message: Any) -> None:
        """Queue a message to be written; waits only for shared memory for its tensors.

        Raises EngineDeadError if the other process is known to be gone or this channel is closed,
        SchemaError if the message cannot be encoded, CapacityError if the memory is not freed.
        """
        if self._broken is not None or self._closed:
            raise EngineDeadError(f"the other process is gone: {self._broken or 'closed'}")
        blocks: list[Block] = []
        try:
            self._enqueue(pack(message, partial(self._tensors_out.write, blocks)), blocks, [])
        except ClosedError:
            raise EngineDeadError("the other process is gone") from None
        except BaseException:
            self._tensors_out.free(blocks)
            raise

    def receive(self) -> Any:
        """Wait for the next message; PeerLostError once either side has closed the channel."""
        try:
            while (message := self._receive()) is None:
                pass  # it only freed shared memory
        except BaseException:
            self._tensors_out.close()  # a `send` that waits for memory raises
            raise
        return self._decode(message)

    def close(self) -> None:
        """Close both directions, this one after all queued messages; does not wait for that."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):  # the other side closed it
                self._sock.shutdown(socket.SHUT_RD)
            self._frames.put(None)

    def join(self) -> None:
        """Close, wait until every message is written, and release the socket and the memory."""
        self.close()
        self._writer.join()
        self._sock.close()
        self._tensors_out.close()

    def _receive(self) -> Any:
        (length,), descriptors = self._read_head()
        if length > _MAX_NBYTES:
            close_all(descriptors)
            raise WireError(f"a message of {length} bytes; the limit is {_MAX_NBYTES}")
        message, arenas, retired, freed = msgspec.msgpack.decode(self._read(length))
        self._tensors_in.add_arenas(arenas, descriptors, retired)
        self._tensors_out.free([Block(*block) for block in freed])
        return message

    def _decode(self, message: Any) -> Any:
        """Decode a message, and tell the sender which blocks of shared memory are free again."""
        freed: list[Block] = []
        decoded = unpack(message, partial(self._tensors_in.read, freed))
        if freed:
            with contextlib.suppress(ClosedError):  # a sender that is gone needs no memory
                self._enqueue(None, [], freed)
        return decoded

    def _enqueue(self, message: Any, blocks: list[Block], freed: list[Block]) -> None:
        try:
            plain = msgspec.Raw(msgspec.msgpack.encode(message))
        except (ValueError, OverflowError) as error:
            raise SchemaError(f"a message cannot be encoded: {error}") from None
        with self._sending:  # an arena is announced by the first message with a tensor in it
            arenas, numbers, retired = self._tensors_out.announce(blocks)
            body = msgspec.msgpack.encode([plain, numbers, retired, freed])
            self._frames.put((body, arenas))

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            if self._broken is not None:
                continue
            body, arenas = frame
            try:
                head = [_LENGTH.pack(len(body))]
                socket.send_fds(self._sock, head, [arena.fd for arena in arenas])
                self._sock.sendall(body)
            except OSError as error:
                self._broken = without_frames(error)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read_head(self) -> tuple[tuple[int], list[int]]:
        """Read a message's length, and the descriptors that come with it."""
        try:
            head, descriptors, flags, _ = socket.recv_fds(
                self._sock, _LENGTH.size, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise PeerLostError(f"the channel broke: {error}") from None
        if not head:
            raise PeerLostError("the other process closed the channel")
        if flags & socket.MSG_CTRUNC:
            close_all(descriptors)
            raise WireError("a message came with more descriptors than this process may open")
        tail = self._read(_LENGTH.size - len(head))
        return _LENGTH.unpack(head + tail), descriptors

    def _read(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, offset = memoryview(buffer), 0
        while offset < count:
            try:
                nbytes = self._sock.recv_into(view[offset:])
            except OSError as error:
                raise PeerLostError(f"the channel broke: {error}") from None
            if not nbytes:
                raise PeerLostError("the other process closed the channel")
            offset += nbytes
        return buffer
