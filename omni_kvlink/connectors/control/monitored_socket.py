"""ZMQ sockets and their monitors in an event loop, with the options of every control channel."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq

from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Buffer: TypeAlias = "bytes | memoryview"
MAX_QUEUED = 4096
"""Messages that may wait for one peer; a peer with more is disconnected."""
LINGER_MS = 100
"""Time for the last messages to leave when a socket closes."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 4000
"""Interval of heartbeats; time without an answer after which a peer is disconnected."""
HANDSHAKE_MS = 5000
RECONNECT_MS = 30
"""The interval at which a consumer tries to connect while no producer serves."""
_CURVE_OVERHEAD = 256
"""Bytes by which encryption makes a frame longer, rounded up."""
# Not HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 reports that event before it reads errno, and the
# report changes errno. A frame that cannot be decrypted is then taken for a full queue, reading
# stops, and after the peer disconnects the next heartbeat fails an assertion: one changed byte on
# the network would end the process.
BROKEN = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
"""Monitor events which say that a handshake failed."""
_OPENED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_LISTENING
_UNCONNECTED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = _OPENED | BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED | _UNCONNECTED | zmq.EVENT_ACCEPT_FAILED
_POLLIN = int(zmq.POLLIN)  # the `&` of zmq's flag type is slower than the call to ZMQ
DONTWAIT = int(zmq.DONTWAIT)
_RCVMORE = int(zmq.RCVMORE)
_MANY = 16
"""Messages in one round after which another is likely: to ask ZMQ costs as much as to read it."""
_sockets: weakref.WeakSet[MonitoredSocket] = weakref.WeakSet()


