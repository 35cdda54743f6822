"""Nothing that a hostile producer sends changes bytes that its reader has handed out."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVConsumer, KVLink, KVLinkError, PeerLostError, WireError
from omni_kvlink.connectors.protocol.messages import (
    Chunk,
    Committed,
    Failed,
    FetchRange,
    Get,
    Hello,
    Layer,
    Location,
    Message,
    Offer,
    Refused,
    own_hello,
)
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.testing.caches import Recipe, hash_tensors
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import until
from support.connectors.zmq_hostile import HostileProducer, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")

RECIPE = Recipe("k", layers=2, tokens=200, heads=4, dim=256, dtype="uint8")
PAYLOAD = payload_bytes(RECIPE.make())
PLAN = Manifest.decode(PAYLOAD)
DRAFT = RECIPE.make().plan(digests=True).encode()
DIGESTS = tuple(bytes.fromhex(spec.digest) for spec in PLAN.tensors)
FIRST = PLAN.header_nbytes
NBYTES = PLAN.tensors[0].nbytes
EVIL = b"\xee"
OTHERS = tuple(bytes(4) for _ in range(2))

Parts = tuple[Message | bytes, ...]
ATTACKS: dict[str, list[Parts]] = {
    "a layer too many": [(Layer(1, 4, DIGESTS[:2]),)],
    "tensors beyond the last": [(Layer(1, 3, DIGESTS[:2]),)],
    "no tensor": [(Layer(1, 2, ()),)],
    "a layer twice": [(Layer(1, 0, DIGESTS[:2]),)],
    "a layer twice, with other digests": [(Layer(1, 0, OTHERS),)],
    "an overlapping layer": [(Layer(1, 1, OTHERS),)],
    "a digest too short": [(Layer(1, 2, (b"123", b"5678")),)],
    "a digest too long": [(Layer(1, 2, (b"12345678", b"5678")),)],
    "a layer with other bytes": [(Layer(1, 2, DIGESTS[2:]),)],
    "a layer with other digests": [(Layer(1, 2, OTHERS),)],
    "bytes twice": [(Chunk(1, 7, FIRST), EVIL * NBYTES)],
    "bytes that were not requested": [(Chunk(1, 7, FIRST + 2 * NBYTES), EVIL * NBYTES)],
    "bytes across the end": [(Chunk(1, 7, len(PAYLOAD)), EVIL * (len(DRAFT) + 1))],
    "bytes of another epoch": [(Chunk(1, 8, FIRST), EVIL * NBYTES)],
    "a commit before its layers": [(Committed(1),)],
    "a commit, then its layers": [(Committed(1),), (Layer(1, 2, DIGESTS[2:]),)],
    "a commit, then other digests": [(Committed(1),), (Layer(1, 0, OTHERS),)],
    "two commits": [(Committed(1),), (Committed(1),)],
    "an offer twice": [(Offer(1, 7, Location(0, 0, len(PAYLOAD)), len(DRAFT)), DRAFT)],
    "another offer": [(Offer(1, 8, Location(0, 0, len(PAYLOAD))),)],
    "another, small one": [(Offer(1, 8, Location(0, 0, 100)), EVIL * 100)],
    "a failure": [(Failed(1, "no more", "failed"),)],
    "a failure, then bytes": [(Failed(1, "x", "closed"),), (Chunk(1, 7, FIRST), EVIL * NBYTES)],
    "a failure, then layers": [(Failed(1, "x", "failed"),), (Layer(1, 0, OTHERS),)],
    "a refusal": [(Refused("out", (1, 1)),)],
}
ENDING = (
    "a layer twice",
    "a commit, then its layers",
    "a commit, then other digests",
    "two commits",
)
"""Attacks that are noticed by the message alone, and end the connection."""


class Answering:
    """Answers the reader's messages in a thread: get 1 with evil bytes, others with good ones."""

    def __init__(self, hostile: HostileProducer):
        self._hostile = hostile
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._hostile.has_message(0.05):
                continue
            message = self._hostile.receive()
            if isinstance(message, Hello):  # the reader has connected again
                self._hostile.send(own_hello())
            elif isinstance(message, Get):
                good = payload_bytes(OTHER.make(), "other")
                self._hostile.send(Offer(message.get_id, 9, Location(0, 0, len(good))))
            elif isinstance(message, FetchRange):
                good = payload_bytes(OTHER.make(), "other")
                part = good[message.start : message.stop]
                if message.epoch == 7:
                    part = EVIL * (message.stop - message.start)
                self._hostile.send(Chunk(message.get_id, message.epoch, message.start), part)


