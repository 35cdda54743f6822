"""A producer that violates the protocol makes a reader's `get` fail, and does no other harm."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import (
    ConnectorError,
    KVConsumer,
    KVLink,
    KVLinkError,
    PeerLostError,
    VersionError,
    WireError,
)
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK
from omni_kvlink.connectors.protocol.messages import (
    Chunk,
    Committed,
    Failed,
    FetchRange,
    Get,
    Layer,
    Location,
    Memory,
    Message,
    Offer,
    Refused,
    Release,
    own_hello,
)
from omni_kvlink.lowlevel import begin_get, open_delivery
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until
from support.connectors.zmq_hostile import HostileProducer, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
NBYTES = 2 * CHUNK


@pytest.fixture
def hostile() -> Iterator[HostileProducer]:
    hostile = HostileProducer(own_hello())
    yield hostile
    hostile.close()


@pytest.fixture
def reader(hostile: HostileProducer) -> Iterator[KVConsumer]:
    thread = threading.Thread(target=hostile.greet)
    thread.start()
    with KVLink.connect(hostile.url, timeout=60, quota=16 << 20) as link:
        thread.join()
        yield link


def get(reader: KVConsumer, *, streamed: bool = False) -> Future[None]:
    """Run a `get` in a thread; return a future of its end."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            if streamed:
                reader.stream_get("k", timeout=60).release()
            else:
                reader.get("k", timeout=60).release()
            ended.set_result(None)
        except KVLinkError as error:
            error.__traceback__ = None
            ended.set_exception(error)

    threading.Thread(target=run).start()
    return ended


VIOLATIONS: dict[str, list[list[Message | bytes]]] = {
    "not requested": [[Chunk(1, 7, NBYTES - 5), bytes(10)]],
    "beyond": [[Chunk(1, 7, NBYTES), bytes(10)]],
    "twice": [[Chunk(1, 7, 0), bytes(10)], [Chunk(1, 7, 0), bytes(10)]],
    "overlapping": [[Chunk(1, 7, 0), bytes(10)], [Chunk(1, 7, 5), bytes(10)]],
    "empty": [[Chunk(1, 7, 0), b""]],
    "another epoch": [[Chunk(1, 8, 0), bytes(10)]],
    "nothing beside": [[Chunk(1, 7, 0)]],
    "more beside": [[Chunk(1, 7, 0), b"x", b"y"]],
    "garbage": [[b"\xff"]],
    "a reader's message": [[Get(1, "k")]],
    "a descriptor": [[Memory(0, 4096)]],
    "beside a message": [[Failed(1, "x", "failed"), b"more"]],
    "refused": [[Refused("why not", (1, 1))]],
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_wrong_bytes_end_the_connection(
    hostile: HostileProducer, reader: KVConsumer, violation: str
) -> None:
    ended = get(reader)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, NBYTES)))
    requested = hostile.receive_until(FetchRange)
    assert requested == FetchRange(1, 7, 0, CHUNK)
    for parts in VIOLATIONS[violation]:
        hostile.send(*parts)
    assert isinstance(ended.exception(5), (WireError, ConnectorError))
    until(lambda: not reader.stats()["connected"], "the session is over")
    until(lambda: reader.stats()["memory"]["used"] == 0, "the memory is back")


def test_late_bytes_are_not_written_to_reused_memory(
    hostile: HostileProducer, reader: KVConsumer
) -> None:
    pending = begin_get(reader, "k", timeout=60)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, NBYTES)))
    hostile.receive_until(FetchRange)
    pending.cancel()
    assert hostile.receive_until(Release) == Release(1, 7, "unread")
    hostile.send(Chunk(1, 7, 0), b"late" * 100)
    other = begin_get(reader, "other", timeout=60, verify="off")  # it is no payload
    hostile.receive_until(Get)
    hostile.send(Offer(2, 8, Location(0, 0, 4)))
    assert hostile.receive_until(FetchRange) == FetchRange(2, 8, 0, 4)
    hostile.send(Chunk(1, 7, 0), b"late" * 100)
    hostile.send(Chunk(2, 8, 0), b"good")
    delivery = other.wait(timeout=60)
    assert bytes(delivery.open_region().view()) == b"good"
    delivery.release()
    assert hostile.receive_until(Release) == Release(2, 8, "read")


@pytest.mark.parametrize("draft", [0, 512])
@pytest.mark.parametrize("beside", [b"short", bytes(NBYTES + 1)])
def test_inline_bytes_that_are_not_what_was_offered(
    hostile: HostileProducer, reader: KVConsumer, beside: bytes, draft: int
) -> None:
    ended = get(reader)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, NBYTES), draft), beside)
    assert isinstance(ended.exception(5), (WireError, ConnectorError))


