"""On a fake device: copies follow the stream, or the moment, that their caller means."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVConsumer, KVLink, KVProducer
from omni_kvlink._native import cuda
from omni_kvlink.aio import AsyncKVProducer
from omni_kvlink.copier import CurrentStreams, PinnedCopier, StreamEvents, TorchCopier, streams
from omni_kvlink.errors import IntegrityError, SchemaError, TransferFailed
from omni_kvlink.memory.mapping import Mapping
from support.devices.fake_device import ENGINES, KERNEL, FakeDevice, address
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.devices.native_plans import NEEDS_LIBRARY, plan_of, tensor_of
from support.link.ends import use_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

pytestmark = NEEDS_LIBRARY
ENGINE, OTHER = 64, 65
"""Streams of the fake device."""


def in_thread(call: Callable[[], object]) -> object:
    """The result of a call in a thread whose current stream is the default one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def sources() -> list[torch.Tensor]:
    return [tensor_of((5, 2, 8), torch.float32, seed) for seed in (1, 2)]


def committed(tensors: list[torch.Tensor]) -> tuple[Manifest, Region]:
    """A payload that holds the tensors, with their digests."""
    plan = plan_of(tensors)
    region = Mapping.anonymous(plan.nbytes).region
    return plan.with_digests(PinnedCopier().gather(tensors, plan, region)), region


def part(manifest: Manifest, region: Region, number: int) -> bytes:
    spec = manifest.tensors[number]
    start = manifest.header_nbytes + spec.start
    return bytes(region.view(start, start + spec.nbytes))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# ---- after what was recorded


def test_a_thread_copies_what_another_one_recorded(device: FakeDevice) -> None:
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    seven, nine = (raw(torch.full_like(tensors[0], value)) for value in (7, 9))
    with device.on_stream(ENGINE):
        device.enqueue(ENGINE, lambda: tensors[0].fill_(7))
        events = copier.record(tensors)
        device.enqueue(ENGINE, lambda: tensors[0].fill_(9))
    assert not events.is_done()

    def gather(after: StreamEvents | None) -> bytes:
        digests = copier.begin_gather(tensors, manifest, region, after=after).wait()
        assert digests == copier.digest(manifest, region)  # the host's, of the payload
        return part(manifest, region, 0)

    assert in_thread(lambda: gather(None)) not in (seven, nine)  # its own stream holds nothing
    assert in_thread(lambda: gather(events)) == seven
    assert events.is_done()
    events.wait()
    assert in_thread(lambda: gather(events)) == seven  # there is nothing to wait for any more
    device.run(ENGINE)
    assert raw(tensors[0]) == nine


def test_a_scatter_ends_when_its_end_is_waited_for(device: FakeDevice) -> None:
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    end = copier.begin_scatter(manifest, region, targets)
    assert not end.is_done()
    assert not any(target.any() for target in targets)
    end.wait()
    assert end.is_done()
    assert list(map(raw, targets)) == list(map(raw, tensors))


def test_a_stream_waits_for_a_scatter(device: FakeDevice) -> None:
    """It follows what was recorded; a stream waits for it, and no thread."""
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    seen: list[bytes] = []
    with device.on_stream(ENGINE):
        device.enqueue(ENGINE, lambda: targets[0].fill_(5))
        events = copier.record(targets)
    end = in_thread(lambda: copier.begin_scatter(manifest, region, targets, after=events))
    assert isinstance(end, StreamEvents)
    device.run(0)  # the thread's own stream was not made to wait
    assert not targets[0].any()
    blocked = device.get("blocking")
    with device.on_stream(OTHER), device.without_blocking():
        end.make_streams_wait()
        device.enqueue(OTHER, lambda: seen.append(raw(targets[0])))
    assert device.get("blocking") == blocked
    device.run(OTHER)
    assert seen == [raw(tensors[0])]
    device.run(ENGINE)
    assert raw(targets[0]) == raw(tensors[0])  # the 5 was written before, not now
    end.wait()


def test_no_call_of_the_engines_thread_blocks(device: FakeDevice) -> None:
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    copier.record(tensors).wait()  # the first event is created
    before = device.get("blocking")
    with device.without_blocking():
        events = copier.record(tensors)
        handle = copier.begin_gather(tensors, manifest, region, after=events)
        assert device.get("blocking") == before
        handle.wait()
        assert device.get("blocking") > before  # this one does


