"""One raw TCP connection over loopback, out of the source blocks and into the target blocks."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPIES = "into the kernel, out of it"
VERIFIES = "nothing"
WAITS = "wakes"
REQUIRES = ()
_PARTS = 512
"""Buffers of one call; the kernel takes 1024."""


@contextlib.contextmanager
def sender(end: Any) -> Iterator[Callable[[], None]]:
    """Listen, and send to the one receiver."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end.publish("port", b"%d" % listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield lambda: _move_all(end, lambda parts: connection.sendmsg(parts))


@contextlib.contextmanager
def receiver(end: Any) -> Iterator[Callable[[], int]]:
    """Connect, and receive into the target blocks."""

    def receive_parts(parts: list[memoryview]) -> int:
        nbytes = connection.recvmsg_into(parts)[0]
        if not nbytes:
            raise ConnectionError("the sender has closed the connection")
        return nbytes

    def receive() -> int:
        _move_all(end, receive_parts)
        return time.monotonic_ns()

    with socket.create_connection(("127.0.0.1", int(end.published("port")))) as connection:
        yield receive


def _move_all(end: Any, move: Callable[[list[memoryview]], int]) -> None:
    """Call `move` with the next buffers until it has moved all bytes."""
    parts = [memoryview(view) for view in end.views()]
    first = 0
    while first < len(parts):
        moved = move(parts[first : first + _PARTS])
        while first < len(parts) and moved >= len(parts[first]):
            moved -= len(parts[first])
            first += 1
        if moved:
            parts[first] = parts[first][moved:]
