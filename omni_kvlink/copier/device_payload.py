"""Payloads in a CUDA device's memory: digests computed there, and copies that torch makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink._native import device_memory
from omni_kvlink.copier.streams import synchronize
from omni_kvlink.payload.digests import compare
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import readable, writable
from omni_kvlink.payload.views import TensorView, dense, tensor_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


def is_on(region: Region, device: int) -> bool:
    """Whether a payload lies in the memory of this device."""
    return device_memory.number_of(region.device) == device


def digests(manifest: Manifest, region: Region) -> list[str]:
    """The digests that `Copier.digest` returns, computed by the payload's device."""
    crcs = iter(_crcs(manifest.tensors, manifest.header_nbytes, region))
    return ["".join(f"{next(crcs):08x}" for _ in _chunks(spec)) for spec in manifest.tensors]


def verify(manifest: Manifest, region: Region) -> None:
    """Check every digest of a payload, on its device; see `Copier.verify`."""
    crcs = iter(_crcs(manifest.tensors, manifest.header_nbytes, region))
    for spec in manifest.tensors:
        compare(spec, [next(crcs) for _ in _chunks(spec)])


def copy_in(
    views: Sequence[TensorView], specs: Sequence[TensorSpec], data: int, region: Region
) -> None:
    """Let torch copy tensors of the host, or of another device, into a payload; blocks for that."""
    for view, spec in zip(views, specs, strict=True):
        tensor_view(region, spec, data).copy_(readable(dense(view), spec.where))
    _wait_for_torch(views, region)


def copy_out(
    views: Sequence[TensorView], specs: Sequence[TensorSpec], data: int, region: Region
) -> None:
    """Let torch copy a payload into tensors of the host, or of another device; blocks for that."""
    for view, spec in zip(views, specs, strict=True):
        source = tensor_view(region, spec, data)
        if isinstance(view, PagedTensor):
            view.fill(source.to(view.device))
        else:
            writable(view, spec.where).copy_(source)
    _wait_for_torch(views, region)


def _wait_for_torch(views: Sequence[TensorView], region: Region) -> None:
    device = device_memory.number_of(region.device)
    if views and device is not None:
        synchronize(device)


def _chunks(spec: TensorSpec) -> range:
    """The offsets of the parts with a digest; none if the tensor has no digests."""
    return range(0, spec.nbytes if spec.digest else 0, DIGEST_CHUNK)


def _crcs(specs: Sequence[TensorSpec], data: int, region: Region) -> list[int]:
    spans = [
        (data + spec.start + offset, data + min(spec.start + offset + DIGEST_CHUNK, spec.stop))
        for spec in specs
        for offset in _chunks(spec)
    ]
    return device_memory.crcs_of(region, spans) if spans else []
