"""Prometheus metrics: exact counts after known transfers, bounded labels, and nothing when off."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from omni_kvlink import (
    CapacityError,
    DuplicateKeyError,
    IntegrityError,
    KVCacheTransferData,
    KVLink,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.telemetry import metrics, observers
from omni_kvlink.telemetry.metrics import error_name
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import until
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit
from support.link.ends import end_of, peers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from omni_kvlink import Verify
    from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer
    from support.link.aio_ends import Test

# Reaches into _pending: no scrape shows what waits to be counted, because each scrape counts it.

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
SMALL, LARGE = 16, 1 << 18
Values = dict[tuple[str, ...], float]


class Scrape:
    """The samples of a registry."""

    def __init__(self, registry: CollectorRegistry):
        self.samples = [sample for metric in registry.collect() for sample in metric.samples]

    def values(self, name: str) -> Values:
        """The values of one series that are not 0, by the values of its labels, in their order."""
        found = [sample for sample in self.samples if sample.name == name and sample.value]
        return {tuple(sample.labels.values()): sample.value for sample in found}


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    metrics.enable(registry)
    yield registry
    metrics.disable()


def payload(key: str, size: int = SMALL) -> TensorTransferData:
    return TensorTransferData(key, {"h": torch.ones(size)})


@pytest.mark.parametrize("scheme", ["shm", "zmq+ipc", "inproc"])
def test_transfers_are_counted(scheme: str, sockets: str, registry: CollectorRegistry) -> None:
    url = f"{scheme}://{sockets}/link.sock" if scheme == "zmq+ipc" else f"{scheme}://counted"
    nbytes = 0
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        for number, size in enumerate((SMALL, LARGE, LARGE)):
            receipt = producer.put(payload(f"k{number}", size))
            consumer.get(f"k{number}", timeout=60).release()
            receipt.wait(timeout=60)
            nbytes += receipt.ledger.nbytes
        kept = producer.put(payload("kept", LARGE))
        scrape = Scrape(registry)
        assert scrape.values("kvlink_live_payloads") == {(): 1}
        memory = scrape.values("kvlink_memory_bytes")
        assert memory["producer", "used"] == producer.stats()["memory"]["used"] > 4 * LARGE
        assert scrape.values("kvlink_readers") == ({} if scheme == "inproc" else {(): 1})
        paths = scrape.values("kvlink_path_info")
        roles = ("producer", "consumer")
        assert paths == {(role, scheme, scheme, "false", "host"): 1 for role in roles}
    until(lambda: kept.done, "the link is closed")
    scrape = Scrape(registry)
    assert scrape.values("kvlink_transfers_total") == {
        ("producer", scheme, "released"): 3,
        ("producer", scheme, "failed"): 1,
        ("consumer", scheme, "received"): 3,
    }
    assert scrape.values("kvlink_transfer_bytes_count") == {("producer",): 3, ("consumer",): 3}
    assert scrape.values("kvlink_transfer_bytes_sum")["consumer",] == nbytes
    assert scrape.values("kvlink_transfer_bytes_sum")["producer",] == nbytes
    phases = scrape.values("kvlink_phase_seconds_count")
    names = [("producer", name) for name in ("plan", "reserve", "copy", "publish", "delivery")]
    assert phases == dict.fromkeys([*names, ("consumer", "wait"), ("consumer", "view")], 3)
    assert scrape.values("kvlink_errors_total") == {("producer", "TransferFailed"): 1}
    assert not scrape.values("kvlink_live_payloads")
    assert not scrape.values("kvlink_path_info")


def test_memory_of_disconnected_readers_is_counted(
    sockets: str, registry: CollectorRegistry
) -> None:
    with (
        KVLink.serve("shm://pinned", directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        receipt = producer.put(payload("a", LARGE))
        with consumer.get("a", timeout=60) as data:
            seen = data["h"]
        (listener,), (peer,) = end_of(producer).listeners, peers_of(producer)
        # private: no public call breaks a connection while its process lives
        end_of(producer).loop.call(lambda: listener._disconnect_in_loop(peer))
        until(lambda: producer.stats()["detached"], "it was disconnected")
        scrape = Scrape(registry)
        assert scrape.values("kvlink_memory_bytes")["producer", "pinned"] == receipt.ledger.nbytes
        assert scrape.values("kvlink_pinned_payloads") == {(): 1}
        del seen, data


def test_failures_are_counted(sockets: str, registry: CollectorRegistry) -> None:
    copier = TamperingCopier()
    with (
        KVLink.serve("shm://failures", directory=sockets, copier=copier, quota=1 << 24) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        producer.put(payload("a"))
        for _ in range(2):
            with pytest.raises(DuplicateKeyError):
                producer.put(payload("a"))
        with pytest.raises(CapacityError):
            producer.put(payload("long", 1 << 23), timeout=0)
        with pytest.raises(TransferTimeout):
            consumer.get("none", timeout=0)
        producer.fail("bad", "of the engine")
        with pytest.raises(TransferFailed):
            consumer.get("bad", timeout=60)
        expired = producer.put(payload("expired"), ttl=1e-3)
        until(partial(getattr, expired, "done"), "its time has passed")
        copier.tamper = partial(flip_bit, "tensors/h", 5)
        checks: dict[str, Verify] = {"full": "full", "copied": "auto"}
        for key, verify in checks.items():
            receipt = producer.put(payload(key, LARGE))
            with pytest.raises(IntegrityError):
                consumer.get(key, timeout=60, verify=verify).scatter([torch.empty(LARGE)])
            until(partial(getattr, receipt, "done"), "the payload is rejected")
    scrape = Scrape(registry)
    assert scrape.values("kvlink_transfers_total") == {
        ("producer", "shm", "failed"): 6,  # two duplicates, one too long, two rejected, one unread
        ("producer", "shm", "expired"): 1,
        ("consumer", "shm", "failed"): 3,  # a timeout, a failure, one with wrong bytes
        ("consumer", "shm", "received"): 1,  # whose wrong bytes were found later
    }
    assert scrape.values("kvlink_errors_total") == {
        ("producer", "DuplicateKeyError"): 2,
        ("producer", "CapacityError"): 1,
        ("producer", "TransferFailed"): 4,
        ("consumer", "TransferTimeout"): 1,
        ("consumer", "TransferFailed"): 1,
        ("consumer", "IntegrityError"): 2,
    }


def test_streams_are_counted(sockets: str, registry: CollectorRegistry) -> None:
    cache = Recipe("layers").make()
    assert isinstance(cache, KVCacheTransferData)
    blocks = cache.layer_blocks
    with (
        KVLink.serve("shm://streams", directory=sockets) as producer,
        KVLink.connect(producer.url, timeout=60, directory=sockets) as consumer,
    ):
        thread = threading.Thread(
            target=lambda: list(consumer.stream_get("layers", timeout=60)), daemon=True
        )
        thread.start()
        with producer.stream_put(cache) as out:
            for layer, (key, value) in enumerate(
                zip(*(blocks[name] for name in sorted(blocks)), strict=True)
            ):
                assert key is not None
                out.write_layer(layer, key, value)
        thread.join(60)
        assert out.receipt is not None
        out.receipt.wait(timeout=60)
        with producer.open_stream("chunks", {"h": torch.ones(1)}) as chunks:
            chunks.append({"h": torch.ones(2)})
            chunks.append({"h": torch.ones(3)})
        with consumer.read_stream("chunks", timeout=60) as stream:
            assert len(list(stream)) == 2
        assert chunks.receipt is not None
        chunks.receipt.wait(timeout=60)
    scrape = Scrape(registry)
    transfers = scrape.values("kvlink_transfers_total")
    # A cache, two chunks and their stream; the reader's own part of that stream is no payload.
    assert transfers == {("producer", "shm", "released"): 4, ("consumer", "shm", "received"): 3}
    assert scrape.values("kvlink_errors_total") == {}


def test_asyncio_and_batches_are_counted(
    run: Callable[[Test], None], registry: CollectorRegistry
) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        await producer.put(Recipe("a").make())
        (await consumer.get("a", timeout=60)).release()
        receipts = producer.link.put_many([payload(f"b{n}") for n in range(5)])
        with await consumer.get_many([f"b{n}" for n in range(5)], timeout=60):
            pass
        for receipt in receipts:
            await producer.wait(receipt, timeout=60)

    run(test)
    transfers = Scrape(registry).values("kvlink_transfers_total")
    assert sum(v for labels, v in transfers.items() if labels[0] == "consumer") == 6


def test_labels_are_bounded(sockets: str, registry: CollectorRegistry) -> None:
    def transfer(keys: range) -> None:
        for key in keys:
            receipt = producer.put(payload(f"key-{key}"))
            consumer.get(f"key-{key}", timeout=60).release()
            receipt.wait(timeout=60)

    with (
        KVLink.serve("inproc://bounded") as producer,
        KVLink.connect("inproc://bounded", timeout=60) as consumer,
    ):
        transfer(range(10))
        before = len(Scrape(registry).samples)
        transfer(range(10, 1000))
        scrape = Scrape(registry)
    assert len(scrape.samples) == before
    assert scrape.values("kvlink_transfers_total")["consumer", "inproc", "received"] == 1000
    assert not [one for one in scrape.samples if "key" in str(one.labels)]


def test_what_is_pending_is_bounded(registry: CollectorRegistry) -> None:
    counted = observers.registered[-1]
    assert isinstance(counted, metrics.LinkMetrics)
    for number in range(2 * metrics.MOST_PENDING + 5):
        observers.received("shm", f"k{number}", 1, {"wait": 0.0}, None)
        assert len(counted._pending) < metrics.MOST_PENDING
    received = Scrape(registry).values("kvlink_transfers_total")
    assert received == {("consumer", "shm", "received"): 2 * metrics.MOST_PENDING + 5}


def test_the_bucket_is_that_of_observe(registry: CollectorRegistry) -> None:
    for seconds in (0.0, 1e-5, 1.1e-5, 0.3, 30.0, 31.0):
        observers.received("shm", "k", 1 << 10, {"wait": seconds}, None)
    buckets = Scrape(registry).values("kvlink_phase_seconds_bucket")
    of_wait = [
        buckets.get(("consumer", "wait", str(bound)), 0) for bound in (1e-5, 3e-5, 0.3, 30.0)
    ]
    assert [*of_wait, buckets["consumer", "wait", "+Inf"]] == [2, 3, 4, 5, 6]


def test_it_is_off_until_it_is_enabled(sockets: str) -> None:
    registry = CollectorRegistry()
    assert observers.registered == ()
    metrics.enable(registry)
    metrics.enable(registry)
    with pytest.raises(SchemaError, match="disable"):
        metrics.enable(CollectorRegistry())
    assert len(observers.registered) == 1
    with KVLink.serve("shm://off", directory=sockets) as producer:
        producer.put(payload("a"))
        producer.abort("a")
        assert Scrape(registry).values("kvlink_transfers_total")
        metrics.disable()
        metrics.disable()
        producer.put(payload("a"))
    assert observers.registered == ()
    assert Scrape(registry).samples == []
    metrics.enable(registry)
    metrics.disable()


def test_an_unknown_error_has_the_name_of_its_base() -> None:
    class Own(TransferFailed):
        pass

    names = [error_name(error) for error in (Own("of a test"), RuntimeError(), MemoryError())]
    assert names == ["TransferFailed", "other", "other"]


MULTIPROCESS = """
import os, torch
from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.telemetry import metrics
from prometheus_client import CollectorRegistry
metrics.enable(CollectorRegistry())
with KVLink.serve("inproc://m") as producer, KVLink.connect("inproc://m", timeout=60) as consumer:
    receipt = producer.put(TensorTransferData("a", {"h": torch.ones(4)}))
    consumer.get("a", timeout=60).release()
    receipt.wait(timeout=60)
os._exit(0)
"""
GATHERED = """
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
labels = {"role": "consumer", "scheme": "inproc", "outcome": "received"}
print(registry.get_sample_value("kvlink_transfers_total", labels))
print(registry.get_sample_value("kvlink_transfer_bytes_count", {"role": "producer"}))
"""


def test_another_process_gathers_those_of_several(tmp_path: Path) -> None:
    """prometheus-client's multiprocess mode; two processes that end without notice."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=True)
    for _ in range(2):
        run([sys.executable, "-c", MULTIPROCESS])
    assert run([sys.executable, "-c", GATHERED]).stdout.split() == ["2.0", "2.0"]
