"""Payloads in a CUDA device's memory: digests computed there, and copies that torch makes."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from omni_kvlink._native import device_memory
from omni_kvlink.copier.streams import synchronize
from omni_kvlink.payload.digests import compare
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import readable, tensor_view, writable
from omni_kvlink.payload.views import Views, dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


def digests(manifest: Manifest, region: Region) -> list[str]:
    """The digests that `Copier.digest` returns, computed by the payload's device."""
    return ["".join(f"{crc:08x}" for crc in crcs) for crcs in _crcs(manifest, region)]


def verify(manifest: Manifest, region: Region) -> None:
    """Check every digest of a payload, on its device; see `Copier.verify`."""
    for spec, crcs in zip(manifest.tensors, _crcs(manifest, region), strict=True):
        compare(spec, crcs)


def copy_in(views: Views, specs: Sequence[TensorSpec], data: int, region: Region) -> None:
    """Let torch copy tensors of the host, or of another device, into a payload; blocks for that."""
    for view, spec in zip(views, specs, strict=True):
        tensor_view(region, spec, data).copy_(readable(dense(view), spec.where))
    _wait_for_torch(views, region)


def copy_out(views: Views, specs: Sequence[TensorSpec], data: int, region: Region) -> None:
    """Let torch copy a payload into tensors of the host, or of another device; blocks for that."""
    for view, spec in zip(views, specs, strict=True):
        source = tensor_view(region, spec, data)
        if isinstance(view, PagedTensor):
            view.fill(source.to(view.device))
        else:
            writable(view, spec.where).copy_(source)
    _wait_for_torch(views, region)


def _wait_for_torch(views: Views, region: Region) -> None:
    device = device_memory.number_of(region.device)
    if views and device is not None:
        synchronize(device)


def _crcs(manifest: Manifest, region: Region) -> list[list[int]]:
    """The CRC-32C of each chunk of each tensor; none if the tensor has no digests."""
    spans, counts = list[tuple[int, int]](), list[int]()
    for spec in manifest.tensors:
        first = manifest.header_nbytes + spec.start
        starts = range(first, first + spec.nbytes if spec.digest else first, DIGEST_CHUNK)
        spans += [(at, min(at + DIGEST_CHUNK, first + spec.nbytes)) for at in starts]
        counts.append(len(starts))
    crcs = iter(device_memory.crcs_of(region, spans) if spans else ())
    return [list(islice(crcs, count)) for count in counts]
