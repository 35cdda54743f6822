"""Payloads that go from a device's memory to a device's memory by UCX.

The device is the fake one, in two processes: its memory is the host's, and it counts what crosses.
The tests marked `gpu` are the same ones on a real device.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import IntegrityError, KVLink, PeerLostError, SchemaError, TransferTimeout
from omni_kvlink._native import cuda, host
from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.ucx import payload_memory
from omni_kvlink.copier import PinnedCopier
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE, ProcessPeer, RemoteLink
from omni_kvlink.testing.rig import expect, until
from support.connectors.zmq_addresses import free_port
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.faults.harness import Field, kill
from support.payloads.random_caches import bits

# Reaches into _copier, _links, _name: one end of a link is used past the commands and calls that
# check what it does.

if importlib.util.find_spec("ucxx") is None:
    pytest.skip(str(ucx.unavailable()), allow_module_level=True)

from support.connectors import ucx_device_peer
from support.connectors.ucx_stops import HUGE, HUGE_NBYTES, stop_amid
from support.link.ends import delivery_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.devices.fake_device import FakeDevice

pytestmark = [
    pytest.mark.usefixtures("zmq_started"),
    pytest.mark.skipif(bool(host.missing()), reason=host.missing() or ""),
]
HAS_DEVICE = torch.cuda.is_available() and not cuda.missing()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no CUDA device")]
EVERY = pytest.mark.parametrize("kind_of_device", ["fake", pytest.param("real", marks=GPU)])
OPTIONS: dict[str, Any] = {"copier": "pinned", "device": "cuda:0", "quota": 64 << 20}
SMALL = 64 << 10
"""Bytes: headers, tables of the kernel, digests. Each payload has more."""


def fresh_url(tls: str = "tcp,cuda_copy") -> str:
    return f"ucx://127.0.0.1:{free_port()}?trusted_network=1&ucx_tls={tls}"


class TwoProcesses:
    """A producer in one process, and consumers in another one."""

    def __init__(self, directory: Path | None):
        self.url = fresh_url()
        self.sender, self.receiver = (ucx_device_peer.start(directory) for _ in range(2))

    def open(self, **options: Any) -> tuple[RemoteLink, RemoteLink]:
        self.sender.call("serve", link="p", url=self.url, **{**OPTIONS, **options})
        self.receiver.call(
            "connect", link="r", url=self.url, timeout=PATIENCE, **{**OPTIONS, **options}
        )
        return RemoteLink(self.sender, "p"), RemoteLink(self.receiver, "r")

    def crossed(self) -> list[int]:
        return [peer.call("crossed") for peer in (self.sender, self.receiver)]

    def close(self) -> None:
        for peer in (self.receiver, self.sender):
            peer.close()


@pytest.fixture
def two(kind_of_device: str, request: pytest.FixtureRequest) -> Iterator[TwoProcesses]:
    is_real = kind_of_device == "real"
    two = TwoProcesses(None if is_real else request.getfixturevalue("directory"))
    yield two
    two.close()


@EVERY
@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_no_byte_meets_the_host(two: TwoProcesses, kind: str) -> None:
    producer, reader = two.open()
    seeds = (1,) if kind == "dense" else (1, 2, 3, 4)  # each layout
    for seed in seeds:
        key, before = f"k{seed}", two.crossed()
        producer.call("put_kind", key=key, kind=kind, seed=seed)
        found = reader.call("get_kind", key=key, kind=kind, seed=seed, timeout=60, verify="full")
        assert found == [True, True, True]
        used = [now - then for now, then in zip(two.crossed(), before, strict=True)]
        assert max(used) < SMALL
    stats = [each.call("stats") for each in (producer, reader)]
    for each in stats:
        assert each["device_path"] == "ucx"
        assert each["device_path_reason"] == "payloads lie on cuda:0"
        copies = each["device_copies"]
        assert (copies["pinned"], copies["pageable"]) == (0, 0)
        assert copies["device"] > 0
    assert stats[1]["verification"]["verified"] == len(seeds)
    assert stats[1]["verification"]["refetched"] == 0


@EVERY
def test_a_flipped_byte_is_found(two: TwoProcesses) -> None:
    """In the producer's memory of the device, after its digests were computed."""
    producer, reader = two.open()
    get = {"key": "k", "kind": "dense", "seed": 1, "timeout": 60}
    for at in (-1, 1_500_000):
        producer.call("put_kind", key="k", kind="dense", seed=1)
        producer.call("flip", key="k", at=at)
        expect(IntegrityError, lambda: reader.call("get_kind", **get), mentions=("not those",))
        until(lambda: producer.call("stats")["memory"]["used"] == 0, "it was freed")
    counts = reader.call("stats")["verification"]
    assert (counts["refetched"], counts["rejected"], counts["verified"]) == (2, 2, 0)
    producer.call("put_kind", key="k", kind="dense", seed=1)
    assert reader.call("get_kind", **get) == [True, True, True]


