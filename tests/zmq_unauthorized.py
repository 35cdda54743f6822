"""ZMQ peers that say what they like."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import zmq

from omni_kvlink.connectors.protocol.messages import Message, decode, encode, own_hello


class Raw:
    """A DEALER that says what it likes."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self.socket = socket

    def send(self, *parts: Message | bytes) -> None:
        self.socket.send_multipart([p if isinstance(p, bytes) else encode(p) for p in parts])

    def handle(self, timeout: float = 5.0) -> tuple[Message, bytes]:
        """The next message, and what came beside it."""
        if not self.socket.poll(int(1000 * timeout)):
            raise TimeoutError("nothing was said")
        first, *rest = self.socket.recv_multipart()
        return decode(first), b"".join(rest)


@contextlib.contextmanager
def dialled(url: str, **options: Any) -> Iterator[Raw]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(url.removeprefix("zmq+"))
        yield Raw(socket)


@contextlib.contextmanager
def greeted(url: str, **options: Any) -> Iterator[Raw]:
    with dialled(url, **options) as peer:
        peer.send(own_hello())
        peer.handle()
        yield peer
