"""Lanes: the bytes of large payloads over TCP connections beside the control channel."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from omni_kvlink import (
    ConnectorError,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TensorTransferData,
    TransferTimeout,
    WireError,
)
from omni_kvlink.connectors.control import lane as lane_module
from omni_kvlink.connectors.control import lane_listener, lane_reader, lane_sender
from omni_kvlink.connectors.control.lane import GREETING, MAGIC, TICKET, count_lanes
from omni_kvlink.connectors.control.lane_listener import LaneListener
from omni_kvlink.connectors.control.peer import PeerConnection
from omni_kvlink.connectors.control.tcp_sender import TcpSender
from omni_kvlink.connectors.protocol.messages import LaneTicket, OpenLane, decode, encode
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.testing.caches import hash_tensors
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import until
from support.connectors.lane_peer import force_lanes
from support.connectors.lane_relay import LaneRelay

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
MIB = 1 << 20
Ends = tuple[KVProducer, KVConsumer]


def has_cipher() -> bool:
    return not lane_module.lanes_refusal(1, is_encrypted=True)


needs_cipher = pytest.mark.skipif(not has_cipher(), reason="cryptography is not installed")


@pytest.fixture(params=["plain", "keys"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of both ends: without keys, and with those of this user."""
    if request.param == "keys" and not has_cipher():
        pytest.skip("cryptography is not installed")
    return {"insecure": True, "lanes": 2} if request.param == "plain" else {}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all bytes come by lanes."""
    force_lanes(monkeypatch)


@contextlib.contextmanager
def linked(
    options: dict[str, Any], connecting: dict[str, Any] | None = None
) -> Iterator[tuple[KVProducer, KVConsumer]]:
    """Both ends of a link, with these options; `connecting` are the reader's, if others."""
    with KVLink.serve("zmq+tcp://127.0.0.1:0", **options) as producer:
        connecting = options if connecting is None else connecting
        with KVLink.connect(producer.url, timeout=PATIENCE, **connecting) as reader:
            yield producer, reader


@pytest.fixture
def ends(options: dict[str, Any], forced: None) -> Iterator[Ends]:
    with linked(options) as ends:
        yield ends


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, forced: None) -> Iterator[LaneRelay]:
    relay = LaneRelay(monkeypatch)
    yield relay
    relay.close()


@pytest.fixture
def relayed(relay: LaneRelay, ends: Ends) -> tuple[KVProducer, KVConsumer, LaneRelay]:
    return *ends, relay


def payload(key: str, nbytes: int) -> TensorTransferData:
    generator = torch.Generator().manual_seed(nbytes)
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return TensorTransferData(key, {"values": values})


def check_get(producer: KVProducer, reader: KVConsumer, key: str, nbytes: int) -> None:
    """Send a payload, and compare every byte."""
    sent = payload(key, nbytes)
    receipt = producer.put(sent)
    with reader.get(key, timeout=PATIENCE) as received:
        assert hash_tensors(received.tensors()) == hash_tensors(sent.tensors())
    receipt.wait(timeout=PATIENCE)


def lanes_of(end: KVProducer | KVConsumer) -> dict[str, Any]:
    stats = end.stats()
    return dict(stats["lanes"] if "lanes" in stats else stats["zmq"])


def test_every_byte_comes_by_lanes(ends: Ends) -> None:
    producer, reader = ends
    check_get(producer, reader, "k", 24 * MIB)
    assert 24 * MIB <= lanes_of(reader)["received_nbytes"] < 25 * MIB
    assert lanes_of(reader)["why"] == ""
    assert lanes_of(producer)["open"] == lanes_of(reader)["opened"] > 0


def test_ranges_of_many_frames(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lane_module, lane_sender, lane_reader):
        monkeypatch.setattr(module, "FRAME", 1000)
    producer, reader = ends
    check_get(producer, reader, "k", 300_001)