@pytest.mark.parametrize("crossover", [ENGINES, KERNEL])
def test_copies_while_another_thread_captures_a_graph(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, crossover: str
) -> None:
    """CUDA refuses most calls to all threads then, unless a thread asks for them."""
    monkeypatch.setenv(cuda.ENVIRONMENT, crossover)
    tensors = sources()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    with device.set("capturing_elsewhere", 1):
        manifest, region = committed(tensors)  # memory to be page-locked
        events = PinnedCopier().record(targets)
        PinnedCopier().begin_scatter(manifest, region, targets, after=events).wait()
        before = device.get("unregistered")
        del region
        gc.collect()
        assert device.get("unregistered") == before + 1
    assert list(map(raw, targets)) == list(map(raw, tensors))


def test_wrong_bytes_are_not_scattered(device: FakeDevice) -> None:
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    region.view()[manifest.header_nbytes + manifest.tensors[1].start] ^= 1
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    with pytest.raises(IntegrityError, match="layer 1, K"):
        copier.begin_scatter(manifest, region, targets)
    device.run(0)
    assert not any(target.any() for target in targets)


def test_the_end_of_a_scatter_keeps_the_payload(device: FakeDevice) -> None:
    tensors = sources()
    manifest, region = committed(tensors)
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    end = PinnedCopier().begin_scatter(manifest, region, targets)
    del region
    assert not targets[0].any()
    del end  # blocks until the copies are complete
    assert list(map(raw, targets)) == list(map(raw, tensors))


def test_events_of_other_tensors(device: FakeDevice) -> None:
    tensors, copier = sources(), PinnedCopier()
    manifest, region = committed(tensors)
    device.holds = lambda view: False
    nothing = copier.record(tensors)
    assert nothing.is_done()
    device.holds = lambda view: True
    with pytest.raises(SchemaError, match=r"was not recorded for tensors on cuda:0.*call its"):
        copier.begin_gather(tensors, manifest, region, after=nothing)
    with pytest.raises(SchemaError, match="was not recorded"):
        copier.begin_scatter(manifest, region, tensors, after=nothing)


