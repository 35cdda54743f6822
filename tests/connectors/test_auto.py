"""`auto://`: the fastest transport is chosen for a proved reason, and behaves like itself."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from omni_kvlink import (
    ClosedError,
    ConnectorError,
    KVLink,
    KVLinkError,
    PeerLostError,
    TransferTimeout,
)
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.auto import AutoConsumer
from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.keys import generate, user_key_path, user_secret
from omni_kvlink.connectors.protocol.messages import encode, own_hello
from omni_kvlink.testing import delivery_checks, ending_checks
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.conformance import Check, run_check
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import Rig, expect, until
from support.connectors.zmq_addresses import free_port, secure_as_user
from support.faults.peer_commands import start_peer
from support.link.link_checks import ALL_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("zmq_started", "home", "leaves_nothing")
HAS_UCX = ucx.unavailable() is None
TRANSPORTS = [
    "shm",
    pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="no ucxx")),
    "zmq",
]
TRUSTED = "&trusted_network=1"
_numbers = itertools.count()


def fresh_url() -> str:
    return f"auto://auto-{os.getpid()}-{next(_numbers)}?tcp=127.0.0.1:{free_port()}{TRUSTED}"


def elsewhere(transport: str, folder: Path) -> dict[str, str]:
    """Return the environment of a reader that has only this transport to the producer."""
    env = dict(os.environ)
    if transport == "shm":
        return env
    if transport == "zmq":  # nor is UCX installed there
        (folder / "ucxx.py").write_text("raise ImportError('it is not installed')\n")
        env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    user_secret()
    (folder / "kvlink").mkdir(mode=0o700)
    shutil.copy(user_key_path(), folder / "kvlink")  # another directory of sockets, the same user
    return {**env, "XDG_RUNTIME_DIR": str(folder)}


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A directory with room for a Unix socket's name; pytest's own have long paths."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def home() -> Iterator[None]:
    """The directory in which this process and its children look for sockets."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def process(home: None, transport: str) -> Iterator[ProcessPeer]:
    """A reader's process that has this transport only."""
    with short_folder() as folder:
        peer = ProcessPeer(elsewhere(transport, folder))
        yield peer
        peer.close()


QUICK = (delivery_checks.__name__, ending_checks.__name__)
CHECKS = [
    pytest.param(check, id=check.__name__[6:])
    if check.__module__ in QUICK
    else pytest.param(check, id=check.__name__[6:], marks=pytest.mark.slow)
    for check in ALL_CHECKS
]
"""Those of each transport itself are run in full; here, who connects to whom and who closes."""


@pytest.mark.parametrize("check", CHECKS)
def test_connector(check: Check, process: ProcessPeer) -> None:
    run_check(check, Rig(fresh_url, {}, process))


def test_the_fastest_transport_is_chosen(process: ProcessPeer, transport: str) -> None:
    rig = Rig(fresh_url, {}, process)
    producer, reader = rig.serve(), rig.connect()
    producer.put(Recipe("k").make())
    assert reader.call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
    stats = reader.call("stats")
    assert stats["transport"] == transport
    assert ("share a kernel" in stats["why"]) == (transport == "shm")
    assert ("no shm: nobody serves" in stats["why"]) == (transport != "shm")
    assert ("no ucx" in stats["why"]) == (transport == "zmq")
    rig.close()


@pytest.fixture
def far() -> Iterator[ProcessPeer]:
    with short_folder() as folder:
        peer = ProcessPeer(elsewhere("zmq", folder))
        yield peer
        peer.close()


def test_near_and_far_readers_of_one_payload(far: ProcessPeer) -> None:
    """The bytes are in one place, and each reader gets them by its own transport."""
    rig = Rig(fresh_url, {}, far)
    producer, near, distant = rig.serve(), rig.connect_here(), rig.connect()
    receipt = producer.put(Recipe("k").make(), readers=2)
    with near.get("k", timeout=60, verify="full"):
        pass
    assert not receipt.done
    assert distant.call("get", key="k", timeout=60, verify="full") == fingerprint(
        Recipe("k").make()
    )
    receipt.wait(timeout=60)
    assert (near.stats()["transport"], distant.call("stats")["transport"]) == ("shm", "zmq")
    rig.close()