def test_lanes_open_with_the_first_large_payload(options: dict[str, Any]) -> None:
    with linked(options) as (producer, reader):
        check_get(producer, reader, "small", 100_000)
        assert not lanes_of(reader)["opened"]
        assert "kvlink-lane" not in {thread.name for thread in threading.enumerate()}
        check_get(producer, reader, "large", 2 * MIB)
        until(lambda: lanes_of(reader)["opened"] > 0, "a lane is open")
        reader.close()
        until(lambda: not lanes_of(producer)["open"], "the consumer's lanes are closed")
    assert "kvlink-lane" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("end", ["producer", "consumer"])
def test_no_lanes(options: dict[str, Any], end: str) -> None:
    serving = {**options, **({"lanes": 0} if end == "producer" else {})}
    connecting = {**options, **({"lanes": 0} if end == "consumer" else {})}
    with linked(serving, connecting) as (producer, reader):
        check_get(producer, reader, "k", 2 * MIB)
        assert not lanes_of(reader)["opened"]
        expected = "the producer opens none" if end == "producer" else "lanes=0"
        assert expected in lanes_of(reader)["why"]


def test_the_smaller_number_counts(options: dict[str, Any]) -> None:
    with linked({**options, "lanes": 1}, {**options, "lanes": 3}) as (producer, reader):
        check_get(producer, reader, "k", 2 * MIB)
        until(lambda: lanes_of(reader)["opened"] == 1, "a lane is open")
        check_get(producer, reader, "k2", 2 * MIB)
        assert lanes_of(producer)["open"] == 1
        assert lanes_of(reader)["why"] == ""


def test_the_default_number() -> None:
    """Without keys no lanes; see docs/zmq.md."""
    assert count_lanes(-1, is_encrypted=False) == 0 < count_lanes(-1, is_encrypted=True) <= 8
    assert count_lanes(3, is_encrypted=False) == count_lanes(3, is_encrypted=True) == 3


def test_without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link with keys keeps to ZMQ's own encryption, and says why."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with linked({}) as (producer, reader):
        check_get(producer, reader, "k", 2 * MIB)
        assert not lanes_of(reader)["opened"]
        assert "omni-kvlink[lanes]" in lanes_of(reader)["why"]
        assert "omni-kvlink[lanes]" in lanes_of(producer)["why"]


def test_a_cut_lane_resumes(relayed: tuple[KVProducer, KVConsumer, LaneRelay]) -> None:
    """Of a payload that is cut at half, about half crosses afterwards."""
    producer, reader, relay = relayed
    nbytes = 64 * MIB
    relay.cut_at = nbytes // 2
    check_get(producer, reader, "k", nbytes)
    stats = lanes_of(reader)
    crossed = relay.passed + nbytes - stats["received_nbytes"]  # the control channel has brought it
    assert nbytes <= crossed <= 1.05 * nbytes
    assert stats["lost"] >= 1
    assert 0 < stats["again_nbytes"] < nbytes // 2
    assert lanes_of(producer)["ended"] >= 1


def test_a_lane_that_cannot_open_again(relayed: tuple[KVProducer, KVConsumer, LaneRelay]) -> None:
    """The rest goes over the control channel."""
    producer, reader, relay = relayed
    relay.cut_at, relay.is_open = 8 * MIB, False
    check_get(producer, reader, "k", 64 * MIB)
    assert relay.passed < 40 * MIB
    until(lambda: lanes_of(reader)["why"], "the reason is in stats()")
    check_get(producer, reader, "k2", 2 * MIB)