@EVERY
def test_a_direct_put_has_digests(two: TwoProcesses) -> None:
    """Computed by the device over the caller's own tensors, and compared by the other one."""
    producer, reader = two.open()
    putting = producer.submit("put_kind", key="k", kind="dense", seed=2, direct=True, timeout=60)
    got = reader.call("get_kind", key="k", kind="dense", seed=2, timeout=60, verify="full")
    assert got == [True, True, True]
    putting.result(PATIENCE)
    copies = producer.call("stats")["device_copies"]
    assert copies == {"pinned": 0, "device": 0, "pageable": 0}
    assert reader.call("stats")["verification"]["verified"] == 1
    assert max(two.crossed()) < SMALL


@EVERY
@pytest.mark.parametrize("on_device", ["producer", "reader"])
def test_one_side_has_no_device(two: TwoProcesses, on_device: str) -> None:
    """The host's memory there, with the reason; the bytes are the same."""
    other = {"p": {"copier": "pinned"}, "r": {"copier": "pinned"}}
    other["p" if on_device == "producer" else "r"] = OPTIONS
    two.sender.call("serve", link="p", url=two.url, **other["p"])
    two.receiver.call("connect", link="r", url=two.url, timeout=PATIENCE, **other["r"])
    producer, reader = RemoteLink(two.sender, "p"), RemoteLink(two.receiver, "r")
    before = two.crossed()
    for kind in ("dense", "paged"):
        producer.call("put_kind", key=kind, kind=kind, seed=3)
        get = {"key": kind, "kind": kind, "seed": 3, "timeout": 60}
        right, _, copied = reader.call("get_kind", **get)
        assert right
        assert copied
    here, there = (producer, reader) if on_device == "producer" else (reader, producer)
    assert here.call("stats")["device_path"] == "ucx"
    stats = there.call("stats")
    assert (stats["device_path"], stats["device_path_reason"]) == ("host", "no device= was given")
    assert stats["device_copies"]["device"] == 0
    crossed = [now - then for now, then in zip(two.crossed(), before, strict=True)]
    if two.sender.call("allocated"):  # the fake device, which counts
        nbytes = stats["device_copies"]["pinned"]
        assert nbytes > 1 << 20
        assert crossed[on_device == "producer"] >= nbytes
        assert crossed[on_device != "producer"] < SMALL


# ---- on the fake device only


@pytest.fixture
def field(socket_dir: str, device: FakeDevice) -> Iterator[Field]:
    """Links of this process whose payloads are on the fake device."""
    field = Field(socket_dir, url=fresh_url())
    field.options |= OPTIONS
    yield field
    field.close()


@pytest.fixture
def target(directory: Path) -> Iterator[ProcessPeer]:
    """Another process with such a device, which a test may stop or kill."""
    peer = ucx_device_peer.start(directory)
    yield peer
    peer.process.kill()
    peer.close()


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("tcp", {}, "UCX has only tcp, ucx_tls='tcp,cuda_copy' reaches a GPU"),
        ("tcp,cuda_copy", {"copier": "native"}, "use copier='pinned'"),
        ("tcp,cuda_copy", {"device": "cuda:1"}, "device 1 of 1"),
        ("zmq+tcp://127.0.0.1:0", {}, "zmq+tcp:// has them in the host's memory; use ucx://"),
        ("shm://no-device", {}, "shm:// has them in the host's memory; use ucx://"),
        ("auto://no-device?tcp=127.0.0.1:0", {}, "auto:// has them in the host's memory"),
    ],
)
def test_what_cannot_be_is_on_the_host(
    device: FakeDevice, sockets: str, url: str, options: dict[str, Any], reason: str
) -> None:
    options = {**OPTIONS, "directory": sockets, **options}
    url = url if "://" in url else fresh_url(url)
    before = opened_nbytes(device)
    with (
        KVLink.serve(url, **options) as producer,
        KVLink.connect(producer.url, timeout=60, **options) as reader,
    ):
        for end in (producer, reader):
            stats = end.stats()
            assert stats["device_path"] == "host"
            assert reason in stats["device_path_reason"]
        data, expected = ucx_device_peer.dense("k", 1, "cpu")
        producer.put(data)
        with reader.get("k", timeout=60) as found:
            assert ucx_device_peer.bytes_of(found) == expected
        del found
        assert device.allocated_nbytes - before < OPTIONS["quota"]


