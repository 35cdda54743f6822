"""What a socket without ZMQ sends to a producer's port changes a counter, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVConsumer, KVLink, KVProducer
from omni_kvlink.connectors.control import monitored_socket, peer
from omni_kvlink.connectors.protocol.messages import encode, own_hello
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.zmq_addresses import fresh_url
from support.connectors.zmtp import GREETING, connect, frame, greeting, ready
from support.link.ends import peers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
HELLO = encode(own_hello())
NO_END = 64 << 20
"""Bytes after which a connection that takes them all is taken for one without a limit."""


ZMTP = {
    "1.0": b"\1\0" + bytes([len(HELLO) + 1, 0]) + HELLO,
    "1.0, versioned": GREETING + b"\0\5" + b"\1\0" + bytes([len(HELLO) + 1, 0]) + HELLO,
    "2.0": GREETING + b"\1\5" + frame(b"") + frame(HELLO),
    "2.0 with a routing id": GREETING + b"\1\5" + frame(b"\0\0\0\0\5") + frame(HELLO),
}
"""Hello in the versions of ZMTP that authenticate nobody."""
UNAUTHENTICATED = {
    **ZMTP,
    "3.0, claims a routing id": greeting(b"NULL") + ready(b"\0\0\0\0\5") + frame(HELLO),
    "3.1": greeting(b"NULL", minor=1) + ready() + frame(HELLO),
    "PLAIN": greeting(b"PLAIN") + b"\x04\x0c\x05HELLO\1a\1b" + frame(HELLO),
    "CURVE without a key": greeting(b"CURVE", minor=1) + b"\x04\xc8\x05HELLO" + bytes(194),
    "CURVE, then a message": greeting(b"CURVE") + frame(HELLO),
    "GSSAPI": greeting(b"GSSAPI") + frame(HELLO),
    **{f"noise {seed}": random.Random(seed).randbytes(3000) for seed in range(4)},
    **{f"noise {seed}, greeted": GREETING + random.Random(seed).randbytes(99) for seed in range(4)},
}
ENDLESS = {
    "parts": greeting(b"NULL") + ready(),
    "parts of ZMTP 2": GREETING + b"\1\5" + frame(b""),
    "parts of ZMTP 1": b"\1\0",
    "parts after CURVE's greeting": greeting(b"CURVE"),
}


@pytest.fixture(params=["tcp", "tcp, insecure", "ipc"])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    transport, _, insecure = request.param.partition(", ")
    url = fresh_url(transport, sockets)
    with (
        KVLink.serve(url, quota=8 << 20, insecure=bool(insecure)) as producer,
        KVLink.connect(url, timeout=60, quota=8 << 20, insecure=bool(insecure)) as reader,
    ):
        yield producer, reader


def test_a_frame_that_is_too_long(sockets: str) -> None:
    """It ends the connection, and is counted; the end of a connection alone is not."""
    with KVLink.serve(fresh_url("tcp", sockets), quota=8 << 20, insecure=True) as producer:
        for ending in (b"", b"\2" + struct.pack(">Q", 1 << 20) + bytes(20_000)):
            with connect(producer.url) as sock:
                sock.sendall(greeting(b"NULL"))
                received = b""
                while b"READY" not in received:  # its authentication has been asked for
                    received += sock.recv(65536)
                    assert received
                sock.sendall(ready() + frame(HELLO))
                until(lambda: producer.stats()["readers"] == 1, "it was greeted")
                if ending:
                    sock.sendall(ending)  # one segment: the rest is there when ZMQ reads its head
                    until(lambda: producer.stats()["readers"] == 0, "it was dropped")
            until(lambda: producer.stats()["readers"] == 0, "it has left")
            assert producer.stats()["refused"] == ({"too long": 1} if ending else {})


def is_ended(sock: socket.socket) -> bool:
    """Read until the other side ends the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def refused(producer: KVProducer) -> int:
    """Return the number of connections that were ended before they were greeted."""
    counters: dict[str, int] = producer.stats()["refused"]
    return counters.get("no greeting", 0)


def check_link(producer: KVProducer, reader: KVConsumer) -> None:
    """The reader that was connected before still gets right bytes, and nobody else is admitted."""
    assert producer.stats()["readers"] == 1
    assert reader.stats()["sessions"] == 1
    data = Recipe("honest").make()
    receipt = producer.put(data)
    with reader.get("honest", timeout=60, verify="full") as found:
        assert fingerprint(found) == fingerprint(data)
    del found
    receipt.wait(timeout=60)
    until_freed(producer)


