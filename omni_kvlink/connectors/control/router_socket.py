"""The ROUTER socket of a listener: one queue, in which every peer's messages stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.monitored_socket import DONTWAIT, MonitoredSocket, is_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.runtime.event_loop import EventLoop

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


def _unused(*arguments: Any) -> Any:
    pass
