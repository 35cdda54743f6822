"""`allow_uids=`: producers and consumers of different users, and all who are not let in."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import stat
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import ConnectorError, KVLink, SchemaError
from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.runtime.owner import peer_identity
from omni_kvlink.connectors.runtime.user_files import WakeupFifo
from omni_kvlink.connectors.shm.rendezvous import refusal, socket_path
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until
from support.connectors.shm_unauthorized import NOBODY, as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.usefixtures("leaves_nothing"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]
URL = "shm://name"
RECIPE = Recipe("k", tokens=300)
WAIT = 60.0
CLONE_NEWUSER = 0x10000000


@pytest.fixture
def shared() -> Iterator[str]:
    """A directory of root that the group of `NOBODY` may write to; empty at the end."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    with (  # imports what another user may not be able to read
        KVLink.serve(URL, directory=directory) as producer,
        KVLink.connect(URL, timeout=WAIT, directory=directory) as consumer,
    ):
        producer.put(RECIPE.make())
        consumer.get("k", timeout=WAIT).release()
    os.chown(directory, 0, NOBODY)
    os.chmod(directory, 0o2770)
    yield directory
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert not left


def error_of(url: str = URL, **options: Any) -> str:
    """What a consumer of these options is reason."""
    try:
        KVLink.connect(url, timeout=WAIT, **options)
    except ConnectorError as error:  # kept by nobody, nor its frames
        return str(error)
    raise AssertionError("it connected")


def test_nobody_reads_from_root(shared: str) -> None:
    def read() -> bool:
        with (
            KVLink.connect(URL, timeout=WAIT, directory=shared, allow_uids={0}) as consumer,
            consumer.get("k", timeout=WAIT) as received,
        ):
            return fingerprint(received) == fingerprint(RECIPE.make())

    with (
        KVLink.serve(URL, directory=shared, allow_uids=[NOBODY]) as producer,
        as_nobody(read) as is_exact,
    ):
        receipt = producer.put(RECIPE.make())
        assert is_exact()
        receipt.wait(timeout=WAIT)
        assert producer.stats()["refused"] == {}


def test_root_reads_from_nobody(shared: str) -> None:
    """The consumer waits for the producer, which another user's FIFO lets it wake."""

    def serve() -> bool:
        until(lambda: os.path.exists(f"{shared}/name.sock.wait"), "the consumer waits")
        with KVLink.serve(URL, directory=shared, allow_uids=[0]) as producer:
            producer.put(RECIPE.make()).wait(timeout=WAIT)
        return True

    with as_nobody(serve) as is_done:
        url = f"{URL}?allow_uids={NOBODY},7"
        with KVLink.connect(url, timeout=WAIT, directory=shared) as consumer:
            with consumer.get("k", timeout=WAIT) as received:
                assert fingerprint(received) == fingerprint(RECIPE.make())
            assert is_done()


def test_files_are_of_the_group_whatever_the_umask(shared: str) -> None:
    mask = os.umask(0o077)
    try:
        with (
            WakeupFifo(f"{shared}/name.sock", is_shared=True) as fifo,
            KVLink.serve("shm://other", directory=shared, allow_uids=[NOBODY]),
        ):
            fifo.arm()
            files = {name: os.stat(f"{shared}/{name}") for name in os.listdir(shared)}
    finally:
        os.umask(mask)
    modes = {name: stat.S_IMODE(status.st_mode) for name, status in files.items()}
    assert modes == {"name.sock.wait": 0o660, "other.sock": 0o660, "other.sock.lock": 0o600}
    assert {status.st_gid for status in files.values()} == {NOBODY}


@pytest.mark.parametrize("mode", ["socket", "closed"])
def test_a_reader_that_is_not_listed(shared: str, mode: str) -> None:
    """It is refused also where it reaches the socket; the text names both uids and the cure."""

    def connect() -> bool:
        reason = error_of(directory=shared, allow_uids=[0])
        return (
            f"uid {NOBODY} may not read from uid 0" in reason and f"allow_uids={NOBODY}" in reason
        )

    listed: Any = {"allow_uids": [NOBODY + 1]} if mode == "socket" else {}
    if mode == "closed":
        os.chmod(shared, 0o700)
    with KVLink.serve(URL, directory=shared, **listed) as producer:
        os.chmod(shared, 0o2770)
        os.chmod(f"{shared}/name.sock", 0o666)
        with as_nobody(connect) as is_refused:
            assert is_refused()
        until(lambda: producer.stats()["refused"] == {"other user": 1}, "it was counted")
        assert producer.stats()["readers"] == 0