def test_a_get_that_ends_while_its_bytes_are_on_the_way(
    relayed: tuple[KVProducer, KVConsumer, LaneRelay],
) -> None:
    """Its memory is free, whether they ever arrive or not; if they do, they are dropped."""
    producer, reader, relay = relayed
    check_get(producer, reader, "k", 2 * MIB)
    relay.flows.clear()
    sent = payload("k2", 8 * MIB)
    producer.put(sent)
    with pytest.raises(TransferTimeout):
        reader.get("k2", timeout=0.2)
    until(lambda: not reader.stats()["memory"]["used"], "its memory is free")
    relay.flows.set()
    with reader.get("k2", timeout=PATIENCE) as received:
        assert hash_tensors(received.tensors()) == hash_tensors(sent.tensors())
    check_get(producer, reader, "k3", 2 * MIB)
    assert not lanes_of(reader)["lost"]


def test_a_flipped_bit(relayed: tuple[KVProducer, KVConsumer, LaneRelay]) -> None:
    """What was changed on the way is not delivered; with keys the lane ends, too."""
    producer, reader, relay = relayed
    relay.flip_at = relay.passed + 3 * MIB
    check_get(producer, reader, "k", 16 * MIB)
    assert relay.flip_at == 0
    refetched = reader.stats()["verification"]["refetched"]
    if lanes_of(reader)["lost"]:
        assert refetched == 0
        assert "not authentic" in lanes_of(reader)["why"]
    else:
        assert refetched == 1


@needs_cipher
def test_a_flipped_bit_without_digests(forced: None, relay: LaneRelay) -> None:
    """The encryption finds it alone."""
    with linked({"digests": False}, {}) as (producer, reader):
        relay.flip_at = relay.passed + 3 * MIB
        check_get(producer, reader, "k", 16 * MIB)
        assert lanes_of(reader)["lost"] >= 1


@needs_cipher
def test_nothing_is_readable_on_the_way(forced: None, relay: LaneRelay) -> None:
    with linked({}) as (producer, reader):
        producer.put(TensorTransferData("k", {"values": torch.zeros(4 * MIB, dtype=torch.uint8)}))
        with reader.get("k", timeout=PATIENCE):
            pass
    assert sum(map(len, relay.seen)) >= 4 * MIB
    assert all(bytes(1000) not in piece for piece in relay.seen)


def test_a_direct_put_that_is_cut(relayed: tuple[KVProducer, KVConsumer, LaneRelay]) -> None:
    """Its tensors may be its caller's again: the get fails, and says so."""
    producer, reader, relay = relayed
    relay.cut_at = relay.passed + 8 * MIB
    sent = payload("k", 64 * MIB)
    with pytest.raises(PeerLostError, match="lane was cut"):
        _get_while(producer, reader, sent)
    check_get(producer, reader, "k2", 2 * MIB)


def _get_while(producer: KVProducer, reader: KVConsumer, sent: TensorTransferData) -> None:
    putting = threading.Thread(target=_put_direct, args=(producer, sent))
    putting.start()
    try:
        with reader.get("k", timeout=PATIENCE):
            pass
    finally:
        producer.abort("k")
        putting.join()


def _put_direct(producer: KVProducer, sent: TensorTransferData) -> None:
    try:
        producer.put(sent, direct=True, timeout=PATIENCE)
    except Exception as error:  # as far as its reader was lost, this is no part of the test
        print(error)


# Who must not be let in


@pytest.fixture
def listening(ends: Ends) -> tuple[KVProducer, KVConsumer, int]:
    """The port of a listener that lanes are open at."""
    producer, reader = ends
    check_get(producer, reader, "k", 2 * MIB)
    return producer, reader, _lane_port(producer)


def _lane_port(producer: KVProducer) -> int:
    lanes = _lane_listener(producer)
    [listening] = lanes._listening.values()  # private: no message says it twice
    return int(listening.getsockname()[1])


def _lane_listener(producer: Any) -> LaneListener:
    [sender] = producer._end.listeners[0]._senders  # private: nothing else has it
    lanes = sender._lanes  # private: the same
    assert isinstance(lanes, LaneListener)
    return lanes


def _session_lanes(reader: Any) -> Any:
    session = reader._end._session  # private: nothing else has it
    return session._lanes  # private: the same