OTHER = Recipe("other", seed=5, layers=2, tokens=200, heads=4, dim=256, dtype="uint8")


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


def send_range(hostile: HostileProducer) -> None:
    fetch = hostile.receive_until(FetchRange)
    assert isinstance(fetch, FetchRange)
    source = PAYLOAD + DRAFT
    hostile.send(Chunk(1, 7, fetch.start), source[fetch.start : fetch.stop])


def get_other(reader: KVConsumer) -> str:
    """Receive another payload of the same size, in as many sessions as it takes; its hash."""
    while True:
        with (
            contextlib.suppress(PeerLostError, WireError),  # the attack has ended the session
            reader.get("other", timeout=PATIENCE) as found,
        ):
            return hash_tensors(found.tensors())


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_layer_that_was_handed_out_does_not_change(
    hostile: HostileProducer, reader: KVConsumer, attack: str
) -> None:
    thread = threading.Thread(target=offer_first_layer, args=(hostile,))
    thread.start()
    stream = reader.stream_get("k", timeout=PATIENCE)
    layer = stream.wait_for_layer(0)
    thread.join()
    before = hash_tensors(layer.tensors)
    assert before == hash_tensors(RECIPE.make().tensors()[:2])
    for parts in ATTACKS[attack]:
        hostile.send(*parts)
    answering = Answering(hostile)
    try:
        for _ in range(3):
            assert get_other(reader) == hash_tensors(OTHER.make().tensors())
            assert hash_tensors(layer.tensors) == before
        if attack not in ("an offer twice", "another offer", "another, small one"):
            with pytest.raises(KVLinkError):
                stream.wait_for_layer(1, timeout=0.0)
        if attack in ENDING:
            assert reader.stats()["sessions"] == 2
        stream.release()
        assert get_other(reader) == hash_tensors(OTHER.make().tensors())
        assert hash_tensors(layer.tensors) == before
        del layer
        until(lambda: reader.stats()["memory"]["used"] == 0, "the memory is free")
    finally:
        answering.close()


def offer_first_layer(hostile: HostileProducer) -> None:
    hostile.receive_until(Get)
    hostile.send(Offer(1, 7, Location(0, 0, len(PAYLOAD)), len(DRAFT)), DRAFT)
    hostile.send(Layer(1, 0, DIGESTS[:2]))
    send_range(hostile)


WHOLE: dict[str, list[Parts]] = {
    "a layer": [(Layer(1, 0, DIGESTS[:2]),)],
    "other digests": [(Layer(1, 0, OTHERS),)],
    "a layer too many": [(Layer(1, 4, OTHERS),)],
    "a commit": [(Committed(1),)],
    "bytes twice": [(Chunk(1, 7, FIRST), EVIL * NBYTES)],
    "another offer": [(Offer(1, 8, Location(0, 0, len(PAYLOAD))),)],
    "a failure": [(Failed(1, "x", "failed"),), (Chunk(1, 7, 0), EVIL)],
}


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("attack", WHOLE)
def test_a_payload_that_was_handed_out_does_not_change(
    hostile: HostileProducer, reader: KVConsumer, attack: str, draft: bool
) -> None:
    """Also one that was taken while it was written."""
    thread = threading.Thread(target=send_whole, args=(hostile,), kwargs={"draft": draft})
    thread.start()
    received = reader.get("k", timeout=PATIENCE)
    thread.join()
    tensors = received.data.tensors()
    before = hash_tensors(tensors)
    assert before == hash_tensors(RECIPE.make().tensors())
    for parts in WHOLE[attack]:
        hostile.send(*parts)
    answering = Answering(hostile)
    try:
        for _ in range(2):
            assert get_other(reader) == hash_tensors(OTHER.make().tensors())
            assert hash_tensors(tensors) == before
            received.release()  # the tensors are kept
        assert reader.stats()["sessions"] == (1 if attack == "another offer" else 2)
        del tensors
        until(lambda: reader.stats()["memory"]["used"] == 0, "the memory is free")
    finally:
        answering.close()


def send_whole(hostile: HostileProducer, *, draft: bool) -> None:
    hostile.receive_until(Get)
    if not draft:
        hostile.send(Offer(1, 7, Location(0, 0, len(PAYLOAD))))
        send_range(hostile)
        return
    hostile.send(Offer(1, 7, Location(0, 0, len(PAYLOAD)), len(DRAFT)), DRAFT)
    for first in (0, 2):
        hostile.send(Layer(1, first, DIGESTS[first : first + 2]))
        send_range(hostile)
    hostile.send(Committed(1))
    send_range(hostile)
