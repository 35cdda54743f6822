"""Peers share the socket of a listener: one that sends without a pause has its turns, and a limit.

Bare sockets send here. A ZMTP PING behind the messages is answered by ZMQ's own thread: after its
PONG the messages are in the listener's queue, whatever the listener does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, KVProducer, TensorTransferData
from omni_kvlink.connectors.control import peer as control_peer
from omni_kvlink.connectors.control.peer import MAX_INBOX_AGAIN, ROUND, SHARE
from omni_kvlink.connectors.protocol.messages import (
    Cancel,
    Get,
    Message,
    Offer,
    Release,
    decode,
    encode,
    own_hello,
)
from omni_kvlink.connectors.runtime import turns
from omni_kvlink.connectors.runtime.turns import TURN
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import num_calls, paused
from support.connectors.zmq_addresses import fresh_url
from support.connectors.zmtp import connect, frame, greeting, ready
from support.link.ends import end_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reaches into _KEPT_SECONDS, _on_message_in_loop, _socket: how many messages of a peer one round
# handles is counted there; `stats()` has their sum.


pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
PATIENCE = 60.0
MANY = 4000
PING, PONG = b"\x04\x07\x04PING\0\0", b"\x04\x05\x04PONG"


class BarePeer:
    """A greeted reader without ZMQ."""

    def __init__(self, url: str, source: str = ""):
        self.sock = connect(url, source)
        self._received = b""
        self.sock.sendall(greeting(b"NULL", minor=1))
        self._take_until(b"READY")
        self.sock.sendall(ready() + frame(encode(own_hello())) + PING)
        self._take_until(PONG)
        while b"Hello" not in self._received:
            self._receive()

    def send(self, *messages: Message) -> None:
        """Return when the messages are in the listener's queue."""
        self._received = b""
        self.sock.sendall(b"".join(frame(encode(message)) for message in messages) + PING)
        self._take_until(PONG)

    def take_offer(self, get: Get) -> Offer:
        self._received = b""
        self.sock.sendall(frame(encode(get)))
        while b"Offer" not in (data := self._next_frame()):
            pass  # ZMQ's heartbeat
        offer = decode(data)
        assert isinstance(offer, Offer)
        return offer

    def is_disconnected(self) -> bool:
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def is_answered(self, key: str) -> bool:
        """Whether it gets a payload, and is not disconnected before."""
        received = b""
        try:
            self.sock.sendall(frame(encode(Get(1, key))))
            while b"Offer" not in received:
                data = self.sock.recv(65536)
                if not data:
                    return False
                received += data
        except ConnectionError:
            return False
        return True

    @property
    def name(self) -> str:
        if self.sock.family == socket.AF_UNIX:
            return f"pid {os.getpid()}"
        host, port = self.sock.getsockname()
        return f"{host}:{port}"

    def _receive(self) -> None:
        data = self.sock.recv(65536)
        assert data
        self._received += data

    def _next_frame(self) -> bytes:
        while len(self._received) < 2 or len(self._received) < 2 + self._received[1]:
            self._receive()
        end = 2 + self._received[1]
        data, self._received = self._received[2:end], self._received[end:]
        return data

    def _take_until(self, text: bytes) -> None:
        while text not in self._received:
            self._receive()
        self._received = self._received.replace(text, b"", 1)


@contextlib.contextmanager
def greeted(url: str, source: str = "") -> Iterator[BarePeer]:
    peer = BarePeer(url, source)
    with peer.sock:
        yield peer


@pytest.fixture(params=["tcp", "ipc"])
def producer(request: pytest.FixtureRequest, sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(fresh_url(request.param, sockets), insecure=request.param == "tcp") as link:
        yield link


@pytest.fixture
def handled(producer: KVProducer, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, int]]:
    """How many messages of each peer were handled in each round of reads."""
    counts = Counter[tuple[Any, int]]()
    end = end_of(producer)
    (listener,) = end.listeners
    on_message = listener._on_message_in_loop

    def record(peer: Any, message: Message) -> None:
        counts[peer, listener._socket.rounds] += 1
        on_message(peer, message)

    monkeypatch.setattr(listener, "_on_message_in_loop", record)
    return counts


