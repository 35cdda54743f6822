"""ZMTP written by hand: greetings, commands and frames, and a plain socket to send them."""

from __future__ import annotations

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f"


def greeting(mechanism: bytes, *, minor: int = 0) -> bytes:
    """Return the greeting of ZMTP 3."""
    return GREETING + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def ready(identity: bytes = b"") -> bytes:
    """Return the READY command of a DEALER that claims a routing id."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return b"\4" + bytes([len(body)]) + body


def frame(body: bytes, *, more: bool = False) -> bytes:
    return bytes([int(more), len(body)]) + body


def connect(url: str, source: str = "") -> socket.socket:
    address = url.partition("://")[2]
    if url.startswith("zmq+ipc"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)
        sock.connect(address)
        return sock
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 60, (source, 0) if source else None)
