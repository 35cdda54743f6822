"""A socket that carries whole messages, and the descriptors of memory files."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import threading
from collections import deque
from ctypes import POINTER, Structure, c_int, c_size_t, c_ssize_t, c_uint, c_void_p
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Message,
    decode_all,
    encode,
    encode_all,
)
from omni_kvlink.connectors.runtime.turns import TURN
from omni_kvlink.errors import WireError
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.mapping import Mapping

MAX_BACKLOG = 4096
"""Messages that may wait for a peer that does not read; then it is disconnected."""
MAX_BACKLOG_NBYTES = 64 << 20
"""Bytes of them."""
# A PyDLL keeps the interpreter's lock. The calls of `socket` give it away: each wakes a thread that
# computes, and waits for it, twice a message.
_libc = ctypes.PyDLL(None, use_errno=True)
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK)
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_NOW = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_FD_SPACE = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class _Buffer(Structure):
    """An `iovec`."""

    _fields_ = (("address", c_void_p), ("nbytes", c_size_t))


class _DatagramHead(Structure):
    """A `msghdr`."""

    _fields_ = (
        *(("name", c_void_p), ("name_nbytes", c_uint)),
        *(("buffers", POINTER(_Buffer)), ("num_buffers", c_size_t)),
        *(("control", c_void_p), ("control_nbytes", c_size_t), ("flags", c_int)),
    )


class _Datagram(Structure):
    """An `mmsghdr`."""

    _fields_ = (("head", _DatagramHead), ("nbytes", c_uint))


_send, _receive = _libc.send, _libc.recvmmsg
_send.argtypes, _send.restype = (c_int, ctypes.c_char_p, c_size_t, c_int), c_ssize_t
_receive.argtypes = (c_int, POINTER(_Datagram), c_uint, c_int, c_void_p)


class Inbox:
    """Memory for the datagrams of one call, `TURN` at most; for one thread."""

    def __init__(self) -> None:
        # The system gives a page when it is written to: most datagrams have few bytes.
        self._memory = mmap.mmap(-1, TURN * MAX_MESSAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._datagrams, self._buffers = (_Datagram * TURN)(), (_Buffer * TURN)()
        for number, (datagram, buffer) in enumerate(
            zip(self._datagrams, self._buffers, strict=True)
        ):
            buffer.address, buffer.nbytes = start + number * MAX_MESSAGE, MAX_MESSAGE
            datagram.head.buffers, datagram.head.num_buffers = ctypes.pointer(buffer), 1

    def receive(self, fd: int, limit: int) -> list[bytes | None]:
        """Return the datagrams that are there, at most `limit` of `TURN`; an empty one is the end.

        None stands for one that is too long or has descriptors, which the system has closed.
        OSError if the connection broke.
        """
        count, memory = _receive(fd, self._datagrams, limit, _NOW, None), self._memory
        if count < 0:
            number = ctypes.get_errno()
            if number in _FULL:
                return []
            raise OSError(number, os.strerror(number))
        received: list[bytes | None] = []
        start = 0
        for datagram in self._datagrams[:count]:
            is_cut = datagram.head.flags & _CUT
            received.append(None if is_cut else memory[start : start + datagram.nbytes])
            start += MAX_MESSAGE
        return received


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
        self._unread: deque[bytes | None] = deque()  # what `receive_many` has taken from the socket
        process.call_in_children(sock, socket.socket.close)  # in them it would outlive this process

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer has closed its end; one that has only finished still receives."""
        return self._sock is None or self._has_event(0)

    @property
    def has_unread(self) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        return bool(self._unread) or (self._sock is not None and self._has_event(select.POLLIN))

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

    def receive_many(self, inbox: Inbox, turn: float) -> Iterator[list[Message]]:
        """Yield messages as `receive`, those of many datagrams together; WireError for descriptors.

        A message that `turn` excludes waits here for the next call.
        """
        left, was_reset, self.is_drained = turn, False, False
        while left > 0 and self._sock is not None:
            limit = int(min(left, TURN))
            try:
                if not self._unread:
                    if self.is_drained:
                        return
                    self._unread.extend(inbox.receive(self.fd, limit))
                    self.is_drained = len(self._unread) < limit
            except ConnectionResetError:  # as in `receive`
                if was_reset:
                    raise
                was_reset = True
                continue
            except OSError as error:
                raise ConnectionError(f"the connection broke: {error.strerror}") from None
            messages: list[Message] = []
            while self._unread and len(messages) < left:
                data = self._unread[0]
                try:
                    if data is None:
                        raise WireError("a message is too long, or has a descriptor")
                    if not data:
                        raise ConnectionError("the connection was closed")
                    messages += decode_all(data)
                except (ConnectionError, WireError):
                    if not messages:
                        raise
                    break  # what came before it is handled first
                self._unread.popleft()
            left -= len(messages)
            if messages:
                yield messages
        self.is_drained &= not self._unread

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
            self._unread.clear()
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
                if _send(self._sock.fileno(), data, len(data), _NOW) >= 0:
                    return True
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
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
