"""A hostile producer can do nothing to a reader of its layers but fail."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, KVLinkError, PeerLostError, TransferFailed, WireError
from omni_kvlink.connectors.protocol.messages import (
    Committed,
    Failed,
    Get,
    Layer,
    Location,
    Memory,
    Message,
    Offer,
    Release,
)
from omni_kvlink.memory.mapping import seal
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import expect
from support.connectors.shm_hostile import Hostile

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer
    from support.connectors.shm_unauthorized import Raw

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PLAN = Recipe("k", layers=2).make().plan()
HEADER = PLAN.encode()
GOOD = (b"1234", b"5678")
ARENA = -(-(256 + PLAN.nbytes + len(HEADER)) // 4096) * 4096


DISCONNECT = "disconnect"
Step = Callable[[int], Message] | threading.Event | str
"""A message for a get; an event to wait for; or `DISCONNECT`."""


class Answer:
    """Offers a draft, takes the given steps, and records the reader's messages."""

    def __init__(self, *steps: Step, draft: int = len(HEADER), **other: Any):
        self._steps, self._draft = steps, draft
        self._header = other.get("header", HEADER)
        self._arena = other.get("arena", ARENA)
        self._epochs = other.get("epochs", (3, 3))
        self.received: list[Message] = []

    def __call__(self, peer: Raw, get: Get) -> None:
        fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, self._arena)
        epoch, written = self._epochs
        os.pwrite(fd, struct.pack("<8sQQQ", b"kvlslot1", written, PLAN.nbytes, 0), 0)
        os.pwrite(fd, self._header, 256 + PLAN.nbytes)
        seal(fd)
        peer.send(Memory(0, self._arena), fd)
        os.close(fd)
        peer.send(Offer(get.get_id, epoch, Location(0, 0, PLAN.nbytes), self._draft))
        with contextlib.suppress(ConnectionError):
            self._send_steps(peer, get.get_id)
        for _ in range(2):  # unread messages cause a reset before the last ones arrive
            with contextlib.suppress(OSError):
                while True:
                    self.received.append(peer.receive()[0])

    def _send_steps(self, peer: Raw, get_id: int) -> None:
        for step in self._steps:
            if isinstance(step, threading.Event):
                step.wait(60)
            elif isinstance(step, str):
                peer.sock.shutdown(socket.SHUT_RDWR)
            else:
                peer.send(step(get_id))

    @property
    def rejections(self) -> list[str]:
        return [
            m.reason for m in self.received if isinstance(m, Release) and m.outcome == "rejected"
        ]


def layer(first: int, *digests: bytes) -> Callable[[int], Message]:
    return lambda get_id: Layer(get_id, first, digests)


@pytest.fixture
def path(sockets: str) -> str:
    return os.path.join(sockets, "name.sock")


@contextlib.contextmanager
def connected(path: str, sockets: str, answer: Answer) -> Iterator[KVConsumer]:
    with (
        Hostile(path, answer),
        KVLink.connect("shm://name", timeout=60, directory=sockets) as reader,
    ):
        yield reader


def test_a_correct_stream_is_read(sockets: str, path: str) -> None:
    """The tests below depend on it: their streams differ from this one."""
    answer = Answer(layer(0, *GOOD), layer(2, *GOOD), Committed)
    with connected(path, sockets, answer) as reader, reader.stream_get("k", timeout=60) as stream:
        assert [found.index for found in stream] == [0, 1]
        stream.wait().close()
    assert answer.rejections == []


BAD_OFFERS = {
    "a draft beyond the arena": Answer(draft=ARENA),
    "a draft far beyond": Answer(draft=2**53),
    "a draft larger than any header": Answer(draft=2 << 20, arena=4 << 20),
    "a draft cut short": Answer(draft=len(HEADER) - 256),
    "a draft of one byte": Answer(draft=1),
    "no draft": Answer(header=bytes(len(HEADER))),
    "another's draft": Answer(header=Recipe("other", layers=2).make().plan().encode()),
    "a draft of a larger payload": Answer(header=Recipe("k", layers=3).make().plan().encode()),
    "another epoch": Answer(epochs=(3, 2)),
}


