"""On a device: threads that copy for another one, and beside one that captures a graph."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVLink
from omni_kvlink._native import cuda
from omni_kvlink.aio import AsyncKVProducer
from omni_kvlink.copier import PinnedCopier
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.memory.mapping import Mapping
from support.devices.gpu import DEVICE, ENGINES, GPU, KERNEL, MEASURED, occupy
from support.devices.gpu import collected as collected
from support.devices.gpu import loaded as loaded
from support.payloads.random_caches import bits, noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

pytestmark = GPU
LONG = 500_000_000  # clock cycles: about a quarter of a second
SHAPE = (1024, 4, 128)


@pytest.fixture(autouse=True, params=[ENGINES, KERNEL])
def crossover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, request.param)


def cache(tensors: list[torch.Tensor]) -> KVCacheTransferData:
    about = {"kv_lens": [SHAPE[0]], "ropes": [0], "num_layers": 1}
    blocks = {"key_cache": tensors[:1], "value_cache": tensors[1:]}
    return KVCacheTransferData("r", blocks, (), about)


def payload() -> tuple[list[torch.Tensor], Manifest, Region]:
    """A key and a value on the device, and memory that holds them, with their digests."""
    tensors = [noise(seed, SHAPE, "bfloat16").to(DEVICE) for seed in range(2)]
    plan = cache(tensors).plan()
    region = Mapping.anonymous(plan.nbytes).region
    return tensors, plan.with_digests(PinnedCopier().gather(tensors, plan, region)), region


def in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def part(manifest: Manifest, region: Region, number: int) -> bytes:
    spec, start = manifest.tensors[number], manifest.header_nbytes
    return bytes(region.view()[start + spec.start : start + spec.stop])


def filled(tensor: torch.Tensor, value: int) -> bytes:
    return bits(torch.full_like(tensor, value, device="cpu"))


def test_a_thread_copies_what_another_one_recorded() -> None:
    tensors, manifest, region = payload()
    copier = PinnedCopier()
    with torch.cuda.stream(torch.cuda.Stream()):
        occupy(LONG)
        tensors[0].fill_(7)
        events = copier.record(tensors)
        assert not events.is_done()
    in_thread(lambda: copier.begin_gather(tensors, manifest, region, after=events).wait())
    assert events.is_done()
    assert part(manifest, region, 0) == filled(tensors[0], 7)


def test_a_stream_waits_for_a_scatter() -> None:
    tensors, manifest, region = payload()
    targets, copier = [torch.zeros_like(tensor) for tensor in tensors], PinnedCopier()
    engine = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(engine):
        occupy(LONG)
        for target in targets:
            target.fill_(9)  # not behind the copies
        events = copier.record(targets)
        end = copier.begin_scatter(manifest, region, targets, after=events)
        assert not end.is_done()
        end.make_streams_wait()
        seen = [target.clone() for target in targets]
    engine.synchronize()
    assert end.is_done()
    assert [bits(each.cpu()) for each in seen] == [bits(each.cpu()) for each in tensors]


@pytest.mark.parametrize("measured", [False, True])
def test_copies_while_another_thread_captures_a_graph(
    monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    if measured:
        monkeypatch.setenv(cuda.ENVIRONMENT, MEASURED)
    tensors, manifest, _ = payload()
    counter, graph = torch.zeros(8, device=DEVICE), torch.cuda.CUDAGraph()
    targets = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> None:
        region = Mapping.anonymous(manifest.nbytes).region  # to be page-locked
        copier = PinnedCopier()
        handle = copier.begin_gather(tensors, manifest, region)
        copier.begin_scatter(manifest.with_digests(handle.wait()), region, targets).wait()

    with torch.cuda.graph(graph):
        counter += 1
        in_thread(copy)
        counter += 1
    graph.replay()
    torch.cuda.synchronize()
    assert counter.tolist() == [2.0] * 8
    assert [bits(each.cpu()) for each in targets] == [bits(each.cpu()) for each in tensors]


def test_a_captured_stream_is_refused() -> None:
    tensors, manifest, region = payload()
    copier, graph = PinnedCopier(), torch.cuda.CUDAGraph()
    held = torch.zeros(8, device=DEVICE)
    with torch.cuda.graph(graph):
        held += 1
        with pytest.raises(SchemaError, match="being captured into a graph"):
            copier.begin_gather(tensors, manifest, region)
        with pytest.raises(NativeError, match="being captured into a graph"):
            copier.record(tensors)
    graph.replay()
    torch.cuda.synchronize()
    assert held.tolist() == [1.0] * 8


def test_an_asyncio_put_follows_its_callers_stream(sockets: str) -> None:
    tensors, _, _ = payload()

    async def put() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            occupy(LONG)
            tensors[0].fill_(7)
            putting = AsyncKVProducer(producer).put(cache(tensors))
        await putting

    with (
        KVLink.serve("shm://gpu", directory=sockets) as producer,
        KVLink.connect("shm://gpu", timeout=30, directory=sockets) as consumer,
    ):
        asyncio.run(put())
        with consumer.get("r", timeout=30) as data:
            assert bits(data.tensors()[0]) == filled(tensors[0], 7)
        del data
