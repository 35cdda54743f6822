"""A live producer shows what it keeps to its owner, over each connector, and to nobody else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    ClosedError,
    ConnectorError,
    KVConsumer,
    KVLink,
    KVProducer,
    PeerLostError,
    TensorTransferData,
    TransferTimeout,
    UnavailableError,
    VersionError,
)
from omni_kvlink.connectors.base import Consumer
from omni_kvlink.connectors.control.peer import PeerConnection
from omni_kvlink.connectors.protocol.messages import (
    Get,
    Hello,
    Inspect,
    Inspected,
    Memory,
    Message,
    Offer,
)
from omni_kvlink.connectors.protocol.path import LinkPath
from omni_kvlink.connectors.runtime.owner import owner_refusal
from omni_kvlink.connectors.runtime.producer import PooledProducer
from omni_kvlink.errors import SchemaError
from omni_kvlink.link.consumer import inspect_page
from omni_kvlink.lowlevel import LivePayload, ProducerReport, inspect_producer
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import until
from support.connectors.key_files import KeyFiles
from support.connectors.shm_unauthorized import NOBODY, Raw, as_nobody, greeted
from support.connectors.zmq_addresses import free_port, fresh_url
from support.faults.frozen import freeze

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Reaches into _end, _session, _pending: the questions of a connection that have no answer yet, for
# which no event is; and the connector itself.

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
WAIT = 60.0


def tensors(key: str, size: int = 100_000) -> TensorTransferData:
    return TensorTransferData(key, {"x": torch.zeros(size)})


def inspect(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `kvlink inspect` in a process of its own."""
    command = [sys.executable, "-m", "omni_kvlink.cli", "inspect", url, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def receive_until(peer: Raw, kind: type[Message]) -> Message:
    """The next message of a kind; before it comes memory at most."""
    while True:
        message, fds = peer.receive()
        for fd in fds:
            os.close(fd)
        if isinstance(message, kind):
            return message
        assert isinstance(message, Memory), message


def states(report: ProducerReport) -> dict[str, tuple[str, str]]:
    return {payload.key: (payload.state, payload.form) for payload in report.payloads}


def with_options(url: str, options: dict[str, Any]) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{query}" if query else url


@pytest.fixture(params=["shm", "ipc", "tcp", "keys", "auto", "auto by tcp"])
def link(
    request: pytest.FixtureRequest, sockets: str, tmp_path: Path
) -> Iterator[tuple[KVProducer, str]]:
    """A producer, and the URL by which its owner can inspect it."""
    kind, serve, owner = request.param, dict[str, Any](), dict[str, Any]()
    url = f"auto://i{os.getpid()}?tcp=127.0.0.1:{free_port()}"
    if kind == "shm":
        url, serve = "shm://i", {"directory": sockets}
        owner = serve
    elif kind in ("ipc", "tcp"):
        url = fresh_url(kind, sockets)
    elif kind == "keys":
        files = KeyFiles(tmp_path)
        shutil.copy(files.key("producer.public"), files.allowed)
        url, serve = fresh_url("tcp", sockets), files.producer_options
        owner = files.consumer_options("producer")
    elif kind == "auto by tcp":
        owner = {"directory": str(tmp_path)}  # no socket of that name is there
        tmp_path.chmod(0o700)
    with KVLink.serve(url, **serve) as producer:
        yield producer, with_options(producer.url, owner)


def test_the_owner_sees_it_over_each_connector(link: tuple[KVProducer, str]) -> None:
    producer, url = link
    producer.put(tensors("req-1"), readers=2)
    producer.put(tensors("req-2", 10), ttl=900.0)
    done = inspect(url, "--json", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    shown = [(p["key"], p["epoch"], p["state"], p["missing"]) for p in report["payloads"]]
    assert shown == [("req-1", 1, "committed", 2), ("req-2", 2, "committed", 1)]
    assert report["payloads"][0]["nbytes"] > 400_000
    assert 0 < report["payloads"][1]["ttl_ms"] <= 900_000
    assert report["transfers"]["live"] == 2
    memory = producer.stats()["memory"]
    assert {name: memory[name] for name in report["memory"]} == report["memory"]
    assert report["url"].startswith(producer.url.partition("?")[0])
    table = inspect(url, "--prefix", "req-2", "--timeout", "60")
    assert table.returncode == 0, table.stderr
    assert "'req-2'" in table.stdout
    assert "'req-1'" not in table.stdout


@pytest.fixture
def shm(sockets: str) -> Iterator[tuple[KVProducer, KVConsumer, str]]:
    with (
        KVLink.serve("shm://i", directory=sockets) as producer,
        KVLink.connect("shm://i", directory=sockets, timeout=WAIT) as owner,
    ):
        yield producer, owner, f"{sockets}/i.sock"


def test_each_state(shm: tuple[KVProducer, KVConsumer, str]) -> None:
    producer, owner, path = shm
    producer.put(tensors("committed"))
    producer.put(tensors("inline", 10))
    producer.put(tensors("leased"), readers=2)
    producer.put(tensors("pinned"))
    allocation = producer.allocate(Recipe("reserved").make())
    layers = producer.stream_put(Recipe("streaming").make())
    with (
        owner.get("leased", timeout=WAIT),
        producer.open_stream("append", {"x": torch.zeros(0, 4)}) as stream,
    ):
        stream.append({"x": torch.zeros(3, 4)})
        with greeted(path) as reader:
            reader.send(Get(1, "pinned"))
            receive_until(reader, Offer)
        until(lambda: producer.stats()["transfers"]["pinned"] == 1, "the reader is detached")
        report = inspect_producer(owner, timeout=WAIT)
        found = {payload.key: payload for payload in report.payloads}
        assert states(report) == {
            "committed": ("committed", "memory"),
            "inline": ("committed", "inline"),
            "leased": ("leased", "memory"),
            "pinned": ("committed", "memory"),
            "reserved": ("reserved", "memory"),
            "streaming": ("streaming", "stream"),
            "append": ("streaming", "append"),
        }
        leased, append = found["leased"], found["append"]
        assert (leased.missing, leased.reading, leased.path) == (1, 1, "shm")
        assert {key for key, payload in found.items() if payload.pinned} == {"pinned"}
        assert (append.chunks, append.ttl_ms) == (1, None)
        assert found["reserved"].nbytes > 0
        producer.fail("pinned", "why")
        report = inspect_producer(owner, prefix="pin", timeout=WAIT)
        assert states(report) == {"pinned": ("failed", "memory")}
    allocation.release()
    layers.fail("the test ends")


def test_many_thousand_payloads_while_others_get(
    shm: tuple[KVProducer, KVConsumer, str], sockets: str
) -> None:
    """Between any two pages the producer serves another reader; each kept one is told once."""
    producer, owner, _ = shm
    count = 6_000
    for first in range(0, count, 1000):
        producer.put_many([tensors(f"k{n}", 1) for n in range(first, first + 1000)], ttl=900.0)
    taken = [f"k{number}" for number in range(0, count, 50)]
    with KVLink.connect("shm://i", directory=sockets, timeout=WAIT) as reader:
        page, seen, resume = Inspected(0), list[LivePayload](), 0
        for key in taken[:30]:
            if not seen or resume:
                page = inspect_page(owner, resume, "", timeout=WAIT)
                seen, resume = [*seen, *page.payloads], page.resume
                assert len(page.payloads) <= 256
            reader.get(key, timeout=WAIT).release()
        assert len(seen) >= count - 30  # 24 pages

        def get() -> None:
            for key in taken[30:]:
                reader.get(key, timeout=WAIT).release()

        thread = threading.Thread(target=get)
        thread.start()
        report = inspect_producer(owner, timeout=WAIT)
        thread.join()
    epochs = [payload.epoch for payload in report.payloads]
    assert epochs == sorted(set(epochs))
    kept = {f"k{number}" for number in range(count)} - {*taken}
    assert kept <= {payload.key for payload in report.payloads}
    assert producer.stats()["throttled"] == {}


def refusal_of(consumer: KVConsumer) -> str:
    try:
        inspect_producer(consumer, timeout=WAIT)
    except ConnectorError as error:  # kept by nobody, nor its frames
        return str(error)
    raise AssertionError("it was told")


def check_refused(producer: KVProducer, consumer: KVConsumer, text: str) -> None:
    """It is told why, counted, and its connection goes on."""
    producer.put(tensors("secret"))
    reason = refusal_of(consumer)
    assert text in reason
    assert "secret'" not in reason
    assert producer.stats()["refused"] == {"inspect": 1}
    consumer.get("secret", timeout=WAIT).release()
    assert consumer.stats()["sessions"] == 1


def test_a_reader_with_another_key_is_refused(sockets: str, tmp_path: Path) -> None:
    """Also when the producer's own key is admitted, and whatever metadata it sends."""
    files = KeyFiles(tmp_path)
    shutil.copy(files.key("producer.public"), files.allowed)
    with (
        KVLink.serve(fresh_url("tcp", sockets), **files.producer_options) as producer,
        KVLink.connect(producer.url, timeout=WAIT, **files.consumer_options()) as reader,
    ):
        check_refused(producer, reader, "its key is a reader's: inspect it with the producer's own")


def test_the_producers_own_key_is_not_admitted_by_itself(sockets: str, tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    with KVLink.serve(fresh_url("tcp", sockets), **files.producer_options) as producer:
        options = files.consumer_options("producer")
        with pytest.raises(ConnectorError, match="peers= directory"):
            KVLink.connect(producer.url, timeout=WAIT, **options)
        shutil.copy(files.key("producer.public"), files.allowed)  # no restart is needed
        with KVLink.connect(producer.url, timeout=WAIT, **options) as owner:
            assert inspect_producer(owner, timeout=WAIT).payloads == ()
        (files.allowed / "producer.public").unlink()
        with pytest.raises(ConnectorError, match="peers= directory"):
            KVLink.connect(producer.url, timeout=WAIT, **options)


@pytest.mark.filterwarnings("ignore:.*INSECURE:RuntimeWarning")
def test_without_keys_nobody_is_the_owner(sockets: str) -> None:
    with (
        KVLink.serve(fresh_url("tcp", sockets), insecure=True) as producer,
        KVLink.connect(producer.url, timeout=WAIT, insecure=True) as reader,
    ):
        check_refused(producer, reader, "serve it with keys= and peers=, on loopback without insec")


def test_over_ucx_nobody_is_the_owner() -> None:
    """Not even who has the key."""
    peer = PeerConnection(None, b"", -1, None, None)  # type: ignore[arg-type]
    assert "without keys" in peer.inspect_refusal()
    peer.has_owner_key = True
    assert peer.inspect_refusal() == ""
    peer.set_path(LinkPath("ucx"))
    assert "UCX authenticates nobody: serve auto://" in peer.inspect_refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("scheme", ["shm", "ipc"])
def test_another_user_is_refused(scheme: str) -> None:
    """Also one that may read: `allow_uids` of shm, and a Unix socket that was opened by root."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    url = "shm://i" if scheme == "shm" else f"zmq+ipc://{directory}/i.sock"
    options: dict[str, Any] = {"directory": directory} if scheme == "shm" else {}
    allowed: dict[str, Any] = {"allow_uids": [0, NOBODY]} if scheme == "shm" else {}
    with KVLink.serve(url, **options) as first, KVLink.connect(url, timeout=WAIT, **options) as one:
        first.put(tensors("k"))  # imports what another user may not be able to read
        one.get("k", timeout=WAIT).release()
        inspect_producer(one, timeout=WAIT)
    if scheme == "shm":
        os.chown(directory, 0, NOBODY)
        os.chmod(directory, 0o2770)

    def read() -> bool:
        os.umask(0o077)
        with KVLink.connect(url, timeout=WAIT, **options, **allowed) as consumer:
            reason = refusal_of(consumer)
            consumer.get("secret", timeout=WAIT).release()
        return f"uid {NOBODY} is not its owner: inspect it as uid 0, or as root" in reason

    try:
        with KVLink.serve(url, **options, **allowed) as producer:
            if scheme == "ipc":  # what the library refuses to do
                os.chown(f"{directory}/i.sock", NOBODY, NOBODY)
                os.chown(directory, NOBODY, NOBODY)
            receipt = producer.put(tensors("secret"))
            with as_nobody(read) as is_refused:
                assert is_refused()
            receipt.wait(timeout=WAIT)
            assert producer.stats()["refused"] == {"inspect": 1}
            os.chown(directory, 0, NOBODY if scheme == "shm" else 0)
            with KVLink.connect(url, timeout=WAIT, **options, **allowed) as owner:
                assert inspect_producer(owner, timeout=WAIT).payloads == ()
    finally:
        shutil.rmtree(directory)


def test_root_and_the_producers_user_are_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert owner_refusal(1000) == owner_refusal(0) == ""
    assert "uid 1001 is not its owner: inspect it as uid 1000, or as root" in owner_refusal(1001)


def test_no_byte_and_no_lease(shm: tuple[KVProducer, KVConsumer, str]) -> None:
    """A bare peer that asks is sent rows alone; nothing of a payload is mapped or leased."""
    producer, _, path = shm
    receipt = producer.put(TensorTransferData("k", {"x": torch.full((100,), 0x5A5A5A5A)}))
    with greeted(path) as peer:
        peer.send(Inspect(7))
        answer = receive_until(peer, Inspected)
    assert isinstance(answer, Inspected)
    assert (answer.inspect_id, [payload.key for payload in answer.payloads]) == (7, ["k"])
    assert b"\x5a" * 8 not in repr(answer).encode()
    assert (receipt.state, receipt.lost_readers) == ("committed", 0)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_producer_of_an_earlier_version(
    scheme: str, sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked: it would end the connection at a message that it does not know."""
    monkeypatch.setattr(
        PooledProducer,
        "hello",
        property(lambda self: Hello((2, 2), self.incarnation, ("zmq",), ())),
    )
    url = "shm://i" if scheme == "shm" else fresh_url("tcp", sockets)
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, directory=sockets, timeout=WAIT) as consumer,
    ):
        with pytest.raises(VersionError, match=r"speaks protocol 2, .* from 3 on: install"):
            inspect_producer(consumer, timeout=WAIT)
        producer.put(tensors("k"))
        consumer.get("k", timeout=WAIT).release()
        assert consumer.stats()["sessions"] == 1


PROGRAM = """
import sys
from omni_kvlink import KVLink
with KVLink.serve(sys.argv[1]) as producer:
    print(producer.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_producer_that_hangs_and_dies(scheme: str, socket_dir: str) -> None:
    url = f"shm://i?directory={socket_dir}" if scheme == "shm" else fresh_url("tcp", socket_dir)
    command = [sys.executable, "-c", PROGRAM, url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with KVLink.connect(url, timeout=WAIT) as consumer:
            inspect_producer(consumer, timeout=WAIT)
            freeze(process.pid)
            with pytest.raises(TransferTimeout, match="no answer to a question"):
                inspect_producer(consumer, timeout=0.01)
            lost = list[str]()

            def send_question() -> None:
                with contextlib.suppress(TransferTimeout):
                    try:
                        inspect_producer(consumer, timeout=WAIT)
                    except PeerLostError as error:
                        lost.append(str(error))

            thread = threading.Thread(target=send_question)
            thread.start()
            inspections = consumer._end._session.get_table.inspections  # type: ignore[attr-defined]
            until(lambda: len(inspections._pending) == 1, "it waits")
            process.kill()
            thread.join()
            assert lost
    done = inspect(url, "--timeout", "0.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_within_a_process() -> None:
    name = f"inproc://inspect-{os.getpid()}"
    with KVLink.serve(name) as producer, KVLink.connect(name, timeout=WAIT) as consumer:
        producer.put(tensors("k"))
        assert states(inspect_producer(consumer, timeout=WAIT)) == {"k": ("committed", "memory")}
        with pytest.raises(SchemaError, match="a text with which keys begin"):
            inspect_producer(consumer, prefix="\ud800", timeout=WAIT)
        with pytest.raises(UnavailableError, match="its producer has stats"):
            Consumer.inspect(consumer._end, 0, "", timeout=WAIT)  # of another connector
    with pytest.raises(ClosedError):
        inspect_producer(consumer, timeout=WAIT)