@pytest.mark.parametrize("what", BAD_OFFERS)
def test_bad_offers(sockets: str, path: str, what: str) -> None:
    answer = BAD_OFFERS[what]
    with connected(path, sockets, answer) as reader, pytest.raises(WireError):
        reader.stream_get("k", timeout=60)
    assert len(answer.rejections) == 1, answer.received


BAD_LAYERS: dict[str, list[Step]] = {
    "a short digest": [layer(0, b"123", b"5678")],
    "a long digest": [layer(0, b"1234", b"5678" * 9)],
    "no digest": [layer(0, b"", b"")],
    "committed without layers": [],
    "committed without V": [layer(0, b"1234")],
    "committed without K": [layer(1, b"1234")],
}


@pytest.mark.parametrize("what", BAD_LAYERS)
@pytest.mark.parametrize("how", ["layer", "whole"])
def test_bad_layers(sockets: str, path: str, what: str, how: str) -> None:
    """The payload is rejected at once, and the producer receives the rejection."""
    answer = Answer(*BAD_LAYERS[what], layer(2, *GOOD), Committed)
    with connected(path, sockets, answer) as reader:
        stream = reader.stream_get("k", timeout=60)
        wait = stream.wait if how == "whole" else lambda: stream.wait_for_layer(0)
        expect(WireError, wait)
        with pytest.raises(KVLinkError):
            wait()
        stream.release()
    assert len(answer.rejections) == 1, answer.received


FATAL: dict[str, list[Step]] = {
    "out of range": [layer(4096, *GOOD)],
    "far out of range": [layer(2**53, *GOOD)],
    "twice": [layer(0, *GOOD)],
    "too many bytes": [layer(number, b"x" * 60_000) for number in range(2, 22)],
    "a message of readers": [lambda get_id: Get(get_id, "k")],
}


@pytest.mark.parametrize("what", FATAL)
def test_a_protocol_violation_ends_the_connection(sockets: str, path: str, what: str) -> None:
    begun = threading.Event()
    answer = Answer(begun, layer(0, *GOOD), *FATAL[what])
    with connected(path, sockets, answer) as reader:
        stream = reader.stream_get("k", timeout=60)
        begun.set()
        expect(WireError, lambda: stream.wait(timeout=60), mentions=("commit",))
        stream.release()


def test_numbers_in_range_that_the_payload_has_not(sockets: str, path: str) -> None:
    """Such announcements are ignored, and their number is bounded."""
    noise = [layer(first, b"x") for first in range(4, 4096)]
    answer = Answer(*noise, layer(0, *GOOD), layer(2, *GOOD), Committed)
    with connected(path, sockets, answer) as reader, reader.stream_get("k", timeout=60) as stream:
        assert [found.index for found in stream] == [0, 1]
        stream.wait().close()


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (lambda get_id: Failed(get_id, "no more", "failed"), TransferFailed),
        (lambda get_id: Failed(get_id, "no more", "closed"), PeerLostError),
    ],
)
def test_messages_for_other_streams_change_nothing(
    sockets: str, path: str, last: Callable[[int], Message], error: type[KVLinkError]
) -> None:
    answer = Answer(
        lambda get_id: Committed(get_id + 7),
        lambda get_id: Layer(get_id + 7, 0, GOOD),
        lambda get_id: Failed(get_id + 7, "not yours", "failed"),
        layer(0, *GOOD),
        last,
        Committed,
        layer(2, *GOOD),
    )
    with connected(path, sockets, answer) as reader:
        stream = reader.stream_get("k", timeout=60)
        expect(error, lambda: stream.wait_for_layer(1, timeout=60), mentions=("layer 1",))
        expect(error, stream.wait)
        stream.release()


def test_a_producer_that_disconnects(sockets: str, path: str) -> None:
    read = threading.Event()
    with connected(path, sockets, Answer(layer(0, *GOOD), read, DISCONNECT)) as reader:
        stream = reader.stream_get("k", timeout=60)
        stream.wait_for_layer(0)
        read.set()
        expect(PeerLostError, lambda: stream.wait_for_layer(1, timeout=60))
        stream.release()
