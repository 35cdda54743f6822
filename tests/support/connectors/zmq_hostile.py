"""A producer over ZMQ that answers with what a test says."""

from __future__ import annotations

from typing import Any

import zmq

from omni_kvlink import (
    KVLink,
)
from omni_kvlink.connectors.protocol.messages import (
    Message,
    decode,
    encode,
)
from omni_kvlink.lowlevel import begin_get
from support.connectors.zmq_addresses import free_port, secure_as_user


class HostileProducer:
    """A ROUTER that greets one reader and then sends arbitrary messages."""

    def __init__(self, hello: Message):
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        secure_as_user(self._socket, server=True)
        self.url = f"zmq+tcp://127.0.0.1:{free_port()}"
        self._socket.bind(self.url.removeprefix("zmq+"))
        self._hello, self._peer = hello, b""

    def greet(self) -> None:
        self.receive()
        self.send(self._hello)

    def receive(self) -> Message:
        assert self._socket.poll(60_000), "the reader sends nothing"
        self._peer, first = self._socket.recv_multipart()
        return decode(first)

    def has_message(self, seconds: float) -> bool:
        return bool(self._socket.poll(int(1000 * seconds)))

    def receive_until(self, kind: type[Message]) -> Message:
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def send(self, *parts: Message | bytes) -> None:
        data = [part if isinstance(part, bytes) else encode(part) for part in parts]
        self._socket.send_multipart([self._peer, *data])

    def close(self) -> None:
        self._context.destroy(0)


def payload_bytes(data: Any, key: str = "k") -> bytes:
    """Return the bytes that a producer would send."""
    with KVLink.serve(f"inproc://payload-{id(data)}") as producer:
        producer.put(data)
        with KVLink.connect(producer.url, timeout=60) as reader:
            pending = begin_get(reader, key, timeout=60)
            region = pending.wait(timeout=60).region
            assert region is not None
            return bytes(region.view())
