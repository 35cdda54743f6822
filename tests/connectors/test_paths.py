"""The path of the bytes: what both ends tell of it, and that another than required is refused."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from omni_kvlink import ConnectorError, KVLink, SchemaError
from omni_kvlink.connectors import registry, ucx
from omni_kvlink.connectors.base import Backend
from omni_kvlink.connectors.control.keys import user_key_path, user_secret
from omni_kvlink.connectors.protocol.messages import Hello, decode, encode, own_hello
from omni_kvlink.connectors.protocol.path import SHM_PATH, LinkPath, path_refusal
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.testing.caches import Recipe, sized
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import expect, until
from support.connectors.zmq_addresses import free_port, fresh_url
from support.link.ends import session_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVProducer

pytestmark = [
    pytest.mark.usefixtures("zmq_started", "leaves_nothing"),
    pytest.mark.filterwarnings("ignore:.*INSECURE:RuntimeWarning"),
]
HAS_UCX = ucx.unavailable() is None
LONG = 2 << 20
"""Bytes that are fetched by lanes, if there are any."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def near() -> Iterator[ProcessPeer]:
    """A reader's process."""
    peer = ProcessPeer()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPeer]:
    """A reader's process that looks for sockets in another directory, of the same user."""
    folder = tmp_path_factory.mktemp("far")
    user_secret()
    (folder / "kvlink").mkdir(mode=0o700)
    shutil.copy(user_key_path(), folder / "kvlink")
    peer = ProcessPeer({**os.environ, "XDG_RUNTIME_DIR": str(folder)})
    yield peer
    peer.close()


def auto_url() -> str:
    return f"auto://path-{os.getpid()}-{next(_numbers)}?tcp=127.0.0.1:{free_port()}"


def refusals(producer: KVProducer) -> int:
    """Readers that were refused for their path."""
    stats = producer.stats()
    return sum(one["refused"].get("path", 0) for one in stats.get("listeners", [stats]))


def refused(producer: KVProducer, peer: ProcessPeer, **options: Any) -> str:
    """Connect a reader that is refused, once on each side; the error's text. Nothing was sent."""
    reader = RemoteLink(peer, f"{producer.url}#{next(_numbers)}")
    before, receipt = refusals(producer), producer.put(Recipe("k").make())
    call = {"url": producer.url, "timeout": PATIENCE, **options}
    error = expect(ConnectorError, reader.call, "connect", **call)
    until(lambda: refusals(producer) == before + 1, "the producer counts it")
    until(lambda: not producer.stats()["path"], "it is gone")
    assert (receipt.state, receipt.ledger.path) == ("committed", "")
    producer.abort("k", "the test has ended")
    return str(error)


PLAIN: dict[str, Any] = {"insecure": True}
TRUTHS: list[tuple[str, dict[str, Any], str]] = [
    ("shm", {}, "shm"),
    ("shm", {"mode": "sealed"}, "shm"),
    ("zmq+ipc", {}, "zmq+ipc"),
    ("zmq+tcp", PLAIN, "zmq+tcp"),
    ("zmq+tcp", {**PLAIN, "lanes": 2}, "zmq+tcp+lanes"),
    ("zmq+tcp", {"lanes": 0}, "zmq+tcp+curve"),
    pytest.param(  # type: ignore[list-item]
        *("ucx", {"trusted_network": True}, "ucx"),
        marks=pytest.mark.skipif(not HAS_UCX, reason="no ucxx"),
    ),
    ("auto", {}, "shm"),
]


@pytest.mark.parametrize(("scheme", "options", "name"), TRUTHS)
def test_the_truth(
    near: ProcessPeer, sockets: str, scheme: str, options: dict[str, Any], name: str
) -> None:
    options = {"directory": sockets, "inline": 0, **options}
    url = f"shm://path-{next(_numbers)}" if scheme == "shm" else auto_url()
    url = url if scheme in ("shm", "auto") else fresh_url(scheme.removeprefix("zmq+"), sockets)
    with KVLink.serve(url, **options) as producer:
        reader = RemoteLink(near, url)
        reader.call("connect", url=producer.url, timeout=PATIENCE, **options)
        for number in range(200):  # lanes open with the first long payload
            receipt = producer.put(sized(f"k{number}", LONG).make())
            path = reader.call("get_path", key=f"k{number}", timeout=PATIENCE)
            if path == receipt.ledger.path == name or not name.endswith("+lanes"):
                break
        receipt.wait(timeout=PATIENCE)
        until(lambda: len(producer.stats()["path"]) == 1, "the first connection of auto has ended")
        theirs, [mine] = reader.call("stats")["path"], producer.stats()["path"]
        assert path == receipt.ledger.path == name
        assert f" by {name}: " in str(receipt.ledger)
        for one in (theirs, mine):
            assert one["transport"] == name.partition("+curve")[0].partition("+lanes")[0]
            assert one["shared_kernel"] is (name in ("shm", "zmq+ipc"))
            assert one["encrypted"] is ("+curve" in name)
            assert one["rdma"] is False
            assert bool(one["lanes"]) is ("+lanes" in name)
        reader.call("remove")