def _is_closed(sock: socket.socket) -> bool:
    """Whether the other side closes a connection, without a byte."""
    sock.settimeout(PATIENCE)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + os.urandom(TICKET),
        MAGIC[:3] + b"x",
        bytes(GREETING),
    ],
    ids=["other protocol", "no such ticket", "other magic", "zeros"],
)
def test_a_connection_without_a_ticket(
    listening: tuple[KVProducer, KVConsumer, int], greeting: bytes
) -> None:
    producer, reader, port = listening
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(greeting)
        assert _is_closed(sock)
    assert sum(producer.stats()["refused"].values()) == 1
    check_get(producer, reader, "k2", 2 * MIB)


def test_a_used_ticket(relayed: tuple[KVProducer, KVConsumer, LaneRelay]) -> None:
    producer, reader, relay = relayed
    check_get(producer, reader, "k", 2 * MIB)
    with socket.create_connection(("127.0.0.1", _lane_port(producer))) as sock:
        sock.sendall(relay.greetings[0])
        assert _is_closed(sock)
    assert producer.stats()["refused"] == {"wrong ticket": 1}


def test_the_name_of_a_ticket_is_not_enough(
    listening: tuple[KVProducer, KVConsumer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, port = listening
    lanes = _lane_listener(producer)
    ticket = LaneTicket(9, port, os.urandom(TICKET))
    peer: Any = object()
    tickets = lanes._tickets  # private: a peer's own ticket is used up at once
    tickets[ticket.ticket[:8]] = peer, ticket
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(MAGIC + ticket.ticket[:8] + bytes(TICKET - 8))
        assert _is_closed(sock)
    assert producer.stats()["refused"] == {"wrong ticket": 1}
    del tickets[ticket.ticket[:8]]


def test_a_lane_that_could_not_open_gives_its_place_back(
    listening: tuple[KVProducer, KVConsumer, int],
) -> None:
    producer, _, port = listening
    lanes = _lane_listener(producer)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        peer = PeerConnection(lanes.control, b"", -1, sock, None)
        for number in range(1, 10):
            ticket = lanes.ticket(peer, OpenLane(number, number - 1))
            assert ticket.ticket, ticket.reason
        lanes.on_peer_lost(peer)


@pytest.mark.parametrize(
    "handler",
    [
        "LaneListener._on_connection_in_loop",
        "LaneListener._on_greeting_in_loop",
        "LaneSender._on_events_in_loop",
        "LaneReader._on_connected_in_loop",
        "LaneReader._on_readable_in_loop",
    ],
)
def test_a_connection_that_the_system_does_not_watch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    """That lane is closed; the link goes on, and the next reader has its lanes."""
    watch, refused = EventLoop.watch, list[int]()

    def refuse_one(loop: EventLoop, source: Any, events: int, function: Any) -> None:
        if getattr(function, "func", function).__qualname__ == handler and not refused:
            refused.append(source.fileno())
            raise ConnectorError("watching a connection: No space left on device")
        watch(loop, source, events, function)

    monkeypatch.setattr(EventLoop, "watch", refuse_one)
    with linked(options) as (producer, reader):
        check_get(producer, reader, "a", 2 * MIB)
        until(lambda: bool(refused), "a lane was refused")
        check_get(producer, reader, "b", 2 * MIB)
        with KVLink.connect(producer.url, timeout=PATIENCE, **options) as other:
            check_get(producer, other, "c", 2 * MIB)
            until(lambda: lanes_of(other)["opened"] > 0, "a lane is open")
        assert producer.stats()["transfers"]["failed"] == 0


def test_connections_that_say_nothing(listening: tuple[KVProducer, KVConsumer, int]) -> None:
    """The oldest is closed for another; those with a ticket come through."""
    producer, reader, port = listening
    silent = [
        socket.create_connection(("127.0.0.1", port))
        for _ in range(lane_listener.MAX_UNADMITTED + 3)
    ]
    for sock in silent[:3]:
        assert _is_closed(sock)
    until(lambda: producer.stats()["refused"] == {"no ticket": 3}, "three were closed")
    with KVLink.connect(producer.url, timeout=PATIENCE, **_options_of(reader)) as other:
        check_get(producer, other, "k2", 2 * MIB)
        assert lanes_of(other)["opened"] > 0
    for sock in silent:
        sock.close()


def _options_of(reader: KVConsumer) -> dict[str, Any]:
    link = _session_lanes(reader)._link  # private: stats() do not say it
    return {"lanes": link.count, "insecure": not link.is_encrypted}


def test_a_greeting_byte_by_byte(options: dict[str, Any], forced: None) -> None:
    """One that never ends holds up nobody, and costs its own bytes alone."""
    with linked(options) as (producer, reader):
        check_get(producer, reader, "k", 2 * MIB)
        with socket.create_connection(("127.0.0.1", _lane_port(producer))) as sock:
            for byte in MAGIC + bytes(TICKET - 1):
                sock.sendall(bytes([byte]))
            check_get(producer, reader, "k2", 2 * MIB)
            sock.sendall(b"\0")
            assert _is_closed(sock)


@pytest.mark.parametrize("wrong", ["no key", "short key", "short ticket", "no port"])
@needs_cipher
def test_a_lane_that_is_less_safe_than_its_link(
    forced: None, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Whoever answers for a producer with keys cannot make its consumer speak in plain text."""
    give = LaneListener.ticket

    def weak(lanes: LaneListener, *arguments: Any) -> LaneTicket:
        good = give(lanes, *arguments)
        port = 0 if wrong == "no port" else good.port
        ticket = good.ticket[:-1] if wrong == "short ticket" else good.ticket
        key = {"no key": b"", "short key": good.key[:16]}.get(wrong, good.key)
        return LaneTicket(good.lane, port, ticket, key)

    monkeypatch.setattr(LaneListener, "ticket", weak)
    with pytest.raises(WireError, match="not as safe"), linked({}):
        pass


def test_a_lane_that_nobody_asked_for(ends: Ends) -> None:
    _, reader = ends
    with pytest.raises(WireError, match="not asked for"):
        _session_lanes(reader).on_ticket(LaneTicket(99, 1, bytes(TICKET)))


def test_other_versions() -> None:
    """A request of an earlier version names no lane; a later one's is still understood by it."""
    old = msgspec.msgpack.encode(["FetchRange", 1, 2, 3, 4])
    fetch: Any = decode(old)
    assert fetch.lane == 0
    assert msgspec.msgpack.decode(encode(fetch)) == ["FetchRange", 1, 2, 3, 4, 0]


def test_a_producer_of_an_earlier_version(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Hello names no lanes: it is not asked for any."""
    monkeypatch.setattr(TcpSender, "transports", ("zmq",))
    with linked(options) as (producer, reader):
        check_get(producer, reader, "k", 2 * MIB)
        assert not lanes_of(reader)["opened"]


def test_a_forked_child_has_no_lane(ends: Ends) -> None:
    """The connections end with the parent's, though a child lives."""
    producer, reader = ends
    check_get(producer, reader, "k", 2 * MIB)
    both = [_session_lanes(reader)._lanes, _lane_listener(producer)._lanes]  # private: as above
    ends_of_lanes = [end for lanes in both for end in lanes.values()]
    numbers = [end._socket.fileno() for end in ends_of_lanes]  # private: descriptors to look for
    sockets = {os.path.realpath(f"/proc/self/fd/{number}") for number in numbers}
    assert len(sockets) > 1
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in range(200)]
            os.write(write_end, b"%d" % sum(link in sockets for link in links))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 99) == b"0"
    os.close(read_end)
    os.close(write_end)
    check_get(producer, reader, "k2", 2 * MIB)
