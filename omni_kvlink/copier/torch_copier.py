"""The reference copier: torch copies, crc32c hashes the bytes while they are in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink.copier.base import Copier
from omni_kvlink.copier.streams import DeviceCopies
from omni_kvlink.payload.digests import ChunkDigest, compare, tensor_digest, verify
from omni_kvlink.payload.overlap import check_targets
from omni_kvlink.payload.paged import STEP, PagedTensor
from omni_kvlink.payload.tensor_memory import readable, tensor_view, writable
from omni_kvlink.payload.views import TensorView, Views, check_fit
from omni_kvlink.system.waits import NEVER, check_deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


COPYING = "copying its tensors"
"""The phase in the errors of passed deadlines."""
LARGE_STEP = 16 << 20
"""Bytes that torch copies at a time where no digests are computed meanwhile."""


class TorchCopier(Copier):
    """Works on every machine and device; strided and paged sources need no large temporary."""

    name = "torch"

    _copies: DeviceCopies

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """A copier; a subclass need not call this class's `__init__`."""
        copier = super().__new__(cls)
        copier._copies = DeviceCopies()
        return copier

    def device_copies(self) -> dict[str, int]:
        """Bytes of device tensors copied so far."""
        return self._copies.nbytes()

    def gather(
        self, sources: Views, manifest: Manifest, region: Region, *, deadline: float = NEVER
    ) -> list[str]:
        """Copy tensor by tensor, hashing each MiB while it is in cache."""
        sources = check_fit(sources, manifest, region)
        self._copies.add("pageable", sources)
        payload = region.view()
        digests = []
        for source, spec in zip(sources, manifest.tensors, strict=True):
            start = manifest.header_nbytes + spec.start
            digest = ChunkDigest(payload[start : start + spec.nbytes]) if spec.digest else None
            target = tensor_view(region, spec, manifest.header_nbytes)
            for upto in gather_steps(source, target, spec):
                if digest:
                    digest.advance(upto)
                check_deadline(deadline, COPYING)
            digests.append(digest.text() if digest else "")
        return digests

    def digest(self, manifest: Manifest, region: Region, *, deadline: float = NEVER) -> list[str]:
        """Hash every tensor of the payload."""
        tensors = manifest.tensors
        return [tensor_digest(manifest, region, spec, deadline).text() for spec in tensors]

    def scatter(self, manifest: Manifest, region: Region, targets: Views) -> None:
        """Copy tensor by tensor, hashing the payload while it is in cache."""
        targets = check_targets(targets, manifest, region)
        self._copies.add("pageable", targets)
        payload = region.view()
        for target, spec in zip(targets, manifest.tensors, strict=True):
            source = tensor_view(region, spec, manifest.header_nbytes)
            start = manifest.header_nbytes + spec.start
            digest = ChunkDigest(payload[start : start + spec.nbytes])
            for upto in _scatter_steps(source, target, spec):
                if spec.digest:
                    digest.advance(upto)
            if spec.digest:
                compare(spec, digest.crcs)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Hash every tensor of the payload and compare with the committed digests."""
        verify(manifest, region)


def gather_steps(
    source: TensorView, target: torch.Tensor, spec: TensorSpec, step: int = STEP
) -> Iterator[int]:
    """Copy a tensor into the payload, yielding the number of bytes after each `step`."""
    if isinstance(source, PagedTensor):
        return _in_bytes(source.read(target), source)
    return _copy_steps(readable(source, spec.where), target, step)


def _scatter_steps(source: torch.Tensor, target: TensorView, spec: TensorSpec) -> Iterator[int]:
    if isinstance(target, PagedTensor):
        return _in_bytes(target.write(source), target)
    return _copy_steps(source, writable(target, spec.where), STEP)


def _in_bytes(done: Iterator[int], paged: PagedTensor) -> Iterator[int]:
    return (tokens * (paged.nbytes // paged.shape[0]) for tokens in done)


def _copy_steps(source: torch.Tensor, target: torch.Tensor, step: int) -> Iterator[int]:
    """Copy in steps, yielding the number of bytes copied so far."""
    if not (_is_plain(source) and _is_plain(target)):
        yield from _copy_rows(source, target, step)
        return
    read, written = _bytes_of(source), _bytes_of(target)
    for start in range(0, len(read), step):
        stop = min(start + step, len(read))
        written[start:stop].copy_(read[start:stop])
        yield stop


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_neg()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not view(-1): dimensions of size 1 may have any stride, and view(dtype) requires 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copy_rows(source: torch.Tensor, target: torch.Tensor, step: int) -> Iterator[int]:
    """Copy some tokens at a time, so that strided sources and devices need no large temporary."""
    if target.dim() == 0 or target.numel() == 0:
        target.copy_(source)
        yield target.nbytes
        return
    row = target[0].numel() * target.element_size()
    rows = max(1, step // row)
    for start in range(0, len(target), rows):
        target[start : start + rows].copy_(source[start : start + rows])
        yield min(start + rows, len(target)) * row
