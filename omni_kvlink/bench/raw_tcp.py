"""The yardstick of links over a network: as many bytes through one raw TCP connection."""

from __future__ import annotations

import mmap
import socket
import time
from typing import Any, Protocol

import numpy as np

_PATIENCE = 60.0


class Told(Protocol):
    """The reader's end of the benchmark."""

    def tell(self, **command: Any) -> None: ...

    def answer(self, *, timeout: float) -> dict[str, Any]: ...


class Sender:
    """Sends from a warm buffer to a `Receiver` in the reader's process."""

    def __init__(self, peer: Told, name: str, nbytes: int):
        self._peer, self._name = peer, name
        self._source = np.ones(nbytes, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer.tell(do="raw_open", name=name, port=listener.getsockname()[1], nbytes=nbytes)
            self._sock, _ = listener.accept()
        peer.answer(timeout=_PATIENCE)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seconds(self) -> float:
        """From the first byte's sending to the last one's arrival."""
        self._peer.tell(do="raw_receive", name=self._name)
        started = time.monotonic_ns()
        self._sock.sendall(self._source.data)
        return 1e-9 * (int(self._peer.answer(timeout=_PATIENCE)["received"]) - started)

    def close(self) -> None:
        self._sock.close()


class Receiver:
    """Receives to a warm buffer, in as few calls as the kernel allows."""

    def __init__(self, port: int, nbytes: int):
        self._target = memoryview(mmap.mmap(-1, nbytes))
        np.frombuffer(self._target, np.uint8)[:: mmap.PAGESIZE] = 1
        self._sock = socket.create_connection(("127.0.0.1", port), _PATIENCE)

    def receive(self) -> int:
        """Take everything; the moment of the last byte, in monotonic nanoseconds."""
        at = 0
        while at < len(self._target):
            at += self._sock.recv_into(self._target[at:])
        return time.monotonic_ns()

    def close(self) -> None:
        self._sock.close()