def test_lanes_with_keys(near: ProcessPeer) -> None:
    pytest.importorskip("cryptography")
    with KVLink.serve("zmq+tcp://127.0.0.1:0", lanes=2) as producer:
        reader = RemoteLink(near, producer.url)
        reader.call("connect", url=producer.url, timeout=PATIENCE, lanes=2)
        for number in range(200):
            producer.put(sized(f"k{number}", LONG).make())
            path = reader.call("get_path", key=f"k{number}", timeout=PATIENCE)
            assert path in ("zmq+tcp+curve", "zmq+tcp+curve+lanes")
            if "lanes" in path:
                break
        reader.call("remove")


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
def test_a_payload_inside_its_offer(sockets: str, scheme: str) -> None:
    url = f"{scheme}://path-{next(_numbers)}"
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, timeout=PATIENCE, directory=sockets) as consumer,
    ):
        for nbytes, name in ((100, f"{scheme}+inline"), (LONG, scheme)):
            receipt = producer.put(sized("k", nbytes).make())
            received = consumer.get("k", timeout=PATIENCE)
            assert received.ledger.path == receipt.ledger.path == name
            received.release()
            receipt.wait(timeout=PATIENCE)


def test_near_and_far_readers(near: ProcessPeer, far: ProcessPeer) -> None:
    """A receipt names the path of each of its readers."""
    with KVLink.serve(auto_url()) as producer:
        receipt = producer.put(Recipe("k").make(), readers=2)
        for peer, name in ((near, "shm"), (far, "zmq+tcp+curve")):
            reader = RemoteLink(peer, f"{producer.url}#{name}")
            reader.call("connect", url=producer.url, timeout=PATIENCE)
            path = reader.call("get_path", key="k", timeout=PATIENCE)
            assert path.removesuffix("+inline") == name
        names = receipt.ledger.path.replace("+inline", "")
        assert names == "shm, zmq+tcp+curve"
        for peer in (near, far):
            peer.call("remove", link=f"{producer.url}#{'shm' if peer is near else 'zmq+tcp+curve'}")


UCX = pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="no ucxx"))


@pytest.mark.parametrize("scheme", ["shm", "ipc", "tcp", "auto", UCX])
def test_rdma_where_there_is_none(near: ProcessPeer, sockets: str, scheme: str) -> None:
    """It is refused in `serve`; and on both sides when a reader requires it."""
    url = f"shm://path-{next(_numbers)}" if scheme == "shm" else auto_url()
    url = url if scheme in ("shm", "auto") else fresh_url(scheme, sockets)
    with pytest.raises(ConnectorError, match=r"require='rdma', .* ucx_tls='rc'"):
        KVLink.serve(url, require=["rdma"])
    with KVLink.serve(url) as producer:
        assert "ucx_tls='rc'" in refused(producer, near, require="rdma")


def test_shm_where_the_reader_looks_elsewhere(far: ProcessPeer) -> None:
    """Whichever side requires it; and it is granted where it is so."""
    for mine, theirs in (("shm", ()), ((), "shm"), ("encrypted,shm", ["shm"])):
        with KVLink.serve(auto_url(), require=mine) as producer:
            text = refused(producer, far, require=theirs)
            assert "require='shm', and the path is zmq+tcp+curve" in text
            assert "no shm: nobody serves" in text
            assert "directory=" in text
    url = auto_url()
    options: dict[str, Any] = {"require": ["shm", "encrypted"]}
    with KVLink.serve(url, **options), KVLink.connect(url, timeout=PATIENCE, **options) as consumer:
        assert consumer.stats()["path"]["transport"] == "shm"


