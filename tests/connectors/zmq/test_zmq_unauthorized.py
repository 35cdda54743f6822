"""What unknown peers and misbehaving readers send changes a counter and nothing else."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from omni_kvlink import KVLink, KVProducer
from omni_kvlink.connectors.control import monitored_socket
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Chunk,
    Failed,
    FetchRange,
    Get,
    Hello,
    Location,
    Message,
    Offer,
    Refused,
    Release,
    encode,
    own_hello,
)
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.rig import until, until_freed
from support.connectors.zmq_addresses import fresh_url
from support.connectors.zmq_unauthorized import RawPeer, connected_peer, greeted_peer
from support.link.ends import end_of, peers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
BIG = sized("big", 3 * WINDOW)


@pytest.fixture
def producer(sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(fresh_url("tcp", sockets), quota=64 << 20) as link:
        yield link


@pytest.fixture
def unharmed(producer: KVProducer) -> Iterator[None]:
    """After the test, an honest reader is still served."""
    yield
    with KVLink.connect(producer.url, timeout=60, quota=64 << 20) as reader:
        receipt = producer.put(Recipe("honest").make())
        with reader.get("honest", timeout=60) as found:
            assert fingerprint(found) == fingerprint(Recipe("honest").make())
        del found
        receipt.wait(timeout=60)
    until(lambda: producer.stats()["readers"] == 0, "all have disconnected")
    until_freed(producer)


def refused(link: KVProducer, what: str) -> int:
    found: int = link.stats()["refused"].get(what, 0)
    return found


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"\x00"],
    [b"x" * 1000],
    [b"\xc1" * 60_000],
    [b"\x91" * 5000],
    [b"a", b"b", b"c"],
    [encode(own_hello()), b"more"],
    [encode(Get(1, "k"))],
    [encode(FetchRange(1, 1, 0, 100))],
    [encode(Offer(1, 1, Location(0, 0, 1)))],
    [encode(own_hello())[:-3]],
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_before_the_greeting(
    producer: KVProducer, unharmed: None, garbage: list[bytes]
) -> None:
    with connected_peer(producer.url) as peer:
        peer.send(*garbage)
        until(lambda: refused(producer, "bad message") == 1, "it was counted")
        assert producer.stats()["readers"] == 0
        assert producer.stats()["transfers"]["waiting"] == 0


@pytest.mark.parametrize("nbytes", [MAX_MESSAGE + 1000, 1 << 20, 64 << 20])
def test_huge_frames_end_the_connection(producer: KVProducer, unharmed: None, nbytes: int) -> None:
    with greeted_peer(producer.url, RECONNECT_IVL=-1) as peer, greeted_peer(producer.url) as other:
        peer.send(b"x" * nbytes)
        until(lambda: producer.stats()["readers"] == 1, "it was dropped")
        counted = refused(producer, "too long")  # 1 if the frame's second part came within 10 ms
        other.send(Get(1, "k"))
    until(lambda: producer.stats()["readers"] == 0, "the other left")
    assert refused(producer, "too long") == counted <= 1, "the other was counted"


NO_ZMQ = {
    "http": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "mechanism": b"\xff" + bytes(8) + b"\x7f\3\0" + b"NONSENSE".ljust(20, b"\0") + bytes(32),
}


@pytest.mark.parametrize("what", NO_ZMQ)
def test_peers_that_do_not_speak_zmq(producer: KVProducer, unharmed: None, what: str) -> None:
    host, port = producer.url.removeprefix("zmq+tcp://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(NO_ZMQ[what])
        if what == "mechanism":  # the other could be ZMQ of long ago, so far
            until(lambda: refused(producer, "no greeting") == 1, "it was counted")


def test_other_versions(producer: KVProducer, unharmed: None) -> None:
    with connected_peer(producer.url) as peer:
        peer.send(msgspec.structs.replace(own_hello(), versions=(7, 9)))
        answer, _ = peer.receive()
        assert isinstance(answer, Refused)
        assert answer.versions == PROTOCOL
    assert refused(producer, "other version") == 1


FORBIDDEN: list[list[Message | bytes]] = [
    [b"\xff"],
    [own_hello()],
    [Offer(1, 1, Location(0, 0, 1))],
    [Chunk(1, 1, 0), b"bytes"],
    [Get(1, "k"), b"more"],
    [Get(1, "k" * 5000)],
    [msgspec.msgpack.encode(["FetchRange", 1, 1, -1, 5])],
    [FetchRange(1, 1, 5, 5)],
    [FetchRange(1, 1, 5, 4)],
    [FetchRange(1, 1, 0, 2**53)],
    [FetchRange(1, 1, 0, 3 * WINDOW)],
]


@pytest.mark.parametrize("parts", FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_messages_that_no_reader_may_send_disconnect_it(
    producer: KVProducer, unharmed: None, parts: list[Message | bytes]
) -> None:
    with greeted_peer(producer.url) as peer:
        peer.send(*parts)
        answer, _ = peer.receive()
        assert isinstance(answer, Refused)
        assert producer.stats()["readers"] == 0
        assert refused(producer, "bad message") == 1


def leased(producer: KVProducer, peer: RawPeer) -> Offer:
    producer.put(BIG.make())
    peer.send(Get(1, "big"))
    offer, beside = peer.receive()
    assert isinstance(offer, Offer)
    assert beside == b""
    return offer


def test_bytes_of_what_is_not_on_lease(producer: KVProducer, unharmed: None) -> None:
    """Requests for another peer's, an older or a released transfer get no bytes."""
    with greeted_peer(producer.url) as peer, greeted_peer(producer.url) as other:
        offer = leased(producer, peer)
        other.send(FetchRange(1, offer.epoch, 0, 100))
        peer.send(FetchRange(2, offer.epoch, 0, 100))
        peer.send(FetchRange(1, offer.epoch + 1, 0, 100))
        peer.send(FetchRange(1, offer.epoch, 10, 30))
        chunk, payload = peer.receive()
        assert chunk == Chunk(1, offer.epoch, 10)
        assert len(payload) == 20
        peer.send(Release(1, offer.epoch, "read"))
        peer.send(FetchRange(1, offer.epoch, 0, 100))
        until(lambda: producer.stats()["transfers"]["stale"] == 4, "all were refused")
        for one in (peer, other):
            assert not one.socket.poll(0)