def test_a_producer_of_the_same_name_is_not_confused(caplog: pytest.LogCaptureFixture) -> None:
    """The producer behind the socket must be the one that answers over TCP."""
    url = fresh_url()
    name, tcp = url[7:].split("?tcp=")
    with (
        caplog.at_level(logging.INFO, "omni_kvlink"),
        KVLink.serve(f"shm://{name}") as namesake,
        KVLink.serve(f"auto://{name}-b?tcp={tcp}") as producer,
        KVLink.connect(url, timeout=60) as reader,
    ):
        namesake.put(Recipe("k", seed=1).make())
        producer.put(Recipe("k", seed=2).make())
        with reader.get("k", timeout=60) as data:
            assert fingerprint(data) == fingerprint(Recipe("k", seed=2).make())
        del data
        assert reader.stats()["transport"] in ("ucx", "zmq")
        assert "is another producer" in reader.stats()["why"]
    lines = [record.message for record in caplog.records if "goes by" in record.message]
    assert len(lines) == 1
    assert "is another producer" in lines[0]


def test_a_producer_that_comes_back(process: ProcessPeer, transport: str) -> None:
    rig = Rig(fresh_url, {}, process)
    producer, reader = rig.serve(), rig.connect()
    for seed in range(2):
        producer.put(Recipe("k", seed=seed).make())
        expected = fingerprint(Recipe("k", seed=seed).make())
        assert reader.call("get", key="k", timeout=60) == expected
        producer.close()
        producer = rig.serve()
    assert reader.call("stats")["transport"] == transport
    rig.close()


def test_without_tcp_it_is_shared_memory() -> None:
    url = f"auto://auto-{os.getpid()}-{next(_numbers)}"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as reader:
        receipt = producer.put(Recipe("k").make())
        with reader.get("k", timeout=60):
            pass
        receipt.wait(timeout=60)


def test_nobody_serves() -> None:
    with pytest.raises(TransferTimeout, match=r"auto://.*nobody serves"):
        KVLink.connect(fresh_url(), timeout=0.1)


