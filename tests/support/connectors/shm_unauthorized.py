"""Peers that send arbitrary messages over a bare socket."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import traceback
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import Message, decode, encode, own_hello

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534


class Raw:
    """A peer that sends arbitrary messages."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        sock.settimeout(60)

    def send(self, message: Message | bytes, *fds: int) -> None:
        data = message if isinstance(message, bytes) else encode(message)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], rights)

    def receive(self) -> tuple[Message, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.sock, 65536, 4)
        if not data:
            raise ConnectionError("closed")
        return decode(data), fds

    def is_dropped(self) -> bool:
        try:
            return self.sock.recv(65536) == b""
        except ConnectionError:
            return True


@contextlib.contextmanager
def dialled(path: str) -> Iterator[Raw]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        yield Raw(sock)


@contextlib.contextmanager
def greeted(path: str) -> Iterator[Raw]:
    with dialled(path) as peer:
        peer.send(own_hello())
        peer.receive()
        yield peer


@contextlib.contextmanager
def as_nobody(act: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Have a child process of another user call `act`, and stay until the block ends.

    Yields a function that returns its result: False if it raised.
    """
    reading, writing = os.pipe()
    stay, end = os.pipe()
    child = os.fork()
    if child == 0:
        is_done = False
        try:
            os.close(end)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            is_done = act()
            os.write(writing, b"1" if is_done else b"0")
            os.read(stay, 1)
        except BaseException:
            traceback.print_exc()  # the parent is told False
        finally:
            os._exit(0)
    os.close(writing)
    os.close(stay)
    try:
        yield lambda: os.read(reading, 1) == b"1"
    finally:
        os.close(end)
        os.waitpid(child, 0)
        os.close(reading)
