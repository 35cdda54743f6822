"""Unauthorized peers of a producer: they are refused, and can at most read its memory."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from omni_kvlink import KVLink, TransferFailed
from omni_kvlink.connectors.protocol.messages import (
    Abort,
    Get,
    Location,
    Memory,
    Message,
    Offer,
    Outcome,
    Release,
    encode,
    own_hello,
)
from omni_kvlink.connectors.shm import listener
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.memory.mapping import F_GET_SEALS, SEALS
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import expect, until, until_freed
from support.connectors.shm_unauthorized import NOBODY, as_nobody, dialled, greeted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVProducer

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def path(sockets: str) -> str:
    return os.path.join(sockets, "name.sock")


@pytest.fixture(params=["pooled", "sealed"])
def producer(request: pytest.FixtureRequest, sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(
        "shm://name", directory=sockets, mode=request.param, inline=0, quota=4 << 20
    ) as link:
        yield link


# Unauthorized peers

GARBAGE = [
    b"\x00",
    b"x" * 1000,
    b"\x93\x01\x02\x03",
    b"\xc1" * 60_000,
    b"\x91" * 5000,
    encode(Get(1, "k")),
    encode(Offer(1, 1, Location(0, 0, 1))),
    encode(own_hello())[:-3],
    encode(own_hello()) + b"x",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_before_the_greeting(producer: KVProducer, path: str, garbage: bytes) -> None:
    with dialled(path) as peer:
        peer.send(garbage)
        assert peer.is_dropped()
    assert producer.stats()["refused"] == {"bad message": 1}
    assert producer.stats()["readers"] == 0


FORBIDDEN: list[Message | bytes] = [
    b"\xff",
    b"y" * 65_000,
    own_hello(),
    Memory(0, 4096),
    Offer(1, 1, Location(0, 0, 1)),
    Get(1, "k" * 5000),
    msgspec.msgpack.encode(["Get", -1, "k"]),
    msgspec.msgpack.encode(["Get", 2**63, "k"]),
    msgspec.msgpack.encode(["Release", 1, 1, "eaten", ""]),
]


@pytest.mark.parametrize("message", FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_forbidden_after_the_greeting(
    producer: KVProducer, sockets: str, path: str, message: Message | bytes
) -> None:
    """The peer is disconnected and counted; other readers are not affected."""
    with (
        KVLink.connect("shm://name", timeout=60, directory=sockets) as reader,
        greeted(path) as peer,
    ):
        peer.send(message)
        assert peer.is_dropped()
        assert producer.stats()["refused"] == {"bad message": 1}
        receipt = producer.put(Recipe("k").make())
        with reader.get("k", timeout=60) as data:
            assert fingerprint(data) == fingerprint(Recipe("k").make())
        del data
        receipt.wait(timeout=60)


def test_descriptors_are_not_taken_from_readers(producer: KVProducer, path: str) -> None:
    for number in (1, 4, 20):
        with greeted(path) as peer, open("/dev/null") as null:
            peer.send(Get(1, "k"), *[null.fileno()] * number)
            assert peer.is_dropped()
    assert producer.stats()["refused"] == {"bad message": 3}


def test_releases_of_what_was_never_offered(producer: KVProducer, path: str) -> None:
    receipt = producer.put(Recipe("k").make())
    with greeted(path) as peer:
        for epoch in range(5):
            for outcome in get_args(Outcome):
                peer.send(Release(1, epoch, outcome))
        until(lambda: producer.stats()["transfers"]["stale"] == 15, "they were received")
    assert receipt.state == "committed"


def test_other_version_is_refused_by_the_producer(producer: KVProducer, path: str) -> None:
    with dialled(path) as peer:
        peer.send(msgspec.structs.replace(own_hello(), versions=(7, 9)))
        refused, _ = peer.receive()
        assert type(refused).__name__ == "Refused"
        assert peer.is_dropped()
    assert producer.stats()["refused"] == {"other version": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its uid")
@pytest.mark.parametrize("hello", [True, False])
def test_other_user_is_refused(producer: KVProducer, sockets: str, path: str, hello: bool) -> None:
    """Also where file permissions allow the connection; nobody waits for what it sends."""
    os.chmod(sockets, 0o711)
    os.chmod(path, 0o777)

    def connect() -> bool:
        with dialled(path) as peer:
            if hello:
                with contextlib.suppress(BrokenPipeError):
                    peer.send(own_hello())
            try:
                refused, fds = peer.receive()
            except ConnectionResetError:  # its Hello was not read; what was sent to it comes next
                refused, fds = peer.receive()
            reason = getattr(refused, "reason", "")
            return f"uid {NOBODY} may not read" in reason and not fds and peer.is_dropped()

    with as_nobody(connect) as is_refused:
        assert is_refused()
    until(lambda: producer.stats()["refused"] == {"other user": 1}, "it was counted")
    assert producer.stats()["readers"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its uid")
def test_other_user_cannot_connect_whatever_the_umask(sockets: str, path: str) -> None:
    os.chmod(sockets, 0o755)
    mask = os.umask(0)
    try:
        producer = KVLink.serve("shm://name", directory=sockets)
    finally:
        os.umask(mask)

    def connect() -> bool:
        with pytest.raises(PermissionError), dialled(path):
            pass
        return True

    with producer, as_nobody(connect) as is_refused:
        assert is_refused()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert producer.stats()["refused"] == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its uid")
def test_other_user_cannot_lock(sockets: str) -> None:
    """It locks all that it can open: no producer waits for it, or is refused."""
    os.chmod(sockets, 0o755)

    def lock() -> bool:
        held = [os.open(sockets, os.O_RDONLY)]
        for name in os.listdir(sockets):
            with contextlib.suppress(PermissionError):
                held.append(os.open(f"{sockets}/{name}", os.O_RDONLY | os.O_NONBLOCK))
        for fd in held:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return len(held) == 1

    with KVLink.serve("shm://first", directory=sockets) as first, as_nobody(lock) as is_locked:
        assert is_locked()
        with KVLink.serve("shm://second", directory=sockets):
            first.close()
            assert not os.path.exists(f"{sockets}/first.sock")


def test_silent_connections_are_bounded(
    producer: KVProducer, sockets: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest without a Hello makes room; readers are not affected."""
    monkeypatch.setattr(listener, "MAX_GREETING", 3)
    with (
        greeted(path) as reader,
        dialled(path) as oldest,
        dialled(path) as next_one,
        dialled(path),
        dialled(path),
    ):
        assert oldest.is_dropped()
        assert producer.stats()["refused"] == {"no hello": 1}
        next_one.send(own_hello())
        next_one.receive()
        with dialled(path):
            until(lambda: producer.stats()["readers"] == 5, "one more is no more than allowed")
        producer.put(Recipe("k").make())
        reader.send(Get(1, "k"))
        memory, (fd,) = reader.receive()
        os.close(fd)
        assert isinstance(memory, Memory)
        assert producer.stats()["refused"] == {"no hello": 1}