class MonitoredSocket:
    """A ZMQ socket that an event loop reads, together with its monitor.

    ZMQ's descriptor is edge-triggered: it becomes readable when a message arrives, not while one
    is there, and any call on the socket, also a send, may consume that edge. Therefore the socket
    is drained after every wake-up and after every round of sends.

    `on_message` is given the frames of each message, `on_event` each event of the monitor and its
    value (mostly a descriptor); `on_idle` is called whenever all were read. They run with `lock`
    held, which every thread that uses the socket must hold. A frame of more than `max_frame` bytes
    ends the connection. `max_reads` messages are read before the loop comes to other work. `rounds`
    counts how often the socket was read, and `throttled` how often more was there than that.
    """

    max_reads = 256

    def __init__(
        self,
        context: zmq.Context[Any],
        kind: int,
        loop: EventLoop,
        on_message: Callable[[Sequence[zmq.Frame]], None],
        on_event: Callable[[int, int], None],
        on_idle: Callable[[], None],
        *,
        max_frame: int,
    ):
        with contextlib.ExitStack() as opened:  # after an error: the context would wait for them
            self.socket = socket = context.socket(kind)
            opened.callback(socket.close, 0)
            _set_options(socket, max_frame)
            self.fd = int(socket.FD)
            monitored = f"inproc://monitor-{self.fd}"
            socket.monitor(monitored, _EVENTS)
            self._monitor = context.socket(zmq.PAIR)
            opened.callback(self._monitor.close, 0)
            self._monitor.connect(monitored)
            opened.pop_all()
        self._loop = loop
        self._on_message, self._on_event, self._on_idle = on_message, on_event, on_idle
        self._draining = self._closed = False
        self._is_cut = False  # a frame may be lost
        self._has_turn = False  # the loop will go on reading
        self.rounds = self.throttled = 0
        self._frames: list[zmq.Frame] = []  # of the next message, as far as it was received
        self.descriptors: set[int] = set()  # of the connections and of the listening socket
        self.lock = threading.RLock()
        _sockets.add(self)

    def watch(self) -> None:
        """Start reading; in the loop's thread."""
        self._loop.watch(self.fd, READ, self.drain)
        self._loop.watch(self._monitor.FD, READ, self.drain)
        self.drain()

    def send(self, frames: Sequence[Buffer], *, copy: bool = True) -> None:
        """Send one message without blocking; call `drain` before the loop sleeps.

        The ZMQError is EAGAIN if too many messages wait, EHOSTUNREACH if the peer disconnected. An
        exception of a signal handler may come after any frame. What was sent of a message for a
        peer of a ROUTER is ended by an empty frame then, which no other message has.
        """
        if self._closed:
            return
        if len(frames) == 1:
            self.socket.send(frames[0], DONTWAIT, copy=copy)
            return
        try:
            self.socket.send_multipart(frames, DONTWAIT, copy=copy)
        except zmq.ZMQError:
            raise
        except BaseException:
            with contextlib.suppress(zmq.ZMQError):  # nothing is said to a ROUTER: it is ignored
                self.socket.send(b"", DONTWAIT)
            raise

    def pause(self) -> bool:
        """Leave messages to the caller's thread until `resume`; False if the socket is closed.

        The loop still reads what it finds when it sends, or when the monitor has events.
        """
        with self.lock:
            if not self._closed:
                self._loop.unwatch(self.fd)
            return not self._closed

    def resume(self) -> None:
        """Have the loop read again, also what is here already; any thread."""
        has_more = False
        with self.lock:
            if not self._closed:
                self._loop.watch(self.fd, READ, self.drain)
                has_more = bool(self._frames) or self._is_cut or is_readable(self.socket)
        if has_more:
            self._loop.call(self.drain)

    def peek(self) -> list[zmq.Frame]:
        """Return the frames of the next message, which stays until `skip`; none if none is here.

        The lock is held. An interrupt at any line loses nothing: the call that receives a frame
        adds it to those that are kept. One that comes in that call may lose the frame: the loop
        then hands on a message without frames, and the connection is to be ended.
        """
        frames = self._frames
        if self._closed or self._is_cut or not (frames or is_readable(self.socket)):
            return []
        try:
            while not frames or frames[-1].more:  # a message is whole once its first part is there
                frames.extend(map(self.socket.recv, (DONTWAIT,), (False,)))
        except zmq.Again:  # dropped with its connection
            pass
        except BaseException:
            self._is_cut = True
            raise
        return frames

    def skip(self) -> None:
        """Take away the message that `peek` returned; the lock is held."""
        self._frames = []

    def drain(self, events: int = 0) -> None:
        """Read all messages and events; let the loop do its other work in between."""
        with self.lock:
            if not self._draining and not self._has_turn:
                self._drain()

    def _take_turn(self) -> None:
        self._has_turn = False
        self.drain()

    def _drain(self) -> None:
        self._draining = True
        self.rounds += 1
        try:
            for number in range(self.max_reads):
                if self._closed:
                    return
                if self._read_message(number):
                    continue
                if not self.read_events():  # else messages sent before the event may be there
                    self._on_idle()
                    if self._closed or not is_readable(self.socket):
                        return
            self.throttled += 1
            self._has_turn = True
            self._loop.call(self._take_turn)  # in the next round
        finally:
            self._draining = False

    def _read_message(self, number: int) -> bool:
        """Handle the next message, after `number` in this round; return whether there was one."""
        if self._is_cut:
            self._is_cut, self._frames = False, []
            self._on_message([])
            return True
        frames = self.peek()
        if frames:
            self.skip()
            self._on_message(frames)
        return bool(frames)

    def read_events(self) -> bool:
        """Handle the monitor's pending events; return whether there were any."""
        found = False
        while not self._closed and is_readable(self._monitor):
            found = True
            try:
                frames = self._monitor.recv_multipart(DONTWAIT)
            except zmq.Again:
                break  # it was dropped with the connection
            event, value = struct.unpack("=Hi", frames[0])
            if event & _OPENED:
                self.descriptors.add(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self.descriptors.discard(value)
            self._on_event(event, value)
        return found

    def disconnect(self, descriptor: int) -> None:
        """Disconnect an accepted connection, by its descriptor; ZMQ then closes it.

        Needs no other descriptor. A socket of others that has got the number meanwhile is left
        alone: it has another local address.
        """
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return  # closed meanwhile
        try:
            local: object = connection.getsockname()
            local = f":{local[1]}" if isinstance(local, tuple) else local
            bound = self.socket.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(bound, bytes)
            if local and bound.rstrip(b"\0").decode().endswith(str(local)):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # disconnected by the peer
        finally:
            connection.detach()

    def duplicate(self, descriptor: int) -> socket.socket | None:
        """Duplicate a connection's descriptor for `close_duplicate`.

        None if it is closed, or no descriptor is left.
        """
        try:
            number = os.dup(descriptor)
        except OSError:
            return None
        try:
            duplicate = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            return None
        self.descriptors.add(duplicate.fileno())
        return duplicate

    def close_duplicate(self, duplicate: socket.socket | None) -> None:
        """Close what `duplicate` returned; the connection stays open for the peer until then."""
        if duplicate is None:
            return
        self.descriptors.discard(duplicate.fileno())
        duplicate.close()

    def close(self) -> None:
        """Close socket and monitor; messages that wait leave while the context terminates."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for fd in (self.fd, self._monitor.FD):
                self._loop.unwatch(fd)
            self._frames = []
            with contextlib.suppress(zmq.ZMQError):  # the socket's close ends the monitor, too
                self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close(LINGER_MS)
            # Break the reference cycle with the owner.
            self._on_message, self._on_event, self._on_idle = _ignore, _ignore, _ignore


class RouterSocket(MonitoredSocket):
    """Reads as fast as ZMQ gives: what is not read stands in front of other peers' messages.

    `on_message`, which leaves most of what one round reads for later, is given the routing id of
    the sender and the parts of its message: bytes if `is_known` says so of the routing id, which
    costs a tenth of frames, else frames.
    """

    max_reads = 2048

    def __init__(
        self,
        context: zmq.Context[Any],
        loop: EventLoop,
        is_known: Callable[[bytes], bool],
        on_message: Callable[[bytes, Sequence[Any]], None],
        on_event: Callable[[int, int], None],
        on_idle: Callable[[], None],
        *,
        max_frame: int,
    ):
        super().__init__(context, zmq.ROUTER, loop, _ignore, on_event, on_idle, max_frame=max_frame)
        self._is_known, self._on_parts = is_known, on_message

    def close(self) -> None:
        """Close socket and monitor, as `MonitoredSocket` does."""
        super().close()
        self._is_known, self._on_parts = _ignore, _ignore  # breaks the cycle with the owner

    def _read_message(self, number: int) -> bool:
        if number < _MANY and not is_readable(self.socket):
            return False
        try:
            identity = self.socket.recv(DONTWAIT)
        except zmq.Again:
            return is_readable(self.socket)  # it was not asked; or dropped with its connection
        copy = self._is_known(identity)
        parts = [self.socket.recv(DONTWAIT, copy)]  # whole: its first part is there
        while self.socket.getsockopt(_RCVMORE):
            parts.append(self.socket.recv(DONTWAIT, copy))
        self._on_parts(identity, parts)
        return True


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Ten times cheaper than the exception of a receive that finds nothing."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _ignore(*arguments: Any) -> Any:
    pass


def _set_options(socket: zmq.Socket[bytes], max_frame: int) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    # A limit would make libzmq stop reading from a peer; 4.3.5 then ends the process (assertions
    # `!_io_error`, `_input_stopped` of stream_engine_base.cpp) if that peer is disconnected.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame + _CURVE_OVERHEAD)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    # ZMQ sends no heartbeat while a message waits to leave: TCP must detect a dead peer then.
    socket.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)


def _close_in_child() -> None:
    """Disconnect a forked child: its copies would keep connections open when the parent dies.

    The descriptors are replaced, not closed, because ZMQ in the child still uses their numbers.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for monitored in list(_sockets):
        for fd in monitored.descriptors:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    os.dup2(null, fd, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_close_in_child)
