"""ZMQ peers that send arbitrary messages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.protocol.messages import Message, decode, encode, own_hello
from support.connectors.zmq_addresses import secure_as_user

if TYPE_CHECKING:
    from collections.abc import Iterator


class RawPeer:
    """A DEALER that sends arbitrary messages."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self.socket = socket

    def send(self, *parts: Message | bytes) -> None:
        self.socket.send_multipart([p if isinstance(p, bytes) else encode(p) for p in parts])

    def receive(self, timeout: float = 60.0) -> tuple[Message, bytes]:
        """Return the next message, and the bytes that travelled with it."""
        if not self.socket.poll(int(1000 * timeout)):
            raise TimeoutError("no message arrived")
        first, *rest = self.socket.recv_multipart()
        return decode(first), b"".join(rest)


@contextlib.contextmanager
def connected_peer(url: str, *, insecure: bool = False, **options: Any) -> Iterator[RawPeer]:
    """Give a peer with the key of this user; with `insecure` one without encryption."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if not insecure and url.startswith("zmq+tcp"):
            secure_as_user(socket)
        socket.connect(url.removeprefix("zmq+"))
        yield RawPeer(socket)


@contextlib.contextmanager
def greeted_peer(url: str, **options: Any) -> Iterator[RawPeer]:
    with connected_peer(url, **options) as peer:
        peer.send(own_hello())
        peer.receive()
        yield peer
