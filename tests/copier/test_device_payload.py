"""The pinned copier with payloads in a device's own memory, on the fake device."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import KVCacheTransferData, TensorTransferData
from omni_kvlink._native import cuda
from omni_kvlink._native.crc32c import numpy_crc32c
from omni_kvlink._native.device_memory import DeviceMapping, crcs_of, number_of
from omni_kvlink.copier import PinnedCopier
from omni_kvlink.errors import ClosedError, IntegrityError, NativeError, SchemaError
from omni_kvlink.memory.region import Lease, Region
from omni_kvlink.payload.manifest import Manifest, header_bytes
from omni_kvlink.testing.rig import until
from support.devices.fake_device import ENGINES, KERNEL, FakeDevice
from support.devices.fake_device import device as device
from support.devices.fake_device import directory as directory
from support.devices.native_plans import NEEDS_LIBRARY, plan_of, tensor_of
from support.payloads.paged import LAYOUTS, SIZE, about, expected_bytes, table
from support.payloads.random_caches import DTYPES, bits, noise

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = NEEDS_LIBRARY
MIB = 1 << 20


def gathered(sources: Sequence[torch.Tensor]) -> tuple[Manifest, Region]:
    plan = plan_of(sources)
    region = DeviceMapping(0, plan.nbytes).region
    return plan.with_digests(PinnedCopier().gather(sources, plan, region)), region


def true_digest(data: bytes) -> str:
    return "".join(f"{numpy_crc32c(data[at : at + MIB]):08x}" for at in range(0, len(data), MIB))


@pytest.mark.parametrize("crossover", [ENGINES, KERNEL, ""])
def test_dense_tensors(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, crossover: str) -> None:
    monkeypatch.setenv(cuda.ENVIRONMENT, crossover)
    shapes = [(1000, 3, 7), (777,), (1,), (0, 5), (513, 1027)]
    sources = [noise(9, shape, dtype) for dtype, shape in itertools.product(DTYPES, shapes)]
    sources.append(noise(8, (300, 40), "float32")[::3, ::2])
    before = device.crossed_nbytes
    manifest, region = gathered(sources)
    assert [spec.digest for spec in manifest.tensors] == [true_digest(bits(s)) for s in sources]
    targets = [torch.zeros_like(source) for source in sources]
    PinnedCopier().scatter(manifest, region, targets)
    assert [bits(target) for target in targets] == [bits(source) for source in sources]
    assert device.crossed_nbytes - before < 64 << 10
    assert PinnedCopier().digest(manifest, region) == [s.digest for s in manifest.tensors]


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_pages(device: FakeDevice, by_slot: bool) -> None:
    copier = PinnedCopier()
    for layout, tokens, dtype in itertools.product(LAYOUTS, (1, SIZE, 10), ("bfloat16", "int8")):
        source, target = (layout(dtype, seed) for seed in (1, 2))
        there, back = (table(tokens, by_slot=by_slot, seed=seed) for seed in (3, 4))
        data, into = (
            KVCacheTransferData.from_paged(
                "r", *pools, block_size=SIZE, metadata=about(tokens), **tables
            )
            for pools, tables in ((source, there), (target, back))
        )
        plan = data.plan()
        region = DeviceMapping(0, plan.nbytes).region
        handle = copier.begin_gather(data.tensors(), plan, region)
        manifest = plan.with_digests(handle.wait())
        copier.begin_scatter(manifest, region, into.tensors()).wait()
        assert expected_bytes(target, back, tokens) == expected_bytes(source, there, tokens)


def test_a_wrong_byte(device: FakeDevice) -> None:
    """It is named, and `begin_scatter` writes nothing."""
    sources = [tensor_of((300, 2, 1000), torch.bfloat16, seed) for seed in range(2)]
    manifest, region = gathered(sources)
    spec, copier = manifest.tensors[1], PinnedCopier()
    at = manifest.header_nbytes + spec.start + MIB + 3
    region.write(at, bytes([region.read(at, at + 1)[0] ^ 1]))
    with pytest.raises(IntegrityError, match="MiB 1 of 2"):
        copier.verify(manifest, region)
    targets = [torch.zeros_like(source) for source in sources]
    with pytest.raises(IntegrityError, match="MiB 1 of 2"):
        copier.begin_scatter(manifest, region, targets)
    assert not any(target.any() for target in targets)
    with pytest.raises(IntegrityError, match="MiB 1 of 2"):
        copier.scatter(manifest, region, targets)


def test_tensors_that_torch_copies(device: FakeDevice) -> None:
    sources = [tensor_of((40, 2, 8), torch.bfloat16, seed) for seed in range(6)]
    targets = [torch.zeros_like(source) for source in sources]
    here = {id(view) for view in [*sources[::2], *targets[1::2]]}
    device.holds = lambda view: id(view) in here
    manifest, region = gathered(sources)
    assert [spec.digest for spec in manifest.tensors] == [true_digest(bits(s)) for s in sources]
    PinnedCopier().scatter(manifest, region, targets)
    assert [bits(target) for target in targets] == [bits(source) for source in sources]


def test_another_device(device: FakeDevice) -> None:
    sources = [tensor_of((40, 2, 8), torch.bfloat16, 1)]
    plan = plan_of(sources)
    with device.set("devices", 2):
        region = DeviceMapping(1, plan.nbytes).region  # torch copies between devices
        digests = PinnedCopier().gather(sources, plan, region)
        assert digests == [true_digest(bits(sources[0]))]
        assert region.device == "cuda:1"
        del region


def test_targets_in_the_payload_itself(device: FakeDevice) -> None:
    manifest, region = gathered([tensor_of((40, 2, 8), torch.bfloat16, 1)])
    start = manifest.header_nbytes + manifest.tensors[0].start
    inside = torch.frombuffer(region.span, dtype=torch.bfloat16)  # type: ignore[call-overload, unused-ignore]
    target = inside[start // 2 :][: 40 * 16].view(40, 2, 8)
    with pytest.raises(SchemaError, match="the target lies in the payload itself"):
        PinnedCopier().scatter(manifest, region, [target])


def test_memory_of_a_device(device: FakeDevice) -> None:
    # A link of an earlier test may still be mapping memory of the same device.
    until(lambda: not any(each.name == "kvlink-memory" for each in threading.enumerate()), "idle")
    before = device.allocated_nbytes
    region = DeviceMapping(0, 3 * MIB).region
    region.write(MIB - 2, b"abcd")
    assert region.read(MIB - 2, MIB + 2) == b"abcd"
    assert region.slice(MIB, 2).read() == b"cd"
    with pytest.raises(ValueError, match="no view on the host"):
        region.view()
    with pytest.raises(ValueError, match="of a region of"):
        region.write(3 * MIB - 1, b"ab")
    with pytest.raises(ValueError, match="not this library's"):
        Region(region.address, 8, object(), device="cuda:0").read()
    assert crcs_of(region, [(MIB - 2, MIB + 2), (0, 0)]) == [numpy_crc32c(b"abcd"), 0]
    part = region.slice(0, 8)
    del region
    assert device.allocated_nbytes - before == 3 * MIB
    del part
    assert device.allocated_nbytes == before
    with device.set("refuses_memory", 1), pytest.raises(NativeError, match="cudaMalloc"):
        DeviceMapping(0, 64)
    assert [number_of(name) for name in ("cuda:12", "cuda", "cpu", "cuda:x")] == [12, *[None] * 3]


def test_a_header_is_read_in_two_pieces(device: FakeDevice) -> None:
    """Not the whole payload; a wrong length is left to `Manifest.decode`."""
    manifest = TensorTransferData("r", {"t": tensor_of((4000, 2, 8), torch.bfloat16, 1)}).plan()
    region = DeviceMapping(0, manifest.nbytes).region
    region.write(0, manifest.encode())
    before = device.crossed_nbytes
    found = header_bytes(region)
    assert Manifest.decode(found, region.nbytes) == manifest
    assert device.crossed_nbytes - before == 8 + manifest.header_nbytes
    region.write(0, b"\xff" * 8)
    assert len(header_bytes(region, 0, 512)) == 512


def test_a_forked_child_has_no_device(device: FakeDevice) -> None:
    lease = Lease(DeviceMapping(0, 4096).region, lambda: None)
    child = os.fork()
    if child == 0:
        try:
            lease.region  # noqa: B018
        except ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not lease.region.is_lost
