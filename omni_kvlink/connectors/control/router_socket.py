"""The ROUTER socket of a listener, and its connections before their `Hello`."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.monitored_socket import DONTWAIT, MonitoredSocket, is_readable

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from omni_kvlink.connectors.control.peer import PeerConnection
    from omni_kvlink.connectors.runtime.event_loop import EventLoop

MAX_UNGREETED = 128
"""Connections that may be without `Hello` at a time; the oldest is disconnected for another."""
_ACCEPT_SECONDS = 0.1
"""Seconds that ZMQ may take to accept a connection with a descriptor that was given up for it."""
_RCVMORE = int(zmq.RCVMORE)
_MANY = 16
"""Messages in one round after which another is likely: to ask ZMQ costs as much as to read it."""


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
        super().__init__(context, zmq.ROUTER, loop, _unused, on_event, on_idle, max_frame=max_frame)
        self._is_known, self._on_parts = is_known, on_message

    def close(self) -> None:
        """Close socket and monitor, as `MonitoredSocket` does."""
        super().close()
        self._is_known, self._on_parts = _unused, _unused  # breaks the cycle with the owner

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


class UngreetedConnections(dict[int, None]):
    """Descriptors of connections without `Hello`, the oldest first; `refused` counts refusals.

    One descriptor is kept in reserve, for when the process has no other.
    """

    def __init__(self, refused: Counter[str]):
        super().__init__()
        self._refused = refused
        self.spare, self._given_up_at = -1, 0.0

    def add(self, descriptor: int, socket: RouterSocket) -> None:
        """Keep a connection until its `Hello`, unless there are too many, or no descriptors."""
        if not self.take_spare():
            self._refused["no descriptors"] += 1
            socket.disconnect(descriptor)
            return
        self[descriptor] = None
        if len(self) > MAX_UNGREETED:
            oldest = next(iter(self))
            del self[oldest]
            self._refused["no greeting"] += 1
            socket.disconnect(oldest)

    def take_spare(self) -> bool:
        """Keep one descriptor in reserve; return whether there is one."""
        if self.spare < 0:
            with contextlib.suppress(OSError):
                self.spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self.spare >= 0

    def give_up(self, peers: Iterable[PeerConnection], socket: RouterSocket) -> None:
        """Let ZMQ accept a connection for which there was no descriptor, to disconnect it.

        ZMQ would try again without a pause for as long as the connection is in the queue. If
        another thread took the spare descriptor, a peer's `duplicate` is given up.
        """
        now = time.monotonic()
        if self.spare >= 0:
            self.close()
        elif now < self._given_up_at + _ACCEPT_SECONDS:
            return  # an event from before ZMQ could use what was given up last
        else:
            for peer in peers:
                if peer.duplicate is not None:
                    socket.close_duplicate(peer.duplicate)
                    peer.duplicate = None
                    break
        self._given_up_at = now

    def close(self) -> None:
        """Close the spare descriptor."""
        spare, self.spare = self.spare, -1
        if spare >= 0:
            os.close(spare)


def _unused(*arguments: Any) -> Any:
    pass