def test_copies_of_torch_follow_it_too(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory cannot be page-locked, torch copies on the thread's own stream."""
    tensors, copier = sources(), PinnedCopier()
    plan = plan_of(tensors)
    waits: list[int] = []
    monkeypatch.setattr(StreamEvents, "make_streams_wait", lambda self: waits.append(device.stream))
    with device.on_stream(ENGINE):
        events = copier.record(tensors)
    region = Mapping.anonymous(plan.nbytes).region
    with device.set("refuses_registration", 1), device.on_stream(OTHER):
        with pytest.warns(RuntimeWarning, match="cannot be page-locked"):
            handle = copier.begin_gather(tensors, plan, region, after=events)
        manifest = plan.with_digests(handle.wait())
        end = copier.begin_scatter(manifest, region, tensors, after=events)
    assert waits == [OTHER, OTHER]
    assert end.devices == {0}  # what torch copied may be in progress on the device
    end.wait()


def test_host_tensors_have_no_events() -> None:
    tensors, copier = sources(), TorchCopier()
    plan = plan_of(tensors)
    region = Mapping.anonymous(plan.nbytes).region
    events = copier.record(tensors)
    digests = copier.begin_gather(tensors, plan, region, after=events).wait()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    end = copier.begin_scatter(plan.with_digests(digests), region, targets, after=events)
    assert end.is_done()
    assert list(map(raw, targets)) == list(map(raw, tensors))


# ---- through a link


def cache(tensors: list[torch.Tensor], request_id: str = "r") -> KVCacheTransferData:
    about = {"kv_lens": [5], "ropes": [5], "num_layers": 1}
    blocks = {"key_cache": tensors[:1], "value_cache": tensors[1:]}
    return KVCacheTransferData(request_id, blocks, (), about)


def test_a_layer_through_a_link(device: FakeDevice, ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    use_copier(PinnedCopier(), producer, consumer)
    tensors = sources()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    with device.on_stream(ENGINE):
        device.enqueue(ENGINE, lambda: tensors[0].fill_(7))
        written = producer.record(tensors)
        device.enqueue(ENGINE, lambda: tensors[0].fill_(9))

    def write() -> None:
        with producer.stream_put(cache(tensors)) as out:
            out.write_layer(0, *tensors, after=written)

    in_thread(write)
    with consumer.stream_get("r", timeout=60) as stream:
        layer = stream.wait_for_layer(0)
        written = layer.begin_scatter(*targets, after=consumer.record(targets))
        assert stream.ledger.copier == "pinned"
        written.wait()
    assert raw(targets[0]) == raw(torch.full_like(tensors[0], 7))
    assert raw(targets[1]) == raw(tensors[1])
    device.run(ENGINE)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    for end in ends:  # the two have one copier
        assert end.stats()["device_copies"] == {
            "pinned": 2 * nbytes,
            "device": 0,
            "pageable": 0,
        }


@pytest.mark.parametrize("rows", [None, range(2, 4)])
def test_a_wrong_byte_is_reported(
    device: FakeDevice,
    ends: tuple[KVProducer, KVConsumer],
    monkeypatch: pytest.MonkeyPatch,
    rows: range | None,
) -> None:
    """Also if only some rows are copied: a digest is of the whole tensor."""
    producer, consumer = ends
    use_copier(PinnedCopier(), producer, consumer)
    tensors = sources()
    receipt = producer.put(cache(tensors))

    def verify(*args: object) -> None:
        raise IntegrityError("layer 0, K: wrong")

    monkeypatch.setattr(PinnedCopier, "verify", verify)
    with consumer.stream_get("r", timeout=60) as stream:
        layer = stream.wait_for_layer(0)
        with pytest.raises(IntegrityError, match="layer 0, K: wrong"):
            layer.begin_scatter(*tensors, rows=rows)
    with pytest.raises(TransferFailed, match="a reader rejected it: layer 0, K: wrong"):
        receipt.wait(timeout=60)


# ---- threads that work for their caller


@pytest.fixture
def torch_streams(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The current stream is the fake device's for torch, too."""

    def use(stream: SimpleNamespace) -> AbstractContextManager[None]:
        return device.on_stream(stream.cuda_stream)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda number: SimpleNamespace(cuda_stream=device.stream)
    )
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(streams, "_raw_stream", None)  # builds of torch with CUDA have one
    return device


@pytest.fixture
def producer(device: FakeDevice, sockets: str) -> Iterator[KVProducer]:
    with KVLink.serve("shm://streams", directory=sockets, copier=PinnedCopier()) as link:
        yield link


def test_current_streams(torch_streams: FakeDevice) -> None:
    with torch_streams.on_stream(ENGINE):
        current = CurrentStreams()
        assert streams.current_stream(0) == ENGINE
    assert in_thread(lambda: streams.current_stream(0)) == 0
    assert in_thread(lambda: current.call(lambda: streams.current_stream(0))) == ENGINE


def test_without_cuda_there_are_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not used CUDA opens no context by asking."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert CurrentStreams().call(threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize("begin", ["awaited", "task"])
def test_an_asyncio_put_follows_its_callers_stream(
    torch_streams: FakeDevice, producer: KVProducer, sockets: str, begin: str
) -> None:
    tensors = sources()
    expected = raw(torch.full_like(tensors[0], 7))

    async def put() -> None:
        with torch_streams.on_stream(ENGINE):
            torch_streams.enqueue(ENGINE, lambda: tensors[0].fill_(7))
            putting = AsyncKVProducer(producer).put(cache(tensors))
            if begin == "awaited":
                await putting
                return
        await asyncio.create_task(putting)

    asyncio.run(put())
    assert received(producer.url, sockets) == expected


def test_an_asyncio_stream_follows_its_callers_stream(
    torch_streams: FakeDevice, producer: KVProducer, sockets: str
) -> None:
    tensors = sources()
    expected = raw(torch.full_like(tensors[0], 7))

    async def put() -> None:
        async with AsyncKVProducer(producer).stream_put(cache(tensors)) as out:
            with torch_streams.on_stream(ENGINE):
                torch_streams.enqueue(ENGINE, lambda: tensors[0].fill_(7))
                await out.write_layer(0, *tensors)

    asyncio.run(put())
    assert received(producer.url, sockets) == expected


def test_a_background_put_follows_its_callers_stream(
    torch_streams: FakeDevice, producer: KVProducer, sockets: str
) -> None:
    """One tensor is in place, and one is copied by the thread."""
    tensors = sources()
    expected = raw(torch.full_like(tensors[0], 7))
    allocated = producer.allocate(cache(tensors)).data
    in_place = allocated.tensors()[1]
    assert isinstance(in_place, torch.Tensor)
    in_place.copy_(tensors[1])
    torch_streams.holds = lambda view: address(view) == tensors[0].data_ptr()
    with torch_streams.on_stream(ENGINE):
        torch_streams.enqueue(ENGINE, lambda: tensors[0].fill_(7))
        producer.put(cache([tensors[0], in_place]), background=True)
    del in_place, allocated
    assert received(producer.url, sockets) == expected


def received(url: str, directory: str) -> bytes:
    """The bytes of K as a consumer receives them."""
    with (
        KVLink.connect(url, timeout=60, directory=directory, copier="native") as consumer,
        consumer.get("r", timeout=60, verify="full") as data,
    ):
        first = data.tensors()[0]
        assert isinstance(first, torch.Tensor)
        return raw(first)
