"""Who may come in: keys that are right, wrong, missing or not on the list, and none at all."""

from __future__ import annotations

import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from key_fixtures import Safe
from zmq_fixtures import free_port, fresh_url

from omni_kvlink import ConnectorError, KVLink, TransferTimeout
from omni_kvlink.connectors.control.keys import generate
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.memory_checks import sized
from omni_kvlink.testing.rig import until

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")


@pytest.fixture
def safe(tmp_path: Path) -> Safe:
    return Safe(tmp_path)


@pytest.fixture
def producer(safe: Safe, sockets: str) -> Iterator[KVLink]:
    with KVLink.serve(fresh_url("tcp", sockets), **safe.serving) as link:
        yield link


def refusals(link: KVLink) -> int:
    refused: dict[str, int] = link.stats()["refused"]
    return sum(refused.values())


def test_right_keys(producer: KVLink, safe: Safe) -> None:
    data = sized("k", 3 << 20).make()
    with KVLink.connect(producer.url, timeout=5, **safe.reading()) as reader:
        receipt = producer.put(data)
        with reader.get("k", timeout=5, verify="full") as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        receipt.wait(timeout=5)
    assert producer.stats()["refused"] == {}


def test_not_on_the_list_and_then_on_it(producer: KVLink, safe: Safe) -> None:
    how = safe.reading("stranger")
    with pytest.raises(ConnectorError, match="peers= directory"):
        KVLink.connect(producer.url, timeout=5, **how)
    assert producer.stats()["refused"]["key"] == 1
    assert producer.stats()["readers"] == 0
    shutil.copy(safe.key("stranger.public"), safe.guests)
    KVLink.connect(producer.url, timeout=5, **how).close()


@pytest.mark.parametrize("how", ["no keys", "wrong producer"])
def test_handshakes_that_fail(producer: KVLink, safe: Safe, how: str) -> None:
    """Plain text, or a key that is not this producer's: nothing but a counter changes."""
    options = safe.reading(whom="stranger") if how == "wrong producer" else {}
    with KVLink.connect(producer.url, timeout=5, **safe.reading()) as reader:
        with pytest.raises(TransferTimeout, match="check keys= and peers="):
            KVLink.connect(producer.url, timeout=0.5, **options)
        until(lambda: refusals(producer) > 0, "it was counted")
        assert producer.stats()["readers"] == 1
        producer.put(Recipe("k").make())
        with reader.get("k", timeout=5):
            pass


def test_a_producer_without_keys(safe: Safe, sockets: str) -> None:
    """A reader that has keys does not talk in plain text."""
    with (
        KVLink.serve(fresh_url("tcp", sockets)) as producer,
        pytest.raises(TransferTimeout, match="check keys= and peers="),
    ):
        KVLink.connect(producer.url, timeout=0.5, **safe.reading())


def test_a_network_needs_keys(safe: Safe) -> None:
    """Neither end speaks to other machines in plain text, unless somebody insists."""
    url = f"zmq+tcp://{os.uname().nodename}.invalid:{free_port()}"
    for end in (lambda: KVLink.serve(url), lambda: KVLink.connect(url, timeout=0.1)):
        with pytest.raises(ConnectorError, match=r"keygen.*insecure=True"):
            end()
    with pytest.warns(RuntimeWarning, match="INSECURE"), pytest.raises(TransferTimeout):
        KVLink.connect(url, timeout=0.1, insecure=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TransferTimeout):
            KVLink.connect(url, timeout=0.1, **safe.reading())


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "localhost", "[::1]"])
def test_loopback_needs_none(address: str) -> None:
    from omni_kvlink.connectors.control.address import ControlAddress

    assert ControlAddress("tcp", f"{address}:1").is_local


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.1", "example.org", "[fe80::1]", "*"])
def test_anything_else_is_a_network(address: str) -> None:
    from omni_kvlink.connectors.control.address import ControlAddress

    assert not ControlAddress("tcp", f"{address}:1").is_local


@pytest.mark.parametrize("missing", ["keys", "peers"])
def test_one_key_alone(safe: Safe, sockets: str, missing: str) -> None:
    how = {**safe.serving, missing: ""}
    with pytest.raises(ConnectorError, match="go together"):
        KVLink.serve(fresh_url("tcp", sockets), **how)


def test_secret_keys_are_secret(safe: Safe, sockets: str) -> None:
    path = safe.key("producer.secret")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.chmod(path, 0o640)
    with pytest.raises(ConnectorError, match="chmod 600"):
        KVLink.serve(fresh_url("tcp", sockets), **safe.serving)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"~" * 40, b"x" * 5000])
def test_files_that_hold_no_key(safe: Safe, sockets: str, content: bytes) -> None:
    Path(safe.key("producer.secret")).write_bytes(content)
    with pytest.raises(ConnectorError, match="holds no key"):
        KVLink.serve(fresh_url("tcp", sockets), **safe.serving)


def test_no_key_is_overwritten(safe: Safe) -> None:
    before = Path(safe.key("reader.secret")).read_bytes()
    with pytest.raises(ConnectorError, match="exists"):
        generate(str(safe.directory), "reader")
    assert Path(safe.key("reader.secret")).read_bytes() == before
    for name in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="letters"):
            generate(str(safe.directory), name)


@pytest.mark.parametrize(
    "url",
    ["zmq+tcp://nobody", "zmq+tcp://:1", "zmq+tcp://h:70000", "zmq+tcp://h:x", "zmq+ipc://x.sock"],
)
def test_no_address(url: str) -> None:
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
        KVLink.connect(producer.url, timeout=5).close()