class GuardedCounters(dict[str, int]):
    """Counters that record which of them were changed without the lock that guards them."""

    def __init__(self, end: Any):
        super().__init__(end.transfers.counters)
        self.lock, self.unguarded = end.lock, list[str]()

    def __setitem__(self, name: str, count: int) -> None:
        if not self.lock.locked():
            self.unguarded.append(name)
        super().__setitem__(name, count)


def test_bytes_of_what_is_not_on_lease_are_counted_with_the_lock(
    producer: KVProducer, unharmed: None
) -> None:
    end = end_of(producer)
    counters = end.transfers.counters = GuardedCounters(end)
    with greeted_peer(producer.url) as peer:
        offer = leased(producer, peer)
        peer.send(FetchRange(1, offer.epoch + 1, 0, 100))
        until(lambda: counters["stale"] == 1, "it was refused")
        peer.send(Release(1, offer.epoch, "read"))  # else the payload is offered until it expires
    assert counters.unguarded == []


def test_what_is_on_lease_is_served_to_its_end(producer: KVProducer, unharmed: None) -> None:
    """Also if the payload failed meanwhile."""
    with greeted_peer(producer.url) as peer:
        offer = leased(producer, peer)
        producer.fail("big", "changed my mind")
        peer.send(FetchRange(1, offer.epoch, 5, 30))
        chunk, payload = peer.receive()
        assert chunk == Chunk(1, offer.epoch, 5)
        assert len(payload) == 25


def test_a_stream_that_broke_off_is_served_no_more(producer: KVProducer, unharmed: None) -> None:
    with greeted_peer(producer.url) as peer:
        writer = producer.stream_put(Recipe("s").make())
        peer.send(Get(1, "s", True))
        offer, draft = peer.receive()
        assert isinstance(offer, Offer)
        peer.send(FetchRange(1, offer.epoch, *offer.first))
        chunk, header = peer.receive()
        assert isinstance(chunk, Chunk)
        assert header == draft, "it came with the offer"
        assert Manifest.decode(draft, offer.location.nbytes).request_id == "s"
        producer.fail("s", "no more")
        failed, _ = peer.receive()
        assert isinstance(failed, Failed)
        peer.send(FetchRange(1, offer.epoch, 0, 10))
        until(lambda: producer.stats()["transfers"]["stale"] == 1, "it was refused")
        writer.fail("it was ended")