@pytest.mark.parametrize("what", UNAUTHENTICATED)
@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_bytes_of_nobody(ends: tuple[KVProducer, KVConsumer], what: str) -> None:
    """Whatever it speaks, it is not greeted, and it is counted."""
    producer, reader = ends
    with connect(producer.url) as sock:
        sock.sendall(UNAUTHENTICATED[what])
        received = bytearray()
        with contextlib.suppress(OSError):  # the producer has ended the connection already
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(65536):
                received += data
    assert b"\xa5Hello" not in received
    until(lambda: refused(producer) >= 1, "it was counted")
    check_link(producer, reader)


@pytest.mark.parametrize("version", ZMTP)
@pytest.mark.parametrize("ends", ["tcp, insecure", "ipc"], indirect=True)
def test_old_versions_of_zmtp(ends: tuple[KVProducer, KVConsumer], version: str) -> None:
    """They are refused without keys, too: libzmq tells no connection of theirs from another."""
    producer, reader = ends
    with connect(producer.url) as sock:
        sock.sendall(ZMTP[version])
        assert is_ended(sock)
    until(lambda: refused(producer) == 1, "it was counted")
    check_link(producer, reader)


@pytest.mark.parametrize("how", ENDLESS)
@pytest.mark.parametrize("ends", ["tcp"], indirect=True)
def test_endless_parts_of_nobody(ends: tuple[KVProducer, KVConsumer], how: str) -> None:
    """The connection ends; the producer does not collect parts."""
    producer, reader = ends
    part = frame(bytes(200), more=True) * 1000
    with connect(producer.url) as sock:
        sock.sendall(ENDLESS[how])
        with pytest.raises(ConnectionError):
            sock.sendall(part * (NO_END // len(part)))
    until(lambda: refused(producer) >= 1, "it was counted")
    check_link(producer, reader)


def test_a_handshake_that_stops_half_way(monkeypatch: pytest.MonkeyPatch, sockets: str) -> None:
    """It is ended by the producer, and a reader connects meanwhile."""
    monkeypatch.setattr(monitored_socket, "HANDSHAKE_MS", 300)
    with KVLink.serve(fresh_url("tcp", sockets), quota=8 << 20) as producer:
        monkeypatch.undo()
        with connect(producer.url) as silent, connect(producer.url) as slow:
            slow.sendall(greeting(b"CURVE")[:30])
            assert is_ended(silent)
            assert is_ended(slow)
        until(lambda: refused(producer) == 2, "both were counted")
        with KVLink.connect(producer.url, timeout=60, quota=8 << 20) as reader:
            check_link(producer, reader)


def test_many_connections(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that say nothing a few may be open; the oldest is ended for another."""
    producer, reader = ends
    monkeypatch.setattr(peer, "MAX_UNGREETED", 4)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(producer.url)) for _ in range(40)]
        for sock in silent[:36]:
            assert is_ended(sock)
        assert refused(producer) == 36
        check_link(producer, reader)
    until(lambda: refused(producer) == 40, "the last were counted, too")


def test_a_reader_among_many_connections(
    ends: tuple[KVProducer, KVConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greeted reader is not among those that are ended."""
    producer, reader = ends
    monkeypatch.setattr(peer, "MAX_UNGREETED", 1)
    for _ in range(5):
        with connect(producer.url), connect(producer.url) as sock:
            check_link(producer, reader)
            sock.shutdown(socket.SHUT_WR)
            assert is_ended(sock)
    until(lambda: refused(producer) == 10, "all were counted")


def test_routing_ids_are_not_known_in_advance(sockets: str) -> None:
    """A ROUTER numbers its peers from C's `rand` on, which is the same in every process."""
    libc = ctypes.CDLL(None)
    libc.srand(1)
    expected, found = libc.rand(), list[bytes]()
    for _ in range(3):
        libc.srand(1)
        url = fresh_url("tcp", sockets)
        with KVLink.serve(url, quota=8 << 20) as producer:
            assert libc.rand() == expected, "the caller's sequence is changed"
            with KVLink.connect(url, timeout=60, quota=8 << 20):
                found += peers_of(producer)
    assert len(set(found)) == 3