def test_a_repeated_offer_is_ignored(hostile: HostileProducer, reader: KVConsumer) -> None:
    data = Recipe("k").make()
    payload = payload_bytes(data)
    pending = begin_get(reader, "k", timeout=60)
    hostile.receive_until(Get)
    for _ in range(3):
        hostile.send(Offer(1, 7, Location(0, 0, len(payload))), payload)
    delivery = pending.wait(timeout=60)
    hostile.send(Offer(1, 7, Location(0, 0, len(payload))), bytes(len(payload)))
    with open_delivery(reader, delivery, started=0.0, verify="full") as found:
        assert fingerprint(found) == fingerprint(data)
    del found, delivery
    assert hostile.receive_until(Release) == Release(1, 7, "read")


def test_a_payload_of_another_key(hostile: HostileProducer, reader: KVConsumer) -> None:
    """A valid payload, but not the requested one."""
    payload = payload_bytes(Recipe("other").make(), "other")
    ended = get(reader)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, len(payload))), payload)
    error = ended.exception(5)
    assert type(error) is WireError
    assert "requested 'k', the payload says it is 'other'" in str(error)
    released = hostile.receive_until(Release)
    assert isinstance(released, Release)
    assert released.outcome == "rejected"
    until(lambda: reader.stats()["memory"]["used"] == 0, "the memory is back")


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("draft", [0, 512])
def test_an_invalid_header(
    hostile: HostileProducer, reader: KVConsumer, draft: int, beside: bool
) -> None:
    """The stream is rejected, its memory is freed, the connection stays open."""
    ended = get(reader, streamed=True)
    hostile.receive_until(Get)
    offer, nonsense = Offer(1, 7, Location(0, 0, 1000), draft), b"\x09" * (draft or 1000)
    if beside:
        hostile.send(offer, nonsense)
    else:
        hostile.send(offer)
        assert hostile.receive_until(FetchRange) == FetchRange(1, 7, *offer.first)
        hostile.send(Chunk(1, 7, offer.first[0]), nonsense)
    # It may have been damaged on its way: it is fetched once more.
    assert hostile.receive_until(FetchRange) == FetchRange(1, 7, *offer.first)
    hostile.send(Chunk(1, 7, offer.first[0]), nonsense)
    assert type(ended.exception(5)) is WireError
    released = hostile.receive_until(Release)
    assert isinstance(released, Release)
    assert released.outcome == "rejected"
    assert reader.stats()["connected"]
    until(lambda: reader.stats()["memory"]["used"] == 0, "the memory is back")


def test_layers_before_the_header(hostile: HostileProducer, reader: KVConsumer) -> None:
    get(reader, streamed=True)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, 1000), 512))
    for _ in range(5000):
        hostile.send(Layer(1, 0, (b"",)))
    until(lambda: not reader.stats()["connected"], "the session is over")


def test_messages_about_unknown_gets_are_ignored(
    hostile: HostileProducer, reader: KVConsumer
) -> None:
    for message in (Layer(9, 0, (b"",)), Committed(9), Failed(9, "x", "failed")):
        hostile.send(message)
    hostile.send(Chunk(9, 9, 0), b"bytes")
    pending = begin_get(reader, "k", timeout=60)
    hostile.receive_until(Get)
    assert reader.stats()["connected"]
    pending.cancel()


def test_an_offer_larger_than_the_quota(hostile: HostileProducer, reader: KVConsumer) -> None:
    ended = get(reader)
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, 2**53)))
    assert "quota" in str(ended.exception(5))
    assert reader.stats()["connected"]


def test_a_refusal_tells_the_reason(hostile: HostileProducer, reader: KVConsumer) -> None:
    ended = get(reader)
    hostile.receive_until(Get)
    hostile.send(Refused("too slow", (1, 1)))
    error = ended.exception(5)
    assert isinstance(error, PeerLostError)
    assert "too slow" in str(error)


def test_a_connection_with_itself_is_tried_again() -> None:
    """TCP can connect a socket with itself if the kernel chose the port that it connects to."""
    hostile = HostileProducer(own_hello())

    def echo_then_greet() -> None:
        hostile.send(hostile.receive())
        hostile.greet()

    thread = threading.Thread(target=echo_then_greet)
    thread.start()
    try:
        KVLink.connect(hostile.url, timeout=60).close()
    finally:
        thread.join()
        hostile.close()


@pytest.mark.parametrize(
    ("hello", "kind"),
    [
        (Refused("no room", (2, 2)), ConnectorError),
        (Refused("no common version", (8, 9)), VersionError),
        (Get(1, "k"), WireError),
    ],
)
def test_greetings(hello: Message, kind: type[Exception]) -> None:
    hostile = HostileProducer(hello)
    thread = threading.Thread(target=hostile.greet)
    thread.start()
    try:
        with pytest.raises(kind):
            KVLink.connect(hostile.url, timeout=60)
    finally:
        thread.join()
        hostile.close()
