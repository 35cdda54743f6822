"""Messages between two processes of an engine, over a socket pair."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import msgspec

from ..errors import PeerLostError, WireError
from .errors import EngineDeadError

_LENGTH = struct.Struct("!Q")
_MAX = 1 << 32


class Channel:
    """Plain values there and back, in order; many may send, one receives.

    Args:
        sock: connected, blocking; owned.
    """

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises EngineDeadError if the other side is gone."""
        body = msgspec.msgpack.encode(message)
        try:
            with self._sending:
                self._sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise EngineDeadError(f"the other process is gone: {error}") from None

    def receive(self) -> dict[str, Any]:
        """The next message; waits for as long as the other side lives.

        Raises:
            PeerLostError: it is gone, or this side was closed.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX:
            raise WireError(f"a message of {length} bytes; the limit is {_MAX}")
        message = msgspec.msgpack.decode(self._read(length))
        if not isinstance(message, dict):
            raise WireError(f"a message is a map, not {type(message).__name__}")
        return message

    def close(self) -> None:
        """The other side's `receive`, and this one's, raise; again does nothing."""
        with contextlib.suppress(OSError):  # it is gone already
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give back the descriptor; nobody uses the channel any more."""
        self._sock.close()

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
