"""How processes find each other: names, directories, stale and busy sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading

import pytest

from omni_kvlink import BusyError, ClosedError, ConnectorError, KVLink, KVProducer, SchemaError
from omni_kvlink.connectors.shm import rendezvous
from omni_kvlink.connectors.shm.rendezvous import NamedListener, socket_path
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import expect, until

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NOBODY = 65534


@pytest.fixture
def path(sockets: str) -> str:
    return os.path.join(sockets, "name.sock")


# Names


@pytest.mark.parametrize("name", ["..", "../x", "a/b", ".hidden", "x" * 49, "a b", "a\n", "ü"])
def test_names_are_plain_file_names(sockets: str, name: str) -> None:
    with pytest.raises(SchemaError, match="a name is"):
        KVLink.serve(f"shm://{name}", directory=sockets)


def test_directory_is_private(tmp_path: os.PathLike[str]) -> None:
    made = os.path.join(tmp_path, "made")
    socket_path("x", made)
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    os.chmod(made, 0o722)
    with pytest.raises(ConnectorError, match="nobody else can write"):
        socket_path("x", made)
    os.chmod(made, 0o700)
    os.symlink(made, os.path.join(tmp_path, "link"))
    with pytest.raises(ConnectorError, match="must be a directory"):
        socket_path("x", os.path.join(tmp_path, "link"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user(tmp_path: os.PathLike[str]) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(ConnectorError, match=f"uid {NOBODY}"):
        socket_path("x", str(tmp_path))


def test_too_long_a_path(sockets: str) -> None:
    with pytest.raises(SchemaError, match="too long"):
        socket_path("n", os.path.join(sockets, "d" * 90))
    assert os.listdir(sockets) == []


def test_live_name_is_busy(sockets: str, path: str) -> None:
    with KVLink.serve("shm://name", directory=sockets) as first:
        with pytest.raises(BusyError, match="another producer"):
            KVLink.serve("shm://name", directory=sockets)
        assert os.path.exists(path)
        assert not first.stats()["closed"]


def test_name_with_a_full_backlog_is_alive(path: str) -> None:
    """A producer that is too busy to accept is alive: its name cannot be served again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(10):
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        with pytest.raises(BusyError):
            NamedListener(path)
        for sock in waiting:
            sock.close()
    os.unlink(path)


def test_stale_socket_is_replaced(sockets: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(path)
    assert os.path.exists(path)
    with (
        KVLink.serve("shm://name", directory=sockets) as producer,
        KVLink.connect("shm://name", timeout=60, directory=sockets) as reader,
    ):
        producer.put(Recipe("k").make())
        with reader.get("k", timeout=60) as data:
            assert fingerprint(data) == fingerprint(Recipe("k").make())
        del data


def test_late_unlink_keeps_the_socket_of_a_successor(path: str) -> None:
    first = NamedListener(path)
    os.unlink(path)
    os.unlink(f"{path}.lock")
    second = NamedListener(path)
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_many_serve_one_name_at_once(sockets: str) -> None:
    served: list[KVProducer] = []
    refused: list[BaseException] = []

    def serve() -> None:
        try:
            served.append(KVLink.serve("shm://name", directory=sockets, quota=1 << 20))
        except BusyError as error:
            refused.append(error.with_traceback(None))

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(served), len(refused)) == (1, 7)
    served.pop().close()


def test_close_wakes_a_reconnection(sockets: str) -> None:
    producer = KVLink.serve("shm://name", directory=sockets)
    reader = KVLink.connect("shm://name", timeout=60, directory=sockets)
    producer.close()
    until(lambda: not reader.stats()["connected"], "the reader noticed")
    timer = threading.Timer(0.1, reader.close)
    timer.start()
    expect(ClosedError, lambda: reader.get("k", timeout=60))
    timer.join()


@pytest.mark.parametrize("timeout", [0.001, 0.9999999, 59.99999999, 60.0])
def test_every_timeout_of_a_connection_is_one_of_the_kernels(path: str, timeout: float) -> None:
    """A number of microseconds that is rounded up to a second is EDOM."""
    listener = NamedListener(path)
    # One attempt: what dials repeats it, and would hide an error of a single one.
    sock = rendezvous._try_dial(path, timeout)
    assert sock is not None
    sock.close()
    listener.close()