def test_a_device_without_memory_left(device: FakeDevice) -> None:
    device_is_full = device.set("refuses_memory", 1)
    with KVLink.serve("inproc://first", copier="pinned"):  # the library has its own memory
        cuda.describe(0)
    with device_is_full, KVLink.serve(fresh_url(), **OPTIONS) as producer:
        stats = producer.stats()
        assert stats["device_path"] == "host"
        assert "67108864 bytes of cuda:0: cudaMalloc" in stats["device_path_reason"]
        assert stats["device_path_reason"].endswith("set a lower quota=")


def test_what_ucx_or_cuda_lack(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    copier = PinnedCopier()
    monkeypatch.setattr(payload_memory, "reaches_cuda", lambda settings: False)
    with KVLink.serve(fresh_url(), **OPTIONS) as producer:
        assert "this UCX has no CUDA transports" in producer.stats()["device_path_reason"]
    options = {**OPTIONS, "copier": copier}
    with device.set("devices", 0), KVLink.serve(fresh_url(), **options) as producer:
        assert "no CUDA device" in producer.stats()["device_path_reason"]


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:", "cuda:-1", "cpu"])
def test_a_wrong_name_of_a_device(name: str) -> None:
    with pytest.raises(ValueError, match="wanted 'cuda:0'"):
        KVLink.serve(fresh_url(), device=name)


def test_allocate_is_refused(device: FakeDevice) -> None:
    data, _ = ucx_device_peer.dense("k", 1, "cpu")
    with (
        KVLink.serve(fresh_url(), **OPTIONS) as producer,
        pytest.raises(SchemaError, match=r"this link's is on cuda:0: put tensors of your own"),
    ):
        producer.allocate(data)


def test_layers_of_a_stream(device: FakeDevice) -> None:
    """Layer by layer, behind what the engines' streams hold, into blocks of a pool."""
    source, expected = ucx_device_peer.paged("k", 2, "cpu")
    into, _ = ucx_device_peer.paged("k", 6, "cpu")
    sources, targets = source.tensors(), into.tensors()
    with (
        KVLink.serve(fresh_url(), **OPTIONS) as producer,
        KVLink.connect(producer.url, timeout=60, **OPTIONS) as reader,
    ):
        before = device.crossed_nbytes
        with device.on_stream(64):
            events = producer.record(sources)
        with producer.stream_put(source) as out:
            for layer in range(2):
                out.write_layer(layer, *sources[2 * layer : 2 * layer + 2], after=events)
        with reader.stream_get("k", timeout=60) as received:
            ends = []
            for layer in range(2):
                arrived = received.wait_for_layer(layer)
                ends.append(arrived.begin_scatter(*targets[2 * layer : 2 * layer + 2]))
            assert ucx_device_peer.bytes_of(into) != expected  # enqueued
            for end in ends:
                end.wait()
            assert ucx_device_peer.bytes_of(into) == expected
            del arrived, ends
        assert device.crossed_nbytes - before < SMALL
        assert out.receipt is not None
        out.receipt.wait(timeout=60)


def test_a_byte_that_changes_after_delivery_reaches_no_block(device: FakeDevice) -> None:
    source, _ = ucx_device_peer.paged("k", 2, "cpu")
    into, before = ucx_device_peer.paged("k", 6, "cpu")
    with (
        KVLink.serve(fresh_url(), **OPTIONS) as producer,
        KVLink.connect(producer.url, timeout=60, **OPTIONS) as reader,
    ):
        receipt = producer.put(source)
        received = reader.get("k", timeout=60)
        region = delivery_of(received).region
        assert region is not None
        assert region.device == "cuda:0"
        with pytest.raises(ValueError, match="no view on the host"):
            region.view()
        region.write(region.nbytes - 5, b"!")
        with pytest.raises(IntegrityError, match="not those committed"):
            received.verify()
        with pytest.raises(IntegrityError, match="not those committed"):
            received._copier.begin_scatter(received.manifest, region, into.tensors())
        assert ucx_device_peer.bytes_of(into) == before
        del region
        received.release()
        del received
        until(lambda: receipt.done, "it was released")
        assert receipt.state != "released"


def test_host_tensors_and_views_of_the_payload(device: FakeDevice) -> None:
    """Torch copies what is not on the device; a target in the payload itself is refused."""
    data, expected = ucx_device_peer.dense("k", 1, "cpu")
    near = {id(each) for each in data.tensors()[::2]}
    device.holds = lambda view: id(view) not in near
    with (
        KVLink.serve(fresh_url(), **OPTIONS) as producer,
        KVLink.connect(producer.url, timeout=60, **OPTIONS) as reader,
    ):
        producer.put(data)
        received = reader.get("k", timeout=60, verify="full")
        with received as found:
            into = [torch.zeros_like(dense(each)) for each in data.tensors()]
            near |= {id(each) for each in into[1::2]}
            received.scatter(into)
            assert [bits(each) for each in into] == expected
            with pytest.raises(SchemaError, match="lies in the payload itself"):
                received.scatter(found.tensors())
        del found
        copies = producer.stats()["device_copies"]
        assert copies["pageable"] == 0  # tensors of the host are not a device's
        assert 0 < copies["device"] < 2 * sum(map(len, expected))


def opened_nbytes(device: FakeDevice) -> int:
    """What the library keeps on a device from its first use on, mostly to pack blocks in."""
    cuda.record(0, 0).close()
    assert device.allocated_nbytes < 69_000_000  # docs/gpu.md says 68 MB
    return device.allocated_nbytes


def test_nothing_is_left_on_the_device(device: FakeDevice) -> None:
    opened = opened_nbytes(device)
    data, _ = ucx_device_peer.paged("k", 1, "cpu")
    for _ in range(2):
        with KVLink.serve(fresh_url(), **OPTIONS) as producer:
            with KVLink.connect(producer.url, timeout=60, **OPTIONS) as reader:
                for number in range(12):  # more than the quota in all
                    receipt = producer.put(data)
                    with reader.get("k", timeout=60) as found:
                        kept = found.tensors()[0]
                    del found
                    if not number:  # a view keeps its memory
                        assert reader.stats()["memory"]["used"] > 0
                    del kept
                    receipt.wait(timeout=60)
                    until(lambda: not reader.stats()["memory"]["used"], "it was freed")
            assert device.allocated_nbytes >= OPTIONS["quota"]
        staged = device.allocated_nbytes - opened
        assert staged < 1 << 20  # tables of the kernels, which the library keeps


# ---- kills, deadlines


def test_a_killed_producer(field: Field, device: FakeDevice, target: ProcessPeer) -> None:
    field.options["quota"] = 256 << 20
    opened = opened_nbytes(device)
    producer, reader = field.serve_at(target), field.connect()
    waiting = stop_amid(target, producer, reader, timeout=PATIENCE)
    kill(target)
    expect(PeerLostError, lambda: waiting.result(PATIENCE), mentions=("'k'",))
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")
    reader.call("close")
    assert device.allocated_nbytes - opened < 1 << 20


def test_a_killed_reader(field: Field, device: FakeDevice, target: ProcessPeer) -> None:
    field.options["quota"] = 256 << 20
    opened = opened_nbytes(device)
    producer = field.serve()
    reader = field.connect_at(target)
    producer.put(HUGE.make())
    reader.submit("get", key="k", timeout=PATIENCE)
    until(lambda: producer.stats()["ucx"]["active"] > 0 or not live(producer), "bytes leave")
    kill(target)
    other = field.connect()
    if live(producer):
        assert other.call("get", key="k", timeout=60, verify="full") == fingerprint(HUGE.make())
    until(lambda: producer.stats()["memory"]["used"] == 0, "the producer's memory is free")
    other.call("close")
    producer.close()
    assert device.allocated_nbytes - opened < 1 << 20


def live(producer: Any) -> int:
    return int(producer.stats()["transfers"]["live"])


def test_a_deadline_passes_while_ucx_writes_to_the_device(
    field: Field, device: FakeDevice, target: ProcessPeer
) -> None:
    field.options["quota"] = 256 << 20
    producer, reader = field.serve_at(target), field.connect()
    waiting = stop_amid(target, producer, reader, timeout=2.0)
    expect(TransferTimeout, lambda: waiting.result(PATIENCE), mentions=("bytes have come",))
    until(lambda: reader.call("stats")["ucx"]["quarantined"] == 1, "quarantine")
    assert reader.call("stats")["memory"]["used"] >= HUGE_NBYTES
    os.kill(target.process.pid, signal.SIGCONT)
    until(lambda: reader.call("stats")["memory"]["used"] == 0, "the reader's memory is free")
    assert reader.call("get", key="k", timeout=60, verify="full") == fingerprint(HUGE.make())


def test_an_abort(field: Field, device: FakeDevice) -> None:
    producer, reader = field.serve(), field.connect()
    data, expected = ucx_device_peer.dense("k", 1, "cpu")
    producer.put(data)
    producer.abort("k")
    until(lambda: producer.stats()["memory"]["used"] == 0, "the producer's memory is free")
    other, expected = ucx_device_peer.dense("l", 2, "cpu")
    producer.put(other)
    commands = field.commands
    link = commands._links[reader._name]
    with link.get("l", timeout=60) as found:
        assert ucx_device_peer.bytes_of(found) == expected