@pytest.mark.parametrize("scheme", ["tcp", "auto"])
def test_encrypted_without_keys(far: ProcessPeer, sockets: str, scheme: str) -> None:
    url = auto_url() if scheme == "auto" else fresh_url(scheme, sockets)
    with KVLink.serve(url, insecure=True) as producer:
        text = refused(producer, far, insecure=True, require="encrypted")
        assert "require='encrypted', and the path is zmq+tcp" in text
        assert "keys=" in text
    if scheme == "tcp":
        with pytest.raises(ConnectorError, match=r"require='encrypted', .* keys= and peers="):
            KVLink.serve(url, insecure=True, require="encrypted")
    with KVLink.serve(fresh_url("tcp", sockets), require="encrypted") as producer:
        consumer = KVLink.connect(producer.url, timeout=PATIENCE, require="encrypted")
        with consumer:
            assert consumer.stats()["path"]["encrypted"]


def test_a_reconnect_by_another_path(sockets: str) -> None:
    """Without the requirement it changes, and is logged; with it, gets raise until it is back."""
    name, tcp = f"path-{next(_numbers)}", f"127.0.0.1:{free_port()}"
    url = f"auto://{name}?tcp={tcp}"

    def serve(directory: str) -> KVProducer:
        producer = KVLink.serve(url, directory=directory)
        producer.put(Recipe("k").make(), readers=2)
        return producer

    elsewhere = os.path.join(sockets, "elsewhere")
    os.mkdir(elsewhere, 0o700)
    producer = serve(sockets)
    with (
        KVLink.connect(url, timeout=PATIENCE, directory=sockets, require="shm") as strict,
        KVLink.connect(url, timeout=PATIENCE, directory=sockets) as lenient,
    ):
        producer.close()
        producer = serve(elsewhere)
        until(lambda: not (strict.stats()["connected"] or lenient.stats()["connected"]), "lost")
        for _ in range(2):
            with pytest.raises(ConnectorError, match=r"require='shm', .*no shm: nobody serves"):
                strict.get("k", timeout=PATIENCE)
        with lenient.get("k", timeout=PATIENCE):
            assert lenient.stats()["path"]["transport"] == "zmq+tcp"
        assert refusals(producer) == 2
        producer.close()
        producer = serve(sockets)
        received = strict.get("k", timeout=PATIENCE)
        assert received.ledger.path.startswith("shm")
        received.release()
        producer.close()
    os.rmdir(elsewhere)


def test_one_line_is_logged(sockets: str, caplog: pytest.LogCaptureFixture) -> None:
    url = f"shm://path-{next(_numbers)}"
    with (
        caplog.at_level(logging.INFO, "omni_kvlink"),
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, timeout=PATIENCE, directory=sockets),
    ):
        until(lambda: len(producer.stats()["path"]) == 1, "it is connected")
    lines = [record.message for record in caplog.records if " by shm: " in record.message]
    assert len(lines) == 2
    assert f"{url} goes by shm" in lines[1]
    assert f"reader pid {os.getpid()} is connected by shm" in lines[0]


def test_a_misspelt_requirement() -> None:
    with pytest.raises(SchemaError, match=r"require.*'rmda'.*did you mean rdma"):
        KVLink.serve("inproc://x", require=["rmda"])
    with pytest.raises(SchemaError, match=r"require.*'encripted'.*did you mean encrypted"):
        KVLink.serve("inproc://x?require=shm,encripted")


def test_gpu_is_refused() -> None:
    with pytest.raises(ConnectorError, match="from device memory to device memory"):
        KVLink.serve("inproc://x?require=gpu")


