"""The yardstick of small payloads: one bare round trip over ZMQ, from sleep to sleep."""

from __future__ import annotations

import time
from typing import Any

import zmq

from omni_kvlink.bench.raw_tcp import Told

_PATIENCE = 60.0


class Sender:
    """Sends a message to a `Receiver` in the reader's process, and has it back."""

    def __init__(self, peer: Told, name: str, nbytes: int):
        self._peer, self._name, self._message = peer, name, bytes(nbytes)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        peer.tell(do="raw_zmq_open", name=name, port=port)
        self._reader, _ = self._socket.recv_multipart()
        peer.answer(timeout=_PATIENCE)

    def seconds(self) -> float:
        """There and back again, while the other side slept before."""
        self._peer.tell(do="raw_receive", name=self._name)
        time.sleep(0.003)
        started = time.monotonic_ns()
        self._socket.send_multipart([self._reader, self._message])
        self._socket.recv_multipart()
        took = time.monotonic_ns() - started
        self._peer.answer(timeout=_PATIENCE)
        return 1e-9 * took

    def close(self) -> None:
        self._context.destroy(0)


class Receiver:
    """Sends back what comes."""

    def __init__(self, port: int):
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.send(b"here")

    def receive(self) -> int:
        self._socket.send(self._socket.recv())
        return time.monotonic_ns()

    def close(self) -> None:
        self._context.destroy(0)
