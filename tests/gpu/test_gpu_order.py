"""Copies on a device run after the caller's stream, before its next work, and wait for no other."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheTransferData
from omni_kvlink._native import cuda
from omni_kvlink.copier import PinnedCopier
from omni_kvlink.memory.mapping import Mapping
from support.devices.gpu import DEVICE, ENGINES, GPU, KERNEL, occupy
from support.devices.gpu import collected as collected
from support.devices.gpu import loaded as loaded
from support.payloads.random_caches import bits, noise

if TYPE_CHECKING:
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

pytestmark = GPU
LONG = 2_000_000_000  # clock cycles: about a second
SHAPE = (4096, 4, 128)


@pytest.fixture(autouse=True, params=[ENGINES, KERNEL])
def crossover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, request.param)


def payload(layers: int = 1) -> tuple[list[torch.Tensor], Manifest, Region]:
    """Sources on the device, and memory that was used once: nothing is to be set up any more."""
    parts = [noise(seed, SHAPE, "bfloat16").to(DEVICE) for seed in range(2 * layers)]
    about = {"kv_lens": [SHAPE[0]], "ropes": [0], "num_layers": layers}
    data = KVCacheTransferData(
        "r", {"key_cache": parts[::2], "value_cache": parts[1::2]}, (), about
    )
    plan = data.plan()
    region = Mapping.anonymous(plan.nbytes).region
    PinnedCopier().gather(parts, plan, region)
    torch.cuda.synchronize()
    return parts, plan, region


def landed(plan: Manifest, region: Region, number: int) -> bytes:
    spec = plan.tensors[number]
    return bytes(region.view()[plan.header_nbytes + spec.start : plan.header_nbytes + spec.stop])


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_the_stream_still_writes_is_copied(own_stream: bool) -> None:
    sources, plan, region = payload()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        occupy(LONG)
        for source in sources:
            source.fill_(7)
        PinnedCopier().gather(sources, plan, region)
    for number, source in enumerate(sources):
        assert landed(plan, region, number) == bits(torch.full_like(source, 7, device="cpu"))


def test_what_the_stream_still_writes_is_overwritten() -> None:
    """And what it does next sees the new bytes."""
    sources, plan, region = payload()
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    targets = [torch.empty_like(source) for source in sources]
    occupy(LONG)
    for target in targets:
        target.fill_(9)
    PinnedCopier().scatter(manifest, region, targets)
    seen = [target.clone() for target in targets]
    for got, source in zip(seen, sources, strict=True):
        assert torch.equal(got.view(torch.int16), source.view(torch.int16))


def test_another_streams_kernel_does_not_delay_copies() -> None:
    sources, plan, region = payload()
    manifest = plan.with_digests(PinnedCopier().gather(sources, plan, region))
    PinnedCopier().scatter(manifest, region, sources)
    other, spun = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(other):
        occupy(2 * LONG)
        spun.record()
    own = torch.cuda.Stream()  # not the default stream, which synchronizes with others
    with torch.cuda.stream(own):
        PinnedCopier().gather(sources, plan, region)
        PinnedCopier().scatter(manifest, region, sources)
    assert not spun.query(), "a copy waited for the whole device"
    torch.cuda.synchronize()


def test_layers_are_copied_while_the_next_one_is_computed() -> None:
    sources, plan, region = payload(layers=4)
    copier, handles = PinnedCopier(), []
    for layer in range(4):
        own = slice(2 * layer, 2 * layer + 2)
        for source in sources[own]:
            source.fill_(layer)
        part = plan.only(plan.tensors[own])
        handles.append(copier.begin_gather(sources[own], part, region))
        occupy(LONG // 10)
    done = torch.cuda.Event()
    done.record()
    digests = handles[0].wait()
    assert not done.query(), "the first layer waited for the last"
    for handle in handles[1:]:
        digests += handle.wait()
    PinnedCopier().verify(plan.with_digests(digests), region)
    for number, source in enumerate(sources):
        assert landed(plan, region, number) == bits(source.cpu())


def test_a_dropped_handle_waits_for_its_copies() -> None:
    sources, plan, region = payload()
    occupy(LONG // 4)
    for source in sources:
        source.fill_(5)
    del source
    handle = PinnedCopier().begin_gather(sources, plan, region)
    del handle
    gc.collect()
    assert landed(plan, region, 0) == bits(sources[0].cpu())


def test_memory_that_was_unmapped_can_be_registered_again() -> None:
    """Mappings come and go at the same addresses."""
    for _ in range(5):
        region = payload()[2]
        assert cuda.register(region, 0) is None
        del region
        gc.collect()


def test_a_crossover_is_measured_once() -> None:
    assert cuda.measured_crossovers(0) == cuda.measured_crossovers(0)
