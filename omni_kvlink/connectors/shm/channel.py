"""A SEQPACKET socket that carries whole messages and descriptors, and never blocks."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from omni_kvlink.connectors.protocol.messages import MAX_MESSAGE, Message, decode, encode
from omni_kvlink.errors import WireError

MAX_BACKLOG = 4096
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)
_open_channels: weakref.WeakSet[ShmChannel] = weakref.WeakSet()


class ShmChannel:
    """Messages to and from one peer; `send` is thread-safe, `receive` is the loop's.

    Args:
        sock: connected; taken over.
        backlogged: told (in the sender's thread) that messages wait for `flush`.
    """

    def __init__(self, sock: socket.socket, backlogged: Callable[[], None]):
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self._backlogged = backlogged
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, int]] = deque()
        _open_channels.add(self)

    def fileno(self) -> int:
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def is_hopeless(self) -> bool:
        """Whether the peer has not read for so long that it is given up."""
        return len(self._backlog) > MAX_BACKLOG

    def send(self, message: Message, fd: int = -1) -> None:
        """Send now, or queue it in order; a peer that is gone is noticed by `receive`."""
        data = encode(message)
        with self._lock:
            if self._sock is None:
                return
            if not self._backlog and self._put(data, fd):
                return
            self._backlog.append((data, os.dup(fd) if fd >= 0 else -1))
        self._backlogged()

    def flush(self) -> bool:
        """Send what waits, as far as it goes; True when nothing is left."""
        with self._lock:
            while self._backlog:
                data, fd = self._backlog[0]
                if not self._put(data, fd):
                    return False
                self._backlog.popleft()
                if fd >= 0:
                    os.close(fd)
            return True

    def receive(self) -> Iterator[tuple[Message, int]]:
        """Every message that is there, with its descriptor (yours to close) or -1.

        Raises:
            ConnectionError: the peer is gone.
            WireError: it sent something that is no message.
        """
        was_reset = False
        while self._sock is not None:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_MESSAGE, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It closed and had not read all: that is reported before its last words.
                if was_reset:
                    raise
                was_reset = True
                continue
            fds = _descriptors(ancillary)
            try:
                if not data:
                    raise ConnectionError("the connection was closed")
                if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
                    raise WireError("a message is too long, or carries too many descriptors")
                message = decode(data)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            yield message, fds[0] if fds else -1

    def close(self) -> None:
        """End the connection, also for copies of the socket that a forked child may hold."""
        with self._lock:
            sock, self._sock = self._sock, None
            for _, fd in self._backlog:
                if fd >= 0:
                    os.close(fd)
            self._backlog.clear()
            self._backlogged = lambda: None  # breaks the cycle with the owner
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _put(self, data: bytes, fd: int) -> bool:
        assert self._sock is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            # The peer is gone, or a message is lost (no more descriptors may travel): either way
            # the stream is over, and the loop reads its last words and its end.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        return True

    def _forget(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_in_child() -> None:
    """A forked child must not keep a connection open that its parent's death would end."""
    for channel in list(_open_channels):
        channel._forget()


os.register_at_fork(after_in_child=_close_in_child)
