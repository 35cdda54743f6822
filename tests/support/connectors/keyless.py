"""A peer without keys: what a listener over TCP gives to it."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

BODY = b"\x05READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
"""A greeting of ZMQ (ZMTP 3.0) that asks for no encryption."""


def is_let_in(url: str) -> bool:
    """Whether the listener of a link takes a peer that has no key.

    It answers such a peer in plain text, or closes the connection.
    """
    address = urlsplit(url)
    with socket.create_connection(("127.0.0.1", address.port or 0), 60) as sock:
        sock.sendall(GREETING + b"\4" + bytes([len(BODY)]) + BODY)
        got = bytearray()
        while len(got) < len(GREETING) + 1:
            try:
                more = sock.recv(4096)
            except ConnectionResetError:
                return False
            if not more:
                return False
            got += more
    return True
