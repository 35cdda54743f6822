"""The timeout of a put bounds all of it: mapping and copying stop, nothing is announced or kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, TensorTransferData, TransferFailed, TransferTimeout
from omni_kvlink.copier import NativeCopier, TorchCopier
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from omni_kvlink.testing.caches import Recipe
from omni_kvlink.testing.rig import expect, until, until_requested
from support.connectors.zmq_addresses import fresh_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVConsumer, KVProducer
    from omni_kvlink.copier import Copier

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
NBYTES = 24 << 20
"""Bytes of a payload: more than a copier or a mapping moves before it looks at the clock."""
SHORT = 1e-6
"""Seconds that have passed when a put begins to map or to copy."""


def payload(key: str = "k", nbytes: int = NBYTES) -> TensorTransferData:
    return TensorTransferData(key, {"x": torch.full((nbytes,), 7, dtype=torch.uint8)})


def sources() -> dict[str, Any]:
    """Tensors of `NBYTES` that the copiers copy in different ways."""
    flat = torch.full((NBYTES,), 7, dtype=torch.uint8)
    pool = flat.view(NBYTES // 4096, 16, 2, 128)
    table = BlockTable.of_blocks(range(len(pool))[::-1], block_size=16, tokens=16 * len(pool))
    gaps = torch.full((NBYTES // 4096, 4, 4, 4, 4, 32), 7, dtype=torch.uint8)[..., ::2]
    return {
        "dense": flat,
        "strided": torch.full((NBYTES // 64, 128), 7, dtype=torch.uint8)[:, ::2],
        "paged": PagedTensor(pool, table, "pool"),
        "more dimensions than the library knows": gaps,
    }


@pytest.mark.parametrize("copier", [NativeCopier, TorchCopier])
@pytest.mark.parametrize("kind", [*sources()])
def test_a_copy_stops(copier: Callable[[], Copier], kind: str) -> None:
    source = sources()[kind]
    plan = TensorTransferData("k", {"x": torch.empty(source.shape, dtype=torch.uint8)}).plan(
        digests=True
    )
    region, mine = Region.private(plan.nbytes), copier()
    ahead, whole = time.monotonic() + 3600, plan.nbytes - plan.header_nbytes
    digests = mine.gather([source], plan, region, deadline=ahead)
    data = region.view(plan.header_nbytes, plan.nbytes)
    assert data == bytes([7]) * whole
    data[:] = bytes(whole)
    error = expect(TransferTimeout, mine.gather, [source], plan, region, deadline=time.monotonic())
    assert "copying" in str(error)
    assert 0 < bytes(data).count(7) < whole, "a part was copied"
    data[:] = bytes([7]) * whole
    assert mine.digest(plan, region, deadline=ahead) == digests
    expect(TransferTimeout, mine.digest, plan, region, deadline=time.monotonic())


@pytest.mark.parametrize("make", [Mapping.anonymous, Mapping.for_readers])
def test_mapping_stops(make: Callable[..., Mapping]) -> None:
    seen_calls = list[None]()

    def is_wanted() -> bool:
        seen_calls.append(None)
        if len(seen_calls) == 2:
            raise TransferTimeout("the deadline")
        return True

    if make == Mapping.for_readers:
        expect(TransferTimeout, make, "kvlink-test", 64 << 20, is_wanted)
    else:
        expect(TransferTimeout, make, 64 << 20, is_wanted)
    assert len(seen_calls) == 2


@pytest.fixture(params=["shm", "ipc"])
def producer(request: pytest.FixtureRequest, sockets: str) -> Iterator[KVProducer]:
    """A producer over shared memory with the library, and over ZeroMQ with torch."""
    if request.param == "shm":
        url, copier = f"shm://put-deadline?directory={sockets}", "native"
    else:
        url, copier = fresh_url("ipc", sockets), "torch"
    with KVLink.serve(url, copier=copier, quota=96 << 20) as link:
        yield link


@pytest.fixture
def consumer(producer: KVProducer) -> Iterator[KVConsumer]:
    with KVLink.connect(producer.url, timeout=60) as link:
        yield link


def check_next(producer: KVProducer, consumer: KVConsumer, key: str = "k") -> None:
    """Nothing is kept of a put that timed out, its readers know nothing of it, the next works."""
    stats = producer.stats()
    assert not stats["memory"]["used"]
    assert not stats["transfers"]["live"]
    mentions = ("not announced",)
    expect(TransferTimeout, consumer.get, key, timeout=0.01, mentions=mentions)
    receipt = producer.put(payload(key), timeout=0.0)  # waits for nobody, and has no limit
    with consumer.get(key, timeout=60, verify="full") as data:
        tensor: Any = data["x"]
        assert torch.equal(tensor, torch.full_like(tensor, 7))
    del data, tensor
    receipt.wait(timeout=60)


def map_memory(producer: KVProducer) -> None:
    """So that a put has only to copy."""
    producer.put(payload("first"))
    producer.abort("first")


def test_a_put_that_maps(producer: KVProducer, consumer: KVConsumer) -> None:
    error = expect(TransferTimeout, producer.put, payload(), timeout=SHORT)
    assert (error.key, error.waited) == ("k", SHORT)
    assert "mapping" in error.phase
    assert "timeout=" in str(error)
    assert producer.stats()["memory"]["mapped"] == 0
    check_next(producer, consumer)


def test_a_put_that_copies(producer: KVProducer, consumer: KVConsumer) -> None:
    map_memory(producer)
    error = expect(TransferTimeout, producer.put, payload(), timeout=SHORT)
    assert (error.key, error.waited, error.phase) == ("k", SHORT, "copying its tensors")
    assert "timeout=" in str(error)
    check_next(producer, consumer)


def test_put_many(producer: KVProducer, consumer: KVConsumer) -> None:
    both = [payload("a"), payload("k")]
    expect(TransferTimeout, producer.put_many, both, timeout=SHORT)
    check_next(producer, consumer)
    small = [payload(str(number), 16) for number in range(10)]
    expect(TransferTimeout, producer.put_many, small, timeout=SHORT)
    check_next(producer, consumer, "9")


def test_append(producer: KVProducer, consumer: KVConsumer) -> None:
    """The stream goes on: a chunk that timed out was not sent."""
    chunk = {"x": torch.full((NBYTES,), 7, dtype=torch.uint8)}
    with producer.open_stream("s", chunk) as out:
        expect(TransferTimeout, out.append, chunk, timeout=SHORT)
        map_memory(producer)
        expect(TransferTimeout, out.append, chunk, timeout=SHORT)
        assert out.append(chunk) == 0
    with consumer.read_stream("s", timeout=60, verify="full") as chunks:
        for received in chunks:
            assert received.number == 0
            assert bool((received.data["x"] == 7).all())
        del received


def test_memory_of_allocations_and_streams(producer: KVProducer, consumer: KVConsumer) -> None:
    cache = Recipe("k", layers=2, tokens=50_000).make()
    expect(TransferTimeout, producer.allocate, cache, timeout=SHORT, mentions=("mapping",))
    expect(TransferTimeout, producer.stream_put, cache, timeout=SHORT, mentions=("mapping",))
    check_next(producer, consumer)


def test_what_computes_digests_in_a_thread(producer: KVProducer) -> None:
    allocation = producer.allocate(payload())
    tensor: Any = allocation.data["x"]
    tensor.fill_(7)
    receipt = producer.put(allocation.data, background=True, timeout=SHORT)
    error = expect(TransferFailed, receipt.wait, timeout=60)
    assert "passed while" in str(error)


def test_a_reader_that_waits_for_a_put_that_times_out(sockets: str) -> None:
    """It was told of the first tensors; it learns that no others come."""
    with (
        KVLink.serve(fresh_url("ipc", sockets)) as producer,
        KVLink.connect(producer.url, timeout=60) as consumer,
    ):
        map_memory(producer)
        pending = begin_get(consumer, "k", timeout=60)
        until_requested(producer, 1)
        expect(TransferTimeout, producer.put, payload(), timeout=SHORT, mentions=("'k'",))
        expect(TransferFailed, pending.wait, timeout=60)
        del pending
        until(lambda: not producer.stats()["memory"]["used"], "it is freed")
