"""Without `keys=`, a link on loopback is for the processes of one user: other users get nothing."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from omni_kvlink import ConnectorError, KVLink, KVLinkError, KVProducer, TransferTimeout
from omni_kvlink.connectors.control.keys import user_key_path, user_secret
from omni_kvlink.connectors.protocol.messages import Abort, Get, encode, own_hello
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until
from support import FOLDER
from support.connectors.zmq_addresses import free_port
from support.faults.harness import expect_reason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
PROGRAM = FOLDER / "connectors" / "zmq_attacker.py"
ATTACK = [encode(own_hello()), encode(Get(1, "k")), encode(Abort("k", "by another user"))]


class Attacker:
    """The program, running as another user where that is possible."""

    def __init__(self, action: str, port: str, *messages: bytes, server_key: str = ""):
        given = {
            "action": action,
            "port": port,
            "messages": [message.hex() for message in messages],
            "server_key": server_key,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        assert self.next() == "ready"

    def next(self) -> str:
        """Wait for the next line that it prints: what it is sent."""
        return self._output.readline().rstrip()

    def received(self) -> list[str]:
        """End the attack; return what it was sent meanwhile."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = self._output.read().splitlines()
        assert self._process.wait(timeout=60) == 0
        return found

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            self._process.kill()


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


def server_key() -> str:
    return zmq.curve_public(user_secret()).decode()


@pytest.fixture(params=["zmq+tcp://127.0.0.1:0", "auto"])
def producer(request: pytest.FixtureRequest) -> Iterator[KVProducer]:
    url = request.param
    if url == "auto":
        url = f"auto://loopback-{os.urandom(4).hex()}?tcp=127.0.0.1:{free_port()}"
    with KVLink.serve(url, quota=8 << 20) as link:
        yield link


def over_tcp(link: KVProducer) -> dict[str, Any]:
    """Return the state of the listener that others reach over TCP."""
    stats = link.stats()
    found: dict[str, Any] = stats.get("listeners", [stats])[-1]
    return found


@pytest.mark.parametrize(("how", "reason"), [("plain", "no greeting"), ("own key", "key")])
def test_another_user_reads_and_aborts_nothing(producer: KVProducer, how: str, reason: str) -> None:
    """Neither in plain text nor with a key of its own, even if it knows the producer's."""
    tcp = producer.url.replace("zmq+tcp://", "tcp=").partition("tcp=")[2]
    receipt = producer.put(Recipe("k").make())
    key = "" if how == "plain" else server_key()

    def is_refused() -> bool:
        return reason in over_tcp(producer)["refused"]

    with Attacker("client", port_of(tcp), *ATTACK, server_key=key) as attacker:
        until(lambda: is_refused() or receipt.done, "the attack had an effect")
        assert is_refused(), receipt.state
        assert attacker.received() == []
    assert over_tcp(producer)["readers"] == 0
    with KVLink.connect(producer.url, timeout=60, quota=8 << 20) as reader:
        with reader.get("k", timeout=60, verify="full") as found:
            assert fingerprint(found) == fingerprint(Recipe("k").make())
        del found
        receipt.wait(timeout=60)


@pytest.mark.parametrize("how", ["plain", "own key"])
def test_another_user_cannot_answer_as_the_producer(how: str) -> None:
    """Who listens at the port first is told nothing; the producer that comes later is reached."""
    port = free_port()
    url = f"zmq+tcp://127.0.0.1:{port}"
    key = "" if how == "plain" else server_key()
    with Attacker("server", str(port), encode(own_hello()), server_key=key) as attacker:

        def connect(timeout: float) -> None:
            KVLink.connect(url, timeout=timeout)

        error = expect_reason(TransferTimeout, "XDG_RUNTIME_DIR", connect)
        assert user_key_path() in str(error)
        assert attacker.received() == []


def test_what_insecure_means() -> None:
    """Both ends say so, and are then open to every user of the machine."""
    with pytest.warns(RuntimeWarning, match="other users of this machine"):
        producer = KVLink.serve("zmq+tcp://127.0.0.1:0", insecure=True)
    with producer:
        producer.put(Recipe("k").make())
        with Attacker("client", port_of(producer.url), *ATTACK) as attacker:
            until(lambda: producer.stats()["transfers"]["failed"] == 1, "it aborted the payload")
            assert attacker.next()  # its greeting's answer
        with pytest.warns(RuntimeWarning, match="INSECURE"):
            KVLink.connect(producer.url, timeout=60, insecure=True).close()

        def connect(timeout: float) -> None:
            KVLink.connect(producer.url, timeout=timeout)

        expect_reason(TransferTimeout, "insecure=True", connect)


def test_an_insecure_reader_is_told_that_the_producer_has_keys() -> None:
    with KVLink.serve("zmq+tcp://127.0.0.1:0") as producer:

        def connect(timeout: float) -> None:
            KVLink.connect(producer.url, timeout=timeout, insecure=True)

        expect_reason(TransferTimeout, "this side has none", connect)