@pytest.mark.parametrize("beyond", [1, CHUNK])
def test_bytes_beyond_the_payload(producer: KVProducer, unharmed: None, beyond: int) -> None:
    with greeted_peer(producer.url) as peer:
        stop = leased(producer, peer).location.nbytes + beyond
        peer.send(FetchRange(1, 1, stop - beyond - 5, stop))
        answer, _ = peer.receive()
        assert isinstance(answer, Refused)
        producer.abort("big")


def test_a_reader_that_requests_and_does_not_read(producer: KVProducer, unharmed: None) -> None:
    """Its queue is bounded, others are served, and memory that ZMQ still sends is not reused."""
    with greeted_peer(producer.url, RCVHWM=1, RCVBUF=4096) as peer:
        offer = leased(producer, peer)
        for start in range(0, 3 * WINDOW, CHUNK):
            peer.send(FetchRange(1, offer.epoch, start, start + CHUNK))
        # The payload itself: how many views of it ZMQ still holds is in no counter.
        big = end_of(producer).transfers._live["big"]
        (slow,) = peers_of(producer).values()
        until(lambda: bool(slow.pending), "the rest waits")
        assert WINDOW < CHUNK * len(big.views) <= 2 * WINDOW
        with KVLink.connect(producer.url, timeout=60, quota=64 << 20) as reader:
            for number in range(3):
                producer.put(sized(f"k{number}", 3 << 20, seed=number).make())
                with reader.get(f"k{number}", timeout=60, verify="full"):
                    pass
        peer.send(Release(1, offer.epoch, "read"))
        until(lambda: producer.stats()["transfers"]["released"] == 4, "all were released")
        assert CHUNK * len(big.views) > WINDOW
        assert producer.stats()["memory"]["used"] > 3 * WINDOW, "reused under ZMQ"
        for start in range(0, 5 * WINDOW, CHUNK):
            peer.send(FetchRange(1, offer.epoch, start, start + CHUNK))
    until(lambda: not big.views, "ZMQ has dropped them")


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is disconnected because it, or this machine, is slow."""
    monkeypatch.setattr(monitored_socket, "HEARTBEAT_TIMEOUT_MS", 3_600_000)


def test_a_reader_that_lets_messages_pile_up(
    patience: None, producer: KVProducer, unharmed: None
) -> None:
    """It is disconnected, and finds the reason when it reads again."""
    with greeted_peer(producer.url, RCVHWM=1, RCVBUF=4096, SNDHWM=0) as peer:
        key = "k" * 1000
        producer.fail(key, "x" * 4000)
        for number in range(1, 10_001):  # whose answers are more than any queue holds
            peer.send(Get(number, key))
        until(lambda: refused(producer, "too slow") > 0, "it is refused")
        until(lambda: producer.stats()["readers"] == 0, "it is removed")
        message: Message | None = None
        while not isinstance(message, Refused):
            message, _ = peer.receive()
        assert message.reason == "too slow"


def test_a_connection_without_a_message(producer: KVProducer, unharmed: None) -> None:
    with connected_peer(producer.url):
        pass
    assert producer.stats()["readers"] == 0


def test_an_identity_that_is_in_use(producer: KVProducer, unharmed: None) -> None:
    """A peer that uses a reader's identity receives nothing of it."""
    with (
        greeted_peer(producer.url, ROUTING_ID=b"name") as peer,
        connected_peer(producer.url, ROUTING_ID=b"name") as other,
    ):
        other.send(own_hello())
        peer.send(Get(1, "k"))
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        producer.fail("k", "failed by the test")
        peer.receive()
        assert not other.socket.poll(50)


def test_hello_is_the_same_for_all_readers(producer: KVProducer) -> None:
    with (
        greeted_peer(producer.url),
        connected_peer(producer.url) as one,
        connected_peer(producer.url) as other,
    ):
        answers = []
        for peer in (one, other):
            peer.send(own_hello())
            answers.append(peer.receive()[0])
        assert isinstance(answers[0], Hello)
        assert answers[0] == answers[1]


def test_options_of_every_socket(producer: KVProducer) -> None:
    # Options of a ZMQ socket cannot be read from its other end.
    socket = end_of(producer).listeners[0]._socket.socket
    assert socket.getsockopt(zmq.SNDHWM) == monitored_socket.MAX_QUEUED
    assert socket.getsockopt(zmq.MAXMSGSIZE) < 65 << 10
    assert socket.getsockopt(zmq.HEARTBEAT_IVL) == monitored_socket.HEARTBEAT_MS