@pytest.mark.skipif(not HAS_UCX, reason="no ucxx")
def test_closed_while_it_chooses() -> None:
    """The control connection is closed as well: ending ZMQ's context waits for every socket."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as producer:
        address = f"127.0.0.1:{free_port()}"
        secure_as_user(producer, server=True)
        producer.bind(f"tcp://{address}")
        reader = AutoConsumer("nobody", Options(tcp=address, trusted_network=True))
        ended: Future[None] = Future()

        def connect() -> None:
            try:
                reader.connect(PATIENCE)
            except KVLinkError as error:
                ended.set_exception(error)

        threading.Thread(target=connect, daemon=True).start()
        met, _ = producer.recv_multipart()
        producer.send_multipart([met, encode(own_hello("n", ("ucx",)))])
        other, _ = producer.recv_multipart()  # the UCX session gets no answer
        assert other != met
        closing = threading.Thread(target=reader.close, daemon=True)
        closing.start()
        expect(ClosedError, lambda: ended.result(60))
        closing.join(60)
        assert not closing.is_alive()


@pytest.mark.skipif(not HAS_UCX, reason="no ucxx")
@pytest.mark.parametrize("whose", ["producer", "reader"])
def test_ucx_is_used_if_both_ends_trust_the_network(whose: str) -> None:
    url = fresh_url()
    urls = {
        end: url.replace(TRUSTED, "") if end == whose else url for end in ("producer", "reader")
    }
    with (
        short_folder() as folder,
        contextlib.closing(ProcessPeer(elsewhere("ucx", folder))) as peer,
        KVLink.serve(urls["producer"]) as producer,
    ):
        reader = RemoteLink(peer, "r")
        reader.call("connect", url=urls["reader"], timeout=60)
        producer.put(Recipe("k").make())
        assert reader.call("get", key="k", timeout=60) == fingerprint(Recipe("k").make())
        stats = reader.call("stats")
        reader.call("remove")
    assert (stats["transport"], "ucx" in stats) == ("zmq", False)
    cause = "does not serve ucx" if whose == "producer" else "pass trusted_network=True"
    assert cause in stats["why"]


def test_other_machines_need_keys(tmp_path: Path) -> None:
    for verb in (KVLink.serve, lambda url: KVLink.connect(url, timeout=1)):
        with pytest.raises(ConnectorError, match="keys"):
            verb("auto://a?tcp=10.1.2.3:7000")
    secret, _ = generate(str(tmp_path / "keys"), "a")
    with pytest.raises(ValueError, match="leave keys="):
        KVLink.serve("auto://a", keys=secret, peers=str(tmp_path))


def test_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link with keys is encrypted throughout, unless UCX was given a device."""
    for name in ("producer", "reader"):
        generate(str(tmp_path / "keys"), name)
    (tmp_path / "allowed").mkdir()
    keys = tmp_path / "keys"
    (keys / "reader.public").rename(tmp_path / "allowed" / "reader.public")
    monkeypatch.setattr(ucx, "unavailable", lambda: "it is not installed")
    url, other = fresh_url(), f"auto-{os.getpid()}-other"
    with (
        KVLink.serve(url, keys=str(keys / "producer.secret"), peers=str(tmp_path / "allowed")) as a,
        KVLink.connect(
            url.replace(url[7:].split("?")[0], other),
            timeout=60,
            keys=str(keys / "reader.secret"),
            peers=str(keys / "producer.public"),
        ) as b,
    ):
        a.put(Recipe("k").make())
        with b.get("k", timeout=60):
            assert b.stats()["transport"] == "zmq"


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_closed_consumer_leaves_no_descriptor(sockets: str) -> None:
    """Also where the cyclic garbage collector is off, as servers have it."""
    with KVLink.serve(fresh_url(), directory=sockets, quota=8 << 20) as producer:

        def receive() -> None:
            producer.put(Recipe("k").make())
            url = producer.url + TRUSTED
            with KVLink.connect(url, timeout=PATIENCE, directory=sockets, quota=8 << 20) as reader:
                reader.get("k", timeout=PATIENCE).release()

        receive()
        gc.collect()
        gc.disable()
        try:
            until(lambda: not any(one["readers"] for one in producer.stats()["listeners"]), "gone")
            before = count_descriptors()
            receive()
            until(lambda: count_descriptors() <= before, "its descriptors are closed", PATIENCE)
        finally:
            gc.enable()


def count_eventfds() -> int:
    """Of this process; a consumer has one, from `connect` until it is deleted."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            found += "eventfd" in os.readlink(f"/proc/self/fd/{number}")
    return found


def test_a_consumer_that_cannot_reconnect_leaves_no_descriptor(sockets: str) -> None:
    """Its errors make no reference cycle, which the collector would have to find."""
    peer = start_peer()
    producer = RemoteLink(peer, "producer")
    gc.collect()
    gc.disable()
    try:
        before = count_eventfds()
        url = f"auto://{next(_numbers)}?tcp=127.0.0.1:{free_port()}"
        producer.call("serve", url=url, directory=sockets)
        be_lost(url, sockets, peer)
        until(lambda: count_eventfds() == before, "its descriptor is closed", PATIENCE)
    finally:
        gc.enable()
        peer.close()
        for left in Path(sockets).iterdir():  # the killed producer's
            left.unlink()


def be_lost(url: str, sockets: str, producer: ProcessPeer) -> None:
    """Kill the producer while a `get` waits."""
    with KVLink.connect(url, timeout=PATIENCE, directory=sockets) as reader:

        def kill() -> None:
            until(lambda: reader.stats()["waiting"] == 1, "it waits")
            producer.process.kill()

        killing = threading.Thread(target=kill)
        killing.start()
        with contextlib.suppress(PeerLostError):
            reader.get("never", timeout=PATIENCE)
            pytest.fail("there is no such payload")
        killing.join()