def test_a_round_handles_one_turn_of_a_peer(
    producer: KVProducer, handled: Counter[tuple[Any, int]]
) -> None:
    """The rest is read, so that it stands before nobody's messages, and handled in later turns."""
    end = end_of(producer)
    with greeted(producer.url) as flooder:
        with paused(end.loop):
            flooder.send(*map(Cancel, range(MANY)))
        until(lambda: handled.total() == MANY, "all were handled")
        assert max(handled.values()) <= 2 * TURN  # what is read, and what was kept
        assert set(producer.stats()["throttled"]) == {flooder.name}
        assert producer.stats()["refused"] == {}


def test_a_round_handles_a_share_of_many_peers(
    producer: KVProducer, handled: Counter[tuple[Any, int]]
) -> None:
    end = end_of(producer)
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(greeted(producer.url)) for _ in range(12)]
        with paused(end.loop):
            for flooder in flooders:
                flooder.send(*map(Cancel, range(TURN)))
        until(lambda: handled.total() == 12 * TURN, "all were handled")
        by_round = Counter[int]()
        for (_, number), count in handled.items():
            by_round[number] += count
        assert max(by_round.values()) <= ROUND + 12 * SHARE + TURN  # and a turn of what was kept


def test_close_comes_before_a_backlog(
    producer: KVProducer, handled: Counter[tuple[Any, int]]
) -> None:
    end = end_of(producer)
    closing = threading.Thread(target=producer.close)
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(greeted(producer.url)) for _ in range(3)]
        with paused(end.loop):
            for flooder in flooders:
                flooder.send(*map(Cancel, range(MANY)))
            closing.start()
            until(lambda: num_calls(end.loop) >= 2, "close is called")
        closing.join()
    assert handled.total() <= 2 * 3 * TURN


@pytest.mark.parametrize("limit", ["MAX_INBOX", "MAX_INBOX_NBYTES"])
def test_what_is_kept_of_a_peer_has_a_limit(
    producer: KVProducer, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_peer, limit, 1000)
    end = end_of(producer)
    with greeted(producer.url) as flooder, greeted(producer.url) as honest:
        with paused(end.loop):
            flooder.send(*(Get(number, "void") for number in range(MANY)))
        assert flooder.is_disconnected()
        until(lambda: producer.stats()["readers"] == 1, "it is removed")
        assert producer.stats()["refused"] == {"flood": 1}
        assert producer.stats()["transfers"]["waiting"] == 0
        producer.put(TensorTransferData("k", {"ids": torch.arange(3)}))
        assert honest.take_offer(Get(1, "k")).get_id == 1


def test_many_flooders_are_found_out(producer: KVProducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no round of reads has a turn of each."""
    monkeypatch.setattr(control_peer, "MAX_INBOX", 1000)
    end = end_of(producer)
    with contextlib.ExitStack() as stack:
        flooders = [stack.enter_context(greeted(producer.url)) for _ in range(8)]
        with paused(end.loop):
            for flooder in flooders:
                flooder.send(*map(Cancel, range(MANY)))
        for flooder in flooders:
            assert flooder.is_disconnected()


def test_after_a_flood_less_is_kept_of_its_host(
    producer: KVProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_peer, "MAX_INBOX", 2000)
    end = end_of(producer)

    def takes(count: int, source: str = "") -> bool:
        """Whether a peer is answered that has sent so many messages."""
        with greeted(producer.url, source) as peer:
            with paused(end.loop):
                peer.send(*map(Cancel, range(count)))
            return peer.is_answered("k")

    producer.put(TensorTransferData("k", {"ids": torch.arange(3)}), readers=10)
    assert takes(1000)
    assert not takes(MANY)
    assert not takes(1000)
    assert takes(MAX_INBOX_AGAIN // 2)
    if producer.url.startswith("zmq+tcp"):
        assert takes(1000, "127.0.0.2")
    monkeypatch.setattr(turns, "_KEPT_SECONDS", 0.0)
    assert takes(1000)


def test_a_peer_that_ended_is_removed_after_its_last_message(producer: KVProducer) -> None:
    end = end_of(producer)
    with greeted(producer.url) as reader:
        receipt = producer.put(TensorTransferData("k", {"ids": torch.arange(3)}))
        offer = reader.take_offer(Get(1, "k"))
        with paused(end.loop):
            release = Release(offer.get_id, offer.epoch, "read")
            reader.send(*map(Cancel, range(2, MANY)), release)
            reader.sock.close()
        receipt.wait(timeout=PATIENCE)
        assert producer.stats()["transfers"]["redelivered"] == 0
