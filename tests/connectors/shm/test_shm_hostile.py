"""A hostile producer can do nothing to a reader but fail."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from omni_kvlink import IntegrityError, KVLink, PeerLostError, VersionError, WireError
from omni_kvlink.connectors.protocol.messages import Get, Location, Memory, Offer, own_hello
from omni_kvlink.connectors.shm.rendezvous import NamedListener
from omni_kvlink.memory.mapping import F_ADD_SEALS, SEALS
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import expect
from support.connectors.shm_hostile import Hostile
from support.connectors.shm_unauthorized import Raw

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def path(sockets: str) -> str:
    return os.path.join(sockets, "name.sock")


def arena(nbytes: int, *, seals: int = SEALS, head: bytes = b"", sparse: bool = False) -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sparse:
        os.ftruncate(fd, nbytes)
    elif nbytes:
        os.posix_fallocate(fd, 0, nbytes)
    os.pwrite(fd, head, 0)
    fcntl.fcntl(fd, F_ADD_SEALS, seals)
    return fd


def pass_arena(
    fd: int, *, claimed: int = 8192, location: Location | None = None, epoch: int = 3
) -> Callable[[Raw, Get], None]:
    def answer(peer: Raw, get: Get) -> None:
        peer.send(Memory(0, claimed), fd)
        os.close(fd)
        peer.send(Offer(get.get_id, epoch, location or Location(0, 0, 1000)))

    return answer


def _slot(epoch: int, nbytes: int, commit: int) -> bytes:
    return struct.pack("<8sQQQ", b"kvlslot1", epoch, nbytes, commit)


_PLAN = Recipe("k").make().plan(digests=False)
WHOLE = _PLAN.encode() + bytes(_PLAN.nbytes - _PLAN.header_nbytes)
"""A correct payload."""

HOSTILE: dict[str, tuple[Callable[[], Callable[[Raw, Get], None]], type[Exception]]] = {
    "unsealed": (lambda: pass_arena(arena(8192, seals=0)), WireError),
    "shrinkable": (lambda: pass_arena(arena(8192, seals=SEALS & ~0x2)), WireError),
    "writable": (lambda: pass_arena(arena(8192, seals=SEALS & ~0x10)), WireError),
    "sparse": (lambda: pass_arena(arena(1 << 26, sparse=True), claimed=1 << 26), WireError),
    "short": (lambda: pass_arena(arena(4096)), WireError),
    "long": (lambda: pass_arena(arena(16384)), WireError),
    "empty": (lambda: pass_arena(arena(0), claimed=0), WireError),
    "not a memfd": (lambda: pass_arena(os.open("/dev/zero", os.O_RDONLY)), WireError),
    "a directory": (lambda: pass_arena(os.open("/", os.O_RDONLY)), WireError),
    "no arena": (
        lambda: lambda peer, get: peer.send(Offer(get.get_id, 1, Location(5, 0, 100))),
        WireError,
    ),
    "no descriptor": (lambda: lambda peer, get: peer.send(Memory(0, 4096)), WireError),
    "beyond": (lambda: pass_arena(arena(8192), location=Location(0, 4096, 8192)), WireError),
    "far beyond": (lambda: pass_arena(arena(8192), location=Location(0, 2**52, 100)), WireError),
    "huge": (lambda: pass_arena(arena(8192), location=Location(0, 0, 2**53)), WireError),
    "crooked": (lambda: pass_arena(arena(8192), location=Location(0, 8, 100)), WireError),
    "no slot": (lambda: pass_arena(arena(8192)), IntegrityError),
    "not committed": (lambda: pass_arena(arena(8192, head=_slot(3, 1000, 0))), IntegrityError),
    "another epoch": (lambda: pass_arena(arena(8192, head=_slot(2, 1000, 2))), IntegrityError),
    "another size": (lambda: pass_arena(arena(8192, head=_slot(3, 999, 3))), IntegrityError),
    "no payload": (lambda: pass_arena(arena(8192, head=_slot(3, 1000, 3))), WireError),
    "inline of another size": (
        lambda: (
            lambda peer, get: peer.send(
                Offer(get.get_id, 1, Location(0, 0, len(WHOLE) + 256), inline=memoryview(WHOLE))
            )
        ),
        WireError,
    ),
    "inline garbage": (
        lambda: (
            lambda peer, get: peer.send(
                Offer(get.get_id, 1, Location(0, 0, 50), inline=memoryview(b"x" * 50))
            )
        ),
        WireError,
    ),
    "garbage": (lambda: lambda peer, get: peer.send(b"\xff" * 100), WireError),
    "too long": (lambda: lambda peer, get: peer.send(b"\xff" * 66_000), WireError),
    "a get": (lambda: lambda peer, get: peer.send(Get(1, "k")), WireError),
    "nothing": (lambda: lambda peer, get: peer.sock.shutdown(socket.SHUT_RDWR), PeerLostError),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_producer(sockets: str, path: str, what: str) -> None:
    make, error = HOSTILE[what]
    with (
        Hostile(path, make()),
        KVLink.connect("shm://name", timeout=60, directory=sockets) as reader,
    ):
        expect(error, lambda: reader.get("k", timeout=60))


def test_other_version_is_refused_by_the_reader(sockets: str, path: str) -> None:
    listener = NamedListener(path)
    listener.sock.settimeout(60)

    def answer() -> None:
        sock, _ = listener.sock.accept()
        with sock:
            Raw(sock).receive()
            Raw(sock).send(msgspec.structs.replace(own_hello(), versions=(7, 9)))
            Raw(sock).is_dropped()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(VersionError, match=r"7 to 9.*2 to 3"):
        KVLink.connect("shm://name", timeout=60, directory=sockets)
    thread.join()
    listener.close()
