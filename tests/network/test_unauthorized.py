"""Connections of unknown peers change a counter and nothing else, with keys and without."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.key_files import KeyFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
LARGE = (1 << 30).to_bytes(8, "big")


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\3\0" + mechanism.ljust(20, b"\0") + bytes(32)


BODY = b"\x05READY\x0bSocket-Type\0\0\0\6DEALER"
READY = b"\4" + bytes([len(BODY)]) + BODY
CONNECTIONS: dict[str, bytes] = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "ones": b"\xff" * 5000,
    "plain": greeting(b"PLAIN") + bytes(100),
    "plain text": greeting(b"NULL") + READY + b"\0\5hello",
    "half a greeting": greeting(b"CURVE")[:30],
    "no keys": greeting(b"CURVE") + b"\x04\xc8\x05HELLO" + bytes(194),
    "an endless handshake": greeting(b"CURVE") + b"\x06" + LARGE + bytes(5000),
    "an endless message": greeting(b"NULL") + READY + b"\2" + LARGE + bytes(5000),
    **{f"noise {seed}": random.Random(seed).randbytes(2000) for seed in range(8)},
}


@pytest.fixture(params=["open", "encrypted"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[KVProducer, KVConsumer]]:
    key_files = KeyFiles(tmp_path)
    is_open = request.param == "open"
    producer_options, consumer_options = (
        ({"insecure": True}, {"insecure": True})
        if is_open
        else (key_files.producer_options, key_files.consumer_options())
    )
    with (
        KVLink.serve("zmq+tcp://127.0.0.1:0", quota=8 << 20, **producer_options) as producer,
        KVLink.connect(producer.url, timeout=5, quota=8 << 20, **consumer_options) as reader,
    ):
        yield producer, reader


@pytest.mark.parametrize("name", CONNECTIONS)
def test_an_unknown_peer(ends: tuple[KVProducer, KVConsumer], name: str) -> None:
    producer, reader = ends
    address = producer.url.removeprefix("zmq+tcp://").split(":")
    before = producer.stats()
    with socket.create_connection((address[0], int(address[1])), 5) as sock:
        sock.sendall(CONNECTIONS[name])
    until(lambda: producer.stats()["refused"].get("no greeting") == 1, "it was counted")
    after = producer.stats()
    assert {**before, "refused": {}} == {**after, "refused": {}}
    data = Recipe("honest").make()
    receipt = producer.put(data)
    with reader.get("honest", timeout=5, verify="full") as found:
        assert fingerprint(found) == fingerprint(data)
    del found
    receipt.wait(timeout=5)
    until_freed(producer)
    assert producer.stats()["readers"] == 1
