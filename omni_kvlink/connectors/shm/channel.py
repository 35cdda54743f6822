"""A socket that carries whole messages, and the descriptors of memory files."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Message,
    decode_all,
    encode,
    encode_all,
)
from omni_kvlink.errors import WireError
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.mapping import Mapping

MAX_BACKLOG = 4096
"""Messages that may wait for a peer that does not read; then it is disconnected."""
MAX_BACKLOG_NBYTES = 64 << 20
"""Bytes of them."""
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class ShmChannel:
    """A SEQPACKET socket that carries whole messages and descriptors, and never blocks.

    `send` and `flush` are thread-safe; `receive` is for one thread. The channel owns `sock`.
    `backlogged` is called in the sender's thread when messages wait for `flush`.

    Attributes:
        fd: the socket's descriptor; -1 after `close`.
        is_drained: whether the last `receive` ended because no message was there.
    """

    is_drained = False

    def __init__(self, sock: socket.socket, backlogged: Callable[[], None]):
        sock.setblocking(False)
        self._sock: socket.socket | None = sock
        self.fd = sock.fileno()
        self._backlogged = backlogged
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, Mapping | None]] = deque()
        self._backlog_nbytes = 0
        process.call_in_children(sock, socket.socket.close)  # in them it would outlive this process

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer has closed its end; one that has only finished still receives."""
        return self._sock is None or self._has_event(0)

    @property
    def has_unread(self) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        return self._sock is not None and self._has_event(select.POLLIN)

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._backlog)

    @property
    def is_backlog_full(self) -> bool:
        """Whether the peer has not read for so long that it should be disconnected."""
        return len(self._backlog) > MAX_BACKLOG or self._backlog_nbytes > MAX_BACKLOG_NBYTES

    def send(self, message: Message, memory: Mapping | None = None) -> None:
        """Send now, or queue in order; the descriptor of `memory` is passed with the message.

        The end of the connection is reported by `receive`.
        """
        self._transmit([encode(message)], memory)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Send several messages as few; all else as for `send`."""
        self._transmit(encode_all(messages))

    def _transmit(self, parts: Sequence[bytes], memory: Mapping | None = None) -> None:
        is_queued = False
        with self._lock:
            if self._sock is None:
                return
            for data in parts:
                if self._backlog or not self._put(data, memory):
                    self._backlog.append((data, memory))
                    self._backlog_nbytes += len(data)
                    is_queued = True
        if is_queued:
            self._backlogged()

    def flush(self) -> bool:
        """Send queued messages as far as the socket takes them; return whether none is left."""
        with self._lock:
            while self._backlog:
                if not self._put(*self._backlog[0]):
                    return False
                self._backlog_nbytes -= len(self._backlog.popleft()[0])
            return True

    def finish(self) -> None:
        """Send nothing more, also not what is queued; the peer's messages are still received."""
        with self._lock:
            self._backlog.clear()
            self._shut_down(socket.SHUT_WR)

    def finish_receiving(self) -> None:
        """Let nobody send anything more; what was sent before is still received, then the end."""
        with self._lock:
            self._shut_down(socket.SHUT_RD)

    def receive(self, turn: float = float("inf")) -> Iterator[tuple[list[Message], int]]:
        """Yield the messages that arrived together, with their descriptor (the caller's) or -1.

        Ends when none is there, or after `turn` messages: a peer that sends faster than they are
        handled must not keep the caller. Raises ConnectionError if the connection has ended,
        WireError if the peer sent no message.
        """
        was_reset = self.is_drained = False
        while self._sock is not None and turn > 0:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_MESSAGE, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self.is_drained = True
                return
            except ConnectionResetError:
                # The peer closed before it had read everything: Linux reports that before the
                # peer's last messages, which can still be received.
                if was_reset:
                    raise
                was_reset = True
                continue
            except OSError as error:
                raise ConnectionError(f"the connection broke: {error.strerror}") from None
            fds = _descriptors(ancillary) if ancillary else []
            try:
                if not data:
                    raise ConnectionError("the connection was closed")
                if flags & _CUT or len(fds) > 1:
                    raise WireError(
                        "a message is too long, or carries too many descriptors, or more than "
                        "this process may open (ulimit -n)"
                    )
                messages = decode_all(data)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            turn -= len(messages)
            yield messages, fds[0] if fds else -1

    def peek(self) -> list[Message]:
        """Return the messages that would be received next, which stay; none if none are here.

        Raises ConnectionError if the connection has ended, WireError if the peer sent no message.
        """
        # With the lock: `close`, by another thread, must not free the descriptor meanwhile.
        with self._lock:
            try:
                data = b"" if self._sock is None else self._sock.recv(MAX_MESSAGE, socket.MSG_PEEK)
            except BlockingIOError:
                return []
            except OSError as error:
                raise ConnectionError(f"the connection broke: {error.strerror}") from None
        if not data:
            raise ConnectionError("the connection was closed")
        return decode_all(data)

    def skip(self) -> None:
        """Discard the messages that `peek` returned."""
        with self._lock:
            try:
                if self._sock is not None:
                    self._sock.recv(1)
            except OSError:  # the connection has ended
                pass

    def close(self) -> None:
        """End the connection, also for copies of the socket that a forked child may hold."""
        with self._lock:
            self._shut_down(socket.SHUT_RDWR)
            self.fd = -1
            sock, self._sock = self._sock, None
            self._backlog.clear()
            self._backlogged = lambda: None  # breaks the cycle with the owner
        if sock is not None:
            sock.close()

    def _has_event(self, events: int) -> bool:
        poll = select.poll()
        poll.register(self.fd, events)
        return bool(poll.poll(0))

    def _shut_down(self, how: int) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(how)

    def _put(self, data: bytes, memory: Mapping | None) -> bool:
        if self._sock is None:
            return True
        try:
            if memory is None:
                self._sock.send(data, socket.MSG_NOSIGNAL)
            else:
                fds = array.array("i", [memory.fd])
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            # The peer is gone, or a message is lost (no more descriptors may travel): either way
            # the connection is over. The loop receives what is left of it, then its end.
            self._shut_down(socket.SHUT_RDWR)
        return True


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