def test_a_producer_that_is_not_listed(shared: str) -> None:
    reading, writing = os.pipe()

    def serve() -> bool:
        with KVLink.serve(URL, directory=shared, allow_uids=[0]):
            return os.read(reading, 1) == b"x"

    with open(reading, "rb"), open(writing, "wb") as stop, as_nobody(serve) as is_done:
        until(lambda: os.path.exists(f"{shared}/name.sock"), "it serves")
        try:
            reason = error_of(directory=shared, allow_uids=[7])
        finally:
            stop.write(b"x")
            stop.flush()
        assert is_done()
    assert f"uid {NOBODY} may not send to uid 0" in reason
    assert f"give uid 0 allow_uids={NOBODY}" in reason


def test_a_reader_outside_the_group(shared: str) -> None:
    os.chown(shared, 0, 7)
    os.chmod(shared, 0o2771)

    def connect() -> bool:
        reason = error_of(directory=shared, allow_uids=[0])
        return (
            f"name.sock is served by uid 0, and uid {NOBODY} may not connect to it" in reason
            and f"give uid 0 allow_uids={NOBODY}" in reason
            and "of the group of gid 7" in reason
        )

    with KVLink.serve(URL, directory=shared, allow_uids=[NOBODY]), as_nobody(connect) as is_told:
        assert is_told()


@pytest.mark.parametrize(
    ("owner", "mode", "text"),
    [
        (7, 0o2770, "must be a directory of uid 0, it is of uid 7"),
        (0, 0o2772, "nobody else can write to; its mode is 2772: chmod o-w"),
        (0, 0o0770, "has mode 770: chmod 2770 it"),
        (0, 0o3770, "is for every user"),
    ],
)
def test_a_directory_that_is_refused(shared: str, owner: int, mode: int, text: str) -> None:
    os.chown(shared, owner, NOBODY)
    os.chmod(shared, mode)
    with pytest.raises(ConnectorError, match=text) as caught:
        socket_path("name", shared, (NOBODY,))
    assert "allow_uids= and a directory= of mode 2770" in str(caught.value)


def test_a_directory_of_a_listed_user(shared: str) -> None:
    os.chown(shared, NOBODY, NOBODY)
    os.chmod(shared, 0o2770)
    assert socket_path("name", shared, (NOBODY,)) == f"{shared}/name.sock"
    with pytest.raises(ConnectorError, match=r"of uid 65534.*allow_uids="):
        socket_path("name", shared)


def test_no_directory_is_made_or_assumed(shared: str) -> None:
    """The default one is of one user alone, and whose group a new one is, is not known here."""
    with pytest.raises(SchemaError, match=r"allow_uids=\(7,\) needs directory="):
        KVLink.serve(URL, allow_uids=[7])
    with pytest.raises(ConnectorError, match="No such file"):
        KVLink.serve(URL, directory=f"{shared}/new", allow_uids=[7])


def test_forms() -> None:
    assert Options(allow_uids={7}).allow_uids == (7,)  # type: ignore[arg-type]
    assert set(Options(allow_uids=frozenset((8, 7))).allow_uids) == {7, 8}  # type: ignore[arg-type]
    assert Options.parse([("allow_uids", "7,1000")]) == {"allow_uids": (7, 1000)}
    for wrong in ("", "7,", "seven", "-1", "1;2"):
        with pytest.raises(SchemaError, match="allow_uids="):
            Options.parse([("allow_uids", wrong)])


def test_a_user_that_the_namespace_does_not_map() -> None:
    """It is refused even by another one of those, as which it appears; unless they are listed."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        assert peer_identity(here)[1] == 0
        assert refusal(here, (), "read from") == ""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
                    status = 77
                elif (os.geteuid(), peer_identity(here)[1]) == (NOBODY, NOBODY):
                    text = refusal(here, (), "read from")
                    is_told = f"uid {NOBODY}, as which its user namespace shows every" in text
                    status = 0 if is_told and not refusal(here, (NOBODY,), "read from") else 2
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 77:
        pytest.skip("no user namespaces here")
    assert status == 0
