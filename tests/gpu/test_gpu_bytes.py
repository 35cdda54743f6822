"""On a device: the right bytes, from every layout and dtype, by both ways of copying."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import BlockTable, KVCacheTransferData, PagedTensor
from omni_kvlink._native import cuda
from omni_kvlink.copier import PinnedCopier, TorchCopier, fastest_copier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.testing import check_copier
from support.devices.gpu import DEVICE, ENGINES, GPU, KERNEL, MEASURED, MIXED, Moved, ThroughDevice
from support.devices.gpu import collected as collected
from support.devices.gpu import loaded as loaded
from support.payloads.paged import LAYOUTS, SIZE, about, expected_bytes, table
from support.payloads.random_caches import DTYPES, noise

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = GPU


@pytest.fixture(autouse=True, params=[ENGINES, MIXED, KERNEL, MEASURED])
def crossover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cuda.ENVIRONMENT, request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing may fall back to torch
        yield


def test_the_contract() -> None:
    check_copier(ThroughDevice())


def test_it_is_chosen() -> None:
    copier = fastest_copier()
    assert copier.name == "pinned"
    assert torch.cuda.get_device_name(0) in copier.features


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(layout, by_slot: bool) -> None:  # type: ignore[no-untyped-def]
    for tokens, dtype in itertools.product((1, SIZE, 10), DTYPES):
        source, target = (layout(dtype, seed) for seed in (1, 2))
        there, back = (table(tokens, by_slot=by_slot, seed=seed) for seed in (3, 4))
        data, into = (
            KVCacheTransferData.from_paged(
                "r", *pools, block_size=SIZE, metadata=about(tokens), **tables
            )
            for pools, tables in ((source, there), (target, back))
        )
        plan = data.plan()
        region = Mapping.anonymous(plan.nbytes).region
        digests = PinnedCopier().gather(Moved(data.tensors()).views, plan, region)
        manifest = plan.with_digests(digests)
        TorchCopier().verify(manifest, region)
        ThroughDevice().scatter(manifest, region, into.tensors())
        assert expected_bytes(target, back, tokens) == expected_bytes(source, there, tokens)


def test_a_cache_of_bagels_size() -> None:
    """28 layers × 4096 tokens in random blocks, on the device and back."""
    tokens, size, blocks = 4096, 16, 300
    order = torch.randperm(blocks)[: tokens // size]
    pages = BlockTable.of_blocks(order, block_size=size, tokens=tokens)
    pools = [noise(seed, (blocks, size, 4, 128), "bfloat16").to(DEVICE) for seed in range(56)]
    views = [PagedTensor(pool, pages) for pool in pools]
    data = KVCacheTransferData(
        "r",
        {"key_cache": views[::2], "value_cache": views[1::2]},
        (),
        about(tokens, num_layers=28),
    )
    plan = data.plan()
    mapping = Mapping.shared("kv", plan.nbytes)
    manifest = plan.with_digests(PinnedCopier().gather(data.tensors(), plan, mapping.region))
    TorchCopier().verify(manifest, mapping.region)
    back = [torch.zeros(tokens, 4, 128, dtype=torch.bfloat16, device=DEVICE) for _ in views]
    PinnedCopier().scatter(manifest, mapping.region, back)
    for got, source in zip(back, data.tensors(), strict=True):
        assert isinstance(source, PagedTensor)
        assert torch.equal(got.view(torch.int16), source.dense().view(torch.int16))


def test_host_and_device_in_one_payload() -> None:
    sources = [noise(seed, (40, 2, 8), "bfloat16") for seed in range(4)]
    mixed = [source.to(DEVICE) if number % 2 else source for number, source in enumerate(sources)]
    data = KVCacheTransferData(
        "r", {"key_cache": mixed[:2], "value_cache": mixed[2:]}, (), about(40, num_layers=2)
    )
    plan = data.plan()
    region = Mapping.anonymous(plan.nbytes).region
    manifest = plan.with_digests(PinnedCopier().gather(data.tensors(), plan, region))
    TorchCopier().verify(manifest, region)
    targets = [torch.zeros_like(view) for view in reversed(mixed)]  # the other way round
    PinnedCopier().scatter(manifest, region, targets)
    for got, source in zip(targets, data.tensors(), strict=True):
        assert isinstance(source, torch.Tensor)
        assert torch.equal(got.cpu().view(torch.int16), source.cpu().view(torch.int16))