# A reader can read the producer's memory, and nothing else


def test_reader_cannot_change_the_memory(producer: KVProducer, path: str) -> None:
    receipt = producer.put(Recipe("k").make())
    with greeted(path) as peer:
        peer.send(Get(1, "k"))
        memory, (fd,) = peer.receive()
        offer, _ = peer.receive()
        assert isinstance(memory, Memory)
        assert isinstance(offer, Offer)
        assert fcntl.fcntl(fd, F_GET_SEALS) & SEALS == SEALS
        attempts: list[Callable[[], object]] = [
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, memory.nbytes + 1),
            lambda: os.pwrite(fd, b"x", 0),
            lambda: mmap.mmap(fd, memory.nbytes),
            lambda: fcntl.fcntl(fd, 1033, 0),
            lambda: os.posix_fallocate(fd, 0, memory.nbytes * 2),
        ]
        for attempt in attempts:
            with pytest.raises(PermissionError):
                attempt()
        with mmap.mmap(fd, memory.nbytes, prot=mmap.PROT_READ) as pages:
            assert bytes(pages[offer.location.offset :][:8]) == b"kvlslot1"
        os.close(fd)
        peer.send(Release(1, offer.epoch, "read"))
        receipt.wait(timeout=60)


def test_sealed_mode_shows_one_payload_only(sockets: str, path: str) -> None:
    with KVLink.serve("shm://name", directory=sockets, mode="sealed", inline=0) as producer:
        producer.put(Recipe("secret", seed=1).make())
        producer.put(Recipe("k", seed=2).make())
        with greeted(path) as peer:
            peer.send(Get(1, "k"))
            memory, (fd,) = peer.receive()
            assert isinstance(memory, Memory)
            seen = os.pread(fd, memory.nbytes, 0)
            assert b'\\"request_id\\":\\"k\\"' in seen
            assert b"secret" not in seen
            os.close(fd)


def test_reasons_with_lone_surrogates(producer: KVProducer, sockets: str) -> None:
    """They are escaped, as the text of an OSError of an odd file name must be."""
    reason, escaped = "no \udc80", "no \\udc80"
    with KVLink.connect("shm://name", timeout=60, directory=sockets) as reader:
        waiting = begin_get(reader, "k", timeout=60)
        until(lambda: producer.stats()["transfers"]["waiting"] == 1, "the get arrived")
        producer.fail("k", reason)
        expect(TransferFailed, lambda: waiting.wait(timeout=60), mentions=(escaped,))
        expect(TransferFailed, lambda: reader.get("k", timeout=60), mentions=(escaped,))
        receipt = producer.put(Recipe("aborted").make())
        reader.abort("aborted", reason)
        expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=(escaped,))
        receipt = producer.put(Recipe("rejected").make())
        begin_get(reader, "rejected", timeout=60).wait(timeout=60).reject(reason)
        expect(TransferFailed, lambda: receipt.wait(timeout=60), mentions=(escaped,))
        assert reader.stats()["sessions"] == 1
        assert producer.stats()["refused"] == {}


def test_a_text_that_is_no_utf_8_is_refused(producer: KVProducer, path: str) -> None:
    with greeted(path) as peer:
        peer.send(
            encode(Abort("k", "no XYZ")).replace(b"XYZ", "\udc80".encode(errors="surrogatepass"))
        )
        assert peer.is_dropped()
    assert producer.stats()["refused"] == {"bad message": 1}


def test_rejected_payload_is_reported(producer: KVProducer, path: str) -> None:
    receipt = producer.put(Recipe("k").make())
    with greeted(path) as peer:
        peer.send(Get(1, "k"))
        _, (fd,) = peer.receive()
        os.close(fd)
        offer, _ = peer.receive()
        assert isinstance(offer, Offer)
        peer.send(Release(1, offer.epoch, "rejected", "the bytes are bad"))
        error = expect(TransferFailed, lambda: receipt.wait(timeout=60))
        assert "the bytes are bad" in error.reason
    until_freed(producer)
