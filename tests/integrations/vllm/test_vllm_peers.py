"""Peers that join, leave, die and come back while the engine runs; no request names its own."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import KVLink, SchemaError, TransferTimeout
from omni_kvlink.integrations.vllm.peers import AllowedPeers, PeerPattern, Peers
from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("entry", "yes", "no"),
    [
        (
            "shm://prefill-0",
            ["shm://prefill-0"],
            ["shm://prefill-00", "shm://prefill-0?mode=sealed", "SHM://prefill-0", "shm://prefill"],
        ),
        (
            "shm://prefill-*",
            ["shm://prefill-0", "shm://prefill-a_b-C"],
            [
                "shm://prefill-",
                "shm://prefill-0?directory=/tmp",
                "shm://prefill-0/../p",
                "shm://prefill-0.1",
                "shm://prefill-0\n",
                "zmq+ipc://prefill-0",
                "shm://prefill-\u0661",
            ],
        ),
        ("shm://*", ["shm://p", "shm://7"], ["shm://a.b", "shm://a/b"]),
        (
            "zmq+tcp://10.0.0.*:7000",
            ["zmq+tcp://10.0.0.5:7000"],
            [
                "zmq+tcp://10.0.0.5:7001",
                "zmq+tcp://10.0.0.evil:7000",
                "zmq+tcp://10.0.0.5.6:7000",
                "zmq+tcp://10.0.0.5:1@host:7000",
                "zmq+tcp://10a0b0.5:7000",
            ],
        ),
        ("zmq+tcp://10.0.0.5:*", ["zmq+tcp://10.0.0.5:7001"], ["zmq+tcp://10.0.0.5:x"]),
        (
            "zmq+tcp://*.prefill.svc:7000",
            ["zmq+tcp://p-0.prefill.svc:7000"],
            ["zmq+tcp://a.b.prefill.svc:7000", "zmq+tcp://.prefill.svc:7000"],
        ),
        (
            "zmq+tcp://[fd00::*]:7000",
            ["zmq+tcp://[fd00::1]:7000"],
            ["zmq+tcp://[fd00::1:2]:7000"],
        ),
        (
            "zmq+ipc:///run/kv/*.sock?quota=1",
            ["zmq+ipc:///run/kv/a.sock?quota=1"],
            ["zmq+ipc:///run/kv/a.sock", "zmq+ipc:///run/kv/../a.sock?quota=1"],
        ),
    ],
)
def test_a_pattern(entry: str, yes: list[str], no: list[str]) -> None:
    pattern = PeerPattern(entry)
    assert all(pattern.matches(url) for url in yes)
    assert not [url for url in no if pattern.matches(url)]


@pytest.mark.parametrize("entry", ["", "*", "prefill-*", "*://p", "s*m://p", "shm://p?mode=*", 7])
def test_no_pattern(entry: str) -> None:
    with pytest.raises(SchemaError, match="is neither a URL, such as shm://prefill-0"):
        PeerPattern(entry)


def test_patterns_have_no_default() -> None:
    assert AllowedPeers(["shm://a-*", "shm://b", "shm://c"]).default() == "shm://b"
    with pytest.raises(SchemaError, match=r"only patterns \(shm://a-\*\): pass on all"):
        AllowedPeers(["shm://a-*"]).default()


def replace(path: Path, *lines: str) -> None:
    """Write a file as its owner should: whole, under another name, and then renamed."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines))
    os.replace(fresh, path)


def test_the_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    replace(path, "# prefill engines", "", "shm://a", "  shm://b-* ")
    peers = AllowedPeers(["shm://fixed-*"], str(path))
    urls = ["shm://fixed-1", "shm://a", "shm://b-1", "shm://c"]
    assert [peers.allow(url) for url in urls] == [True, True, True, False]
    assert peers.default() == "shm://a"
    replace(path, "shm://c")
    assert [peers.allow(url) for url in urls] == [True, False, False, True]
    assert str(peers) == "shm://fixed-*, shm://c"


def test_a_file_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start an error; later its last entries stay, and each change is logged once."""
    path = tmp_path / "peers"
    with pytest.raises(SchemaError, match=r"peers_file .*peers cannot be read"):
        AllowedPeers([], str(path))
    replace(path, "shm://a")
    peers = AllowedPeers([], str(path))
    caplog.set_level(logging.WARNING)
    for lines, text in (["b"], "'b' is neither a URL"), (None, "No such file"):
        caplog.clear()
        if lines is None:
            path.unlink()
        else:
            replace(path, *lines)
        assert [peers.allow("shm://a") for _ in range(3)] == [True] * 3
        (message,) = [record.getMessage() for record in caplog.records]
        assert text in message
    replace(path, "shm://b")
    assert [peers.allow(url) for url in ("shm://a", "shm://b")] == [False, True]


@pytest.fixture
def peers(sockets: str, tmp_path: Path, leaves_nothing: None) -> Iterator[Peers]:
    replace(tmp_path / "peers", "shm://listed")
    file = str(tmp_path / "peers")
    peers = Peers(["shm://engine-*"], {"directory": sockets}, file=file)
    yield peers
    peers.close()


def test_no_address_of_a_request_alone(peers: Peers) -> None:
    for url in ("shm://stranger", "shm://engine-1?directory=/tmp", "zmq+tcp://10.0.0.1:7000"):
        with pytest.raises(SchemaError, match="is not one of this engine's peers: shm://engine-"):
            peers.link(url, timeout=0.0)
    for number in range(20):  # allowed, and not there: nothing of them is kept
        with pytest.raises(TransferTimeout):
            peers.link(f"shm://engine-{number}", timeout=0.0)
    # What is kept of peers that were never there costs memory, and shows nowhere.
    assert not peers._links


def test_a_peer_leaves(peers: Peers, sockets: str, tmp_path: Path) -> None:
    """Its link is closed when no load uses it any more, and no request may name it."""
    with (
        KVLink.serve("shm://listed", directory=sockets),
        KVLink.serve("shm://engine-1", directory=sockets),
    ):
        left = peers.link("shm://listed", timeout=60)
        stays = peers.link("shm://engine-1", timeout=60)
        replace(tmp_path / "peers")
        with pytest.raises(SchemaError, match="is not one of this engine's peers"):
            peers.link("shm://listed", timeout=60)
        peers.close_unused({"shm://listed"})
        assert left.is_connected
        peers.close_unused(())
        assert left.stats()["closed"]
        assert peers.link("shm://engine-1", timeout=60) is stays
        replace(tmp_path / "peers", "shm://listed")
        assert peers.link("shm://listed", timeout=60).is_connected


def test_a_peer_dies_and_comes_back(peers: Peers, sockets: str) -> None:
    url = "shm://engine-1"
    with KVLink.serve(url, directory=sockets):
        first = peers.link(url, timeout=60)
        peers.close_unused(())
        assert peers.is_connected(url)
        assert not peers.is_connected("shm://engine-2")
    until(lambda: not first.is_connected, "its end was noticed")
    assert not peers.is_connected(url)
    peers.close_unused({url})
    assert not first.stats()["closed"]
    peers.close_unused(())
    assert first.stats()["closed"]
    with KVLink.serve(url, directory=sockets):
        assert peers.link(url, timeout=60).is_connected
