"""Unused addresses for ZMQ links, and the keys that sockets of their tests use."""

from __future__ import annotations

import itertools
import os
import socket
from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.security import Credentials

if TYPE_CHECKING:
    import zmq

_numbers = itertools.count()
_ports = itertools.count(20_000 + os.getpid() * 997 % 12_000)


def free_port() -> int:
    """Return an unused port below 32768, which the system assigns to no outgoing connection."""
    while True:
        port = 20_000 + next(_ports) % 12_000
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def start_garbage_collection() -> None:
    """Start pyzmq's thread that frees sent messages, which stays until the process ends."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://first")
        two.connect("inproc://first")
        one.send(memoryview(bytearray(1 << 20)), copy=False)
        two.recv()


def fresh_url(transport: str, directory: str) -> str:
    """Return the URL of a link over "tcp", "ipc" or "ucx"."""
    if transport != "ipc":
        address = f"127.0.0.1:{free_port()}"
        return (
            f"ucx://{address}?trusted_network=1" if transport == "ucx" else f"zmq+tcp://{address}"
        )
    return f"zmq+ipc://{directory}/{next(_numbers)}.sock"


def secure_as_user(socket: zmq.Socket[bytes], *, server: bool = False) -> None:
    """Give a bare socket the key of this user, which a link on loopback uses without `keys=`."""
    credentials = Credentials()
    (credentials.secure_server if server else credentials.secure_client)(socket)
