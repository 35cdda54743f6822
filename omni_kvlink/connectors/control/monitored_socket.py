"""A ZMQ socket and its monitor in a loop, and the options that every one of ours has."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq

from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop

Buffer: TypeAlias = "bytes | memoryview"
MOST_MESSAGES = 4096
"""Messages that may wait for a peer; one that lets more pile up is given up."""
LINGER_MS = 100
"""How long last words may take when a link closes."""
HEARTBEAT_MS, GIVEN_UP_MS = 500, 4000
"""A peer that answers no heartbeat for so long is given up: frozen, or behind a cut wire."""
HANDSHAKE_MS = 5000
RECONNECT_MS = 30
"""How often a consumer knocks while nobody serves."""
_TURNS = 64
_SEALING = 256
"""Bytes by which encryption makes a frame longer, and more."""
# Not HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 reports that before it looks at errno, which reporting
# changes. A frame that cannot be deciphered then passes for a full queue, reading stops, and when
# the peer goes, the next heartbeat fails an assertion: a byte changed on its way ends the process.
_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_OPENED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_LISTENING
_EVENTS = (
    _OPENED
    | _BROKEN
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_POLLIN = int(zmq.POLLIN)  # a flag's own `&` takes longer than asking ZMQ
_ports: weakref.WeakSet[MonitoredSocket] = weakref.WeakSet()


class MonitoredSocket:
    """A socket and its monitor; once it is watched, for the loop, and for whoever has its turn.

    ZMQ's descriptor is edge-triggered: it becomes readable when something happens, not while
    something is there, and any call on the socket, a send too, may swallow that. So the socket is
    read until it is empty after every wake-up and after every round of sends.

    Args:
        on_message: takes the frames of one message.
        on_event: takes an event of the monitor and its value, a descriptor in most cases.
        on_quiet: told whenever everything was read.

    Attributes:
        descriptors: of the connections, and of the listener.
        turn: who has it may use the socket, and nobody else.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        kind: int,
        loop: EventLoop,
        on_message: Callable[[Sequence[zmq.Frame]], None],
        on_event: Callable[[int, int], None],
        on_quiet: Callable[[], None] = lambda: None,
        *,
        longest: int,
    ):
        self.socket = socket = context.socket(kind)
        _set_options(socket, longest)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._loop = loop
        self._on_message, self._on_event, self._on_quiet = on_message, on_event, on_quiet
        self._draining = self._closed = False
        self.descriptors: set[int] = set()
        self.turn = threading.RLock()
        _ports.add(self)

    def watch(self) -> None:
        self._loop.watch(self.socket.FD, READ, self.drain)
        self._loop.watch(self._monitor.FD, READ, self.drain)
        self.drain()

    def send(self, frames: Sequence[Buffer], *, copy: bool = True) -> None:
        """Send now; `drain` must follow before the loop sleeps.

        Raises:
            zmq.ZMQError: EAGAIN when too much waits, EHOSTUNREACH when the peer is gone.
        """
        if not self._closed:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=copy)

    def drain(self, events: int = 0) -> None:
        """Hear everything that is there; the rest later, if it does not end."""
        with self.turn:
            if not self._draining:
                self._drain()

    def _drain(self) -> None:
        self._draining = True
        try:
            for _ in range(_TURNS):
                if self._closed:
                    return
                frames = _receive(self.socket)
                if frames is not None:
                    self._on_message(frames)
                elif not self.hear_events():  # else what was said before them may be there now
                    self._on_quiet()
                    if self._closed or not _is_readable(self.socket):
                        return
            self._loop.call(self.drain)
        finally:
            self._draining = False

    def hear_events(self) -> bool:
        """What the monitor knows up to now; whether there was anything."""
        heard = False
        while not self._closed and (said := _receive(self._monitor)) is not None:
            heard = True
            event, value = struct.unpack("=Hi", said[0].bytes)
            if event & _OPENED:
                self.descriptors.add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self.descriptors.discard(value)
            self._on_event(event, value)
        return heard

    def keep(self, descriptor: int) -> socket.socket | None:
        """A connection once more, open until `let_go`; None if it is gone."""
        try:
            line = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            return None
        self.descriptors.add(line.fileno())
        return line

    def let_go(self, line: socket.socket) -> None:
        """Of what `keep` gave: only then is the connection closed, if ZMQ ended it before."""
        self.descriptors.discard(line.fileno())
        line.close()

    def close(self) -> None:
        """Last words go out while the context ends."""
        with self.turn:
            if not self._closed:
                self._close()

    def _close(self) -> None:
        self._closed = True
        for one in (self.socket, self._monitor):
            self._loop.unwatch(one.FD)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(LINGER_MS)
        ignore = _ignore
        self._on_message, self._on_event, self._on_quiet = ignore, ignore, ignore  # no cycle


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there; asking costs a tenth of the error that a vain receipt raises."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    if not _is_readable(socket):
        return None
    try:
        frames: list[zmq.Frame] = socket.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None  # it went with its connection
    return frames


def is_broken(event: int) -> bool:
    """Whether an event says that a handshake failed."""
    return bool(event & _BROKEN)


def _ignore(*arguments: object) -> None:
    pass


def _set_options(socket: zmq.Socket[bytes], longest: int) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MOST_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MOST_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, longest + _SEALING)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, GIVEN_UP_MS)
    # ZMQ says no heartbeat while a message waits to leave: the kernel must see that it never does.
    socket.setsockopt(zmq.TCP_MAXRT, GIVEN_UP_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)


def _hide_in_child() -> None:
    """A forked child must not keep connections open that its parent's death would end.

    The numbers stay taken: the library in the child believes that it has them.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for port in list(_ports):
        for fd in port.descriptors:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_hide_in_child)
