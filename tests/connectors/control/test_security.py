"""Keys that are right, wrong, missing or not allowed, and links without keys."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import ConnectorError, KVLink, KVProducer, TransferTimeout
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.testing.caches import Recipe, fingerprint, sized
from omni_kvlink.testing.rig import until
from support.connectors.key_files import KeyFiles
from support.connectors.zmq_addresses import free_port, fresh_url
from support.faults.harness import expect_reason

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture
def key_files(tmp_path: Path) -> KeyFiles:
    return KeyFiles(tmp_path)


@pytest.fixture
def producer(key_files: KeyFiles, sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve(fresh_url("tcp", sockets), **key_files.producer_options) as link:
        yield link


def refusals(link: KVProducer) -> int:
    refused: dict[str, int] = link.stats()["refused"]
    return sum(refused.values())


def test_right_keys(producer: KVProducer, key_files: KeyFiles) -> None:
    data = sized("k", 3 << 20).make()
    with KVLink.connect(producer.url, timeout=60, **key_files.consumer_options()) as reader:
        receipt = producer.put(data)
        with reader.get("k", timeout=60, verify="full") as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        receipt.wait(timeout=60)
    assert producer.stats()["refused"] == {}


@pytest.mark.parametrize("content", [b"", b"no key", b"~" * 40, b"\xff" * 40, None])
def test_a_file_without_a_key_locks_nobody_out(
    key_files: KeyFiles, sockets: str, content: bytes | None
) -> None:
    """The producer names it; who has a key is admitted."""
    bad = key_files.allowed / "bad.public"
    if content is None:
        bad.mkdir()
    else:
        bad.write_bytes(content)
    url = f"zmq+ipc://{sockets}/s"
    with pytest.warns(RuntimeWarning, match=r"bad\.public.*the other keys of peers="):
        producer = KVLink.serve(url, **key_files.producer_options)
    with producer, KVLink.connect(url, timeout=60, **key_files.consumer_options()) as reader:
        producer.put(Recipe("k").make())
        with reader.get("k", timeout=60) as data:
            assert fingerprint(data) == fingerprint(Recipe("k").make())
        assert producer.stats()["refused"] == {}


def test_a_key_that_is_allowed_later(producer: KVProducer, key_files: KeyFiles) -> None:
    how = key_files.consumer_options("unknown")
    with pytest.raises(ConnectorError, match="peers= directory"):
        KVLink.connect(producer.url, timeout=60, **how)
    assert producer.stats()["refused"]["key"] == 1
    assert producer.stats()["readers"] == 0
    shutil.copy(key_files.key("unknown.public"), key_files.allowed)
    KVLink.connect(producer.url, timeout=60, **how).close()


def expect_handshake_error(url: str, options: dict[str, Any]) -> None:
    def connect(timeout: float) -> None:
        KVLink.connect(url, timeout=timeout, **options)

    expect_reason(TransferTimeout, "keys= and peers=", connect)


@pytest.mark.parametrize("how", ["no keys", "wrong producer"])
def test_handshakes_that_fail(producer: KVProducer, key_files: KeyFiles, how: str) -> None:
    """Plain text, or the key of another producer, changes only a counter."""
    options = key_files.consumer_options(producer="unknown") if how == "wrong producer" else {}
    with KVLink.connect(producer.url, timeout=60, **key_files.consumer_options()) as reader:
        expect_handshake_error(producer.url, options)
        until(lambda: refusals(producer) > 0, "it was counted")
        assert producer.stats()["readers"] == 1
        producer.put(Recipe("k").make())
        with reader.get("k", timeout=60):
            pass


def test_a_producer_without_keys(key_files: KeyFiles, sockets: str) -> None:
    """A reader with keys does not connect in plain text."""
    with KVLink.serve(fresh_url("tcp", sockets), insecure=True) as producer:
        expect_handshake_error(producer.url, key_files.consumer_options())


def test_a_network_needs_keys(key_files: KeyFiles) -> None:
    """Neither end uses a network in plain text, unless `insecure=True` is given."""
    url = f"zmq+tcp://{os.uname().nodename}.invalid:{free_port()}"
    with pytest.raises(ConnectorError, match=r"keygen.*insecure=True"):
        KVLink.serve(url)
    with pytest.raises(ConnectorError, match=r"keygen.*insecure=True"):
        KVLink.connect(url, timeout=0.1)
    with pytest.warns(RuntimeWarning, match="INSECURE"), pytest.raises(TransferTimeout):
        KVLink.connect(url, timeout=0.1, insecure=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TransferTimeout):
            KVLink.connect(url, timeout=0.1, **key_files.consumer_options())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]"])
def test_loopback_needs_no_keys(address: str) -> None:
    from omni_kvlink.connectors.control.address import ControlAddress

    assert ControlAddress("tcp", f"{address}:1").is_local


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "example.org", "[fe80::1]", "*"])
def test_anything_else_is_a_network(address: str) -> None:
    from omni_kvlink.connectors.control.address import ControlAddress

    assert not ControlAddress("tcp", f"{address}:1").is_local


@pytest.mark.parametrize("missing", ["keys", "peers"])
def test_keys_and_peers_go_together(key_files: KeyFiles, sockets: str, missing: str) -> None:
    how = {**key_files.producer_options, missing: ""}
    with pytest.raises(ConnectorError, match="go together"):
        KVLink.serve(fresh_url("tcp", sockets), **how)


def test_a_secret_key_that_others_can_read_is_refused(key_files: KeyFiles, sockets: str) -> None:
    path = key_files.key("producer.secret")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o640)
    with pytest.raises(ConnectorError, match="chmod 600"):
        KVLink.serve(fresh_url("tcp", sockets), **key_files.producer_options)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40, b"x" * 5000])
def test_files_without_a_key(key_files: KeyFiles, sockets: str, content: bytes) -> None:
    Path(key_files.key("producer.secret")).write_bytes(content)
    with pytest.raises(ConnectorError, match="holds no key"):
        KVLink.serve(fresh_url("tcp", sockets), **key_files.producer_options)


def test_no_key_is_overwritten(key_files: KeyFiles) -> None:
    before = Path(key_files.key("reader.secret")).read_bytes()
    with pytest.raises(ConnectorError, match="exists"):
        generate(str(key_files.directory), "reader")
    assert Path(key_files.key("reader.secret")).read_bytes() == before
    for name in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="letters"):
            generate(str(key_files.directory), name)


@pytest.mark.parametrize(
    "url",
    ["zmq+tcp://nobody", "zmq+tcp://:1", "zmq+tcp://h:70000", "zmq+tcp://h:x", "zmq+ipc://x.sock"],
)
def test_malformed_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        KVLink.serve(url)


def test_paths_are_private(sockets: str) -> None:
    os.chmod(sockets, 0o755)
    with pytest.raises(ConnectorError, match="nobody else can enter"):
        KVLink.serve(f"zmq+ipc://{sockets}/a.sock")
    os.chmod(sockets, 0o700)
    with KVLink.serve(f"zmq+ipc://{sockets}/a.sock"):
        assert stat.S_IMODE(os.stat(f"{sockets}/a.sock").st_mode) == 0o600


def test_any_port() -> None:
    with KVLink.serve("zmq+tcp://127.0.0.1:0?quota=8388608") as producer:
        assert ":0?" not in producer.url
        KVLink.connect(producer.url, timeout=60).close()