def test_ends_that_see_different_directories(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names the directory and the cure."""
    with KVLink.serve("zmq+tcp://127.0.0.1:0") as producer:
        KVLink.connect(producer.url, timeout=60).close()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

        def connect(timeout: float) -> None:
            KVLink.connect(producer.url, timeout=timeout)

        error = expect_reason(TransferTimeout, "XDG_RUNTIME_DIR", connect)
        assert str(tmp_path) in str(error)
        assert "keys= and peers=" in str(error)
        until(lambda: sum(producer.stats()["refused"].values()) >= 1, "it was counted")


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_key_is_this_users_alone(runtime_directory: Path) -> None:
    with KVLink.serve("zmq+tcp://127.0.0.1:0"):
        found = runtime_directory / "kvlink"
        assert stat.S_IMODE(os.stat(found).st_mode) == 0o700
        assert os.listdir(found) == ["user.secret"]
        assert stat.S_IMODE(os.stat(found / "user.secret").st_mode) == 0o600
    before = (found / "user.secret").read_bytes()
    KVLink.serve("zmq+tcp://127.0.0.1:0").close()
    assert (found / "user.secret").read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(runtime_directory: Path, mode: int) -> None:
    user_secret()
    os.chmod(user_key_path(), mode)
    for verb in (KVLink.serve, lambda url: KVLink.connect(url, timeout=5)):
        with pytest.raises(ConnectorError, match="chmod 600"):
            verb(f"zmq+tcp://127.0.0.1:{free_port()}")


def test_a_directory_that_others_can_write_to_is_refused(runtime_directory: Path) -> None:
    (runtime_directory / "kvlink").mkdir()
    os.chmod(runtime_directory / "kvlink", 0o777)
    for verb in (KVLink.serve, lambda url: KVLink.connect(url, timeout=5)):
        with pytest.raises(ConnectorError, match="nobody else can write to"):
            verb(f"zmq+tcp://127.0.0.1:{free_port()}")
    assert os.listdir(runtime_directory / "kvlink") == []


def test_a_directory_that_cannot_be_made(runtime_directory: Path) -> None:
    """The error names the cure."""
    (runtime_directory / "kvlink").write_text("no directory")
    with pytest.raises(ConnectorError, match=r"XDG_RUNTIME_DIR.*keys= and peers="):
        KVLink.serve("zmq+tcp://127.0.0.1:0")


MAKE_KEY = """
import os, sys
from omni_kvlink.connectors.control.keys import user_secret
start, output = map(int, sys.argv[1:])
os.write(output, b"r")
os.read(start, 1)  # ends when the parent closes its end
os.write(output, user_secret())
"""


def test_processes_that_make_the_key_at_once_have_one(runtime_directory: Path) -> None:
    start, output = os.pipe(), os.pipe()
    inherited = (start[0], output[1])
    command = [sys.executable, "-c", MAKE_KEY, *map(str, inherited)]
    children = [subprocess.Popen(command, pass_fds=inherited) for _ in range(8)]
    for descriptor in inherited:
        os.close(descriptor)
    with os.fdopen(output[0], "rb") as file:
        assert file.read(8) == 8 * b"r"  # all are there
        os.close(start[1])
        assert file.read() == 8 * user_secret()
    assert [child.wait(60) for child in children] == [0] * 8
    assert os.listdir(runtime_directory / "kvlink") == ["user.secret"]


def test_a_key_that_another_process_makes_meanwhile(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower process takes the key of the faster one, between its look and its link."""
    link, faster = os.link, list[bytes]()

    def interrupted(source: str, target: str) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        faster.append(user_secret())
        link(source, target)

    monkeypatch.setattr(os, "link", interrupted)
    assert user_secret() == faster[0]
    assert os.listdir(runtime_directory / "kvlink") == ["user.secret"]


def test_a_key_that_is_not_whole_has_no_name(
    runtime_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that fails while it writes the key leaves none behind."""

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConnectorError, match="No space left"):
        user_secret()
    assert os.listdir(runtime_directory / "kvlink") == []


def test_a_path_in_a_directory_of_others_is_not_connected_to(tmp_path: Path) -> None:
    """Whoever can make a socket there could answer as the producer."""
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConnectorError, match="nobody else can enter"):
        KVLink.connect(f"zmq+ipc://{tmp_path}/a.sock", timeout=0.1)


def test_many_readers_at_once(producer: KVProducer) -> None:
    """Handshakes of one user's readers are independent of each other."""
    ended: list[KVLinkError | None] = []

    def connect() -> None:
        error = None
        try:
            with contextlib.closing(KVLink.connect(producer.url, timeout=60)):
                pass
        except KVLinkError as problem:
            error = problem
        ended.append(error)

    threads = [threading.Thread(target=connect) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == [None] * 6