def test_a_connector_that_tells_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise that cannot be checked is not given."""
    inner = registry.backend("inproc")

    def untold(*arguments: Any) -> Any:
        end = (inner.serve if len(arguments) == 2 else inner.connect)(*arguments)
        end.tells_path = False
        return end

    monkeypatch.setattr(sys.modules[__name__], "UNTOLD", Backend(untold, untold), raising=False)
    registry.register("untold", f"{__name__}:UNTOLD")
    with KVLink.serve("untold://x"):
        with pytest.raises(ConnectorError, match="does not tell its path"):
            KVLink.connect("untold://x", timeout=PATIENCE, require="shm")
        KVLink.connect("untold://x", timeout=PATIENCE).close()
    with pytest.raises(ConnectorError, match="does not tell its path"):
        KVLink.serve("untold://y", require="shm")
    monkeypatch.delitem(registry._ROWS, "untold")  # nothing public unregisters a scheme


def test_an_older_reader_is_refused_with_its_first_request() -> None:
    """One that knows no requirement, and so did not leave by itself."""
    url = auto_url()
    with (
        KVLink.serve(url, insecure=True, require="shm") as producer,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        receipt = producer.put(Recipe("k").make())
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 60_000)
        dealer.connect(f"tcp://{url.partition('tcp=')[2]}")
        dealer.send(msgspec.msgpack.encode(["Hello", [2, 2], "older"]))
        hello = decode(dealer.recv())
        assert isinstance(hello, Hello)
        assert hello.require == ("shm",)
        dealer.send(msgspec.msgpack.encode(["Get", 1, "k"]))
        name, reason, _ = msgspec.msgpack.decode(dealer.recv())
        assert (name, reason.partition(",")[0]) == ("Refused", "require='shm'")
        assert receipt.state == "committed"
        assert refusals(producer) == 1


@pytest.mark.parametrize("scheme", ["shm", "ipc", "tcp"])
def test_a_reader_that_does_not_leave(sockets: str, scheme: str) -> None:
    """The producer refuses it by itself, in the handshake, by what its `Hello` says."""
    hello = ["Hello", [2, 2], "stubborn", [], ["rdma"]]
    with contextlib.ExitStack() as stack:
        if scheme == "shm":
            producer = stack.enter_context(KVLink.serve("shm://stubborn", directory=sockets))
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(60)
            sock.connect(os.path.join(sockets, "stubborn.sock"))
            sock.send(msgspec.msgpack.encode(hello))
            answer = sock.recv(1 << 16)
        else:
            url = fresh_url(scheme, sockets)
            producer = stack.enter_context(KVLink.serve(url, insecure=True))
            context = stack.enter_context(zmq.Context())
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVTIMEO, 60_000)
            dealer.connect(url.removeprefix("zmq+"))
            dealer.send(msgspec.msgpack.encode(hello))
            answer = dealer.recv()
        name, reason, _ = msgspec.msgpack.decode(answer)
        assert (name, reason.partition(",")[0]) == ("Refused", "require='rdma'")
        assert refusals(producer) == 1


@pytest.mark.parametrize("nbytes", [100, 12 << 10])
def test_rdma_takes_small_payloads_along(
    monkeypatch: pytest.MonkeyPatch, sockets: str, nbytes: int
) -> None:
    """None travels beside its offer, over TCP; also none that has a slot. Earlier ones do that."""
    # TCP counts as RDMA, which no machine without such a device has: what a link then sends beside
    # its offers, the subject of this test, is its own.
    monkeypatch.setattr(LinkPath, "meets", lambda path, requirement: True)
    url, inline = fresh_url("tcp", sockets), 0 if nbytes > 1000 else 16 << 10
    for require in ((), "rdma"):
        with (
            KVLink.serve(url, inline=inline) as producer,
            KVLink.connect(url, timeout=PATIENCE, require=require) as consumer,
        ):
            producer.put(sized("k", nbytes).make())
            with consumer.get("k", timeout=PATIENCE):
                assert session_of(consumer).has_inline is (not require)
            session_of(consumer).required = None  # as a producer that knows no requirement
            text = session_of(consumer).path_refusal(["rdma"])
            assert "the producer is of an earlier version" in text


def test_a_hello_of_an_older_peer_is_understood() -> None:
    hello = decode(msgspec.msgpack.encode(["Hello", [2, 2], "older", ["zmq"]]))
    assert hello == Hello((2, 2), "older", ("zmq",), None)
    assert msgspec.msgpack.decode(encode(own_hello("new")))[4] == []


@pytest.mark.parametrize("tls", ["rc", "rc_x,self", "dc_mlx5,rc_mlx5,cuda_copy"])
def test_rdma_is_told_where_ucx_has_nothing_else(tls: str) -> None:
    assert UcxSettings(tls).path.rdma
    assert not path_refusal(UcxSettings(tls).path, ["rdma"])


@pytest.mark.parametrize("tls", ["tcp", "rc,tcp", "all", "^tcp", "self", "rc,cuda_ipc", "ud", ""])
def test_rdma_is_not_told_where_ucx_may_choose(tls: str) -> None:
    assert f"UCX may use {tls}" in path_refusal(UcxSettings(tls).path, ["rdma"])


def test_what_meets_what() -> None:
    ipc = LinkPath("zmq+ipc", shared_kernel=True)
    curve = LinkPath("zmq+tcp", encrypted=True)
    paths = (SHM_PATH, ipc, curve, LinkPath("zmq+tcp"), LinkPath("ucx", rdma=True))
    assert [path.meets("shm") for path in paths] == [True, False, False, False, False]
    assert [path.meets("encrypted") for path in paths] == [True, True, True, False, False]
    assert [path.meets("rdma") for path in paths] == [False, False, False, False, True]
    assert not any(path.meets("gpu") or path.meets("another") for path in paths)
