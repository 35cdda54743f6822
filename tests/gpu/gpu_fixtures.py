"""Fixtures of the tests on a device: the reason to skip, and tensors moved with their strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink._native import cuda
from omni_kvlink.copier import Copier, PinnedCopier
from omni_kvlink.payload.paged import PagedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

DEVICE = "cuda"
ENGINES, MIXED, KERNEL, MEASURED = "0", "300", str(1 << 62), ""
"""Values of OMNI_KVLINK_CUDA_CROSSOVER."""


def _reason() -> str | None:
    reason = cuda.missing() or cuda.no_device()
    if reason is None and not torch.cuda.is_available():
        reason = "torch has no CUDA, or sees no device"
    if reason is None or reason.startswith("no CUDA device"):
        return reason
    return f"no CUDA device: {reason}"


REASON = _reason()
GPU = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


def moved(view: TensorView) -> TensorView:
    """The same strides, offset and bytes, gaps included, on the device."""
    if isinstance(view, PagedTensor):
        pool = moved(view.pool)
        assert isinstance(pool, torch.Tensor)
        return PagedTensor(pool, view.block_table, view.where)
    storage = _bytes_of(view).to(DEVICE).untyped_storage()
    blank = torch.empty(0, dtype=view.dtype, device=DEVICE)
    return blank.set_(storage, view.storage_offset(), view.shape, view.stride())


def bring_back(source: TensorView, target: TensorView) -> None:
    """All bytes of the device's memory, gaps included."""
    if isinstance(source, PagedTensor) and isinstance(target, PagedTensor):
        source, target = source.pool, target.pool
    assert isinstance(source, torch.Tensor)
    assert isinstance(target, torch.Tensor)
    _bytes_of(target).copy_(_bytes_of(source))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage())


class ThroughDevice(Copier):
    """Runs the conformance kit's host tensors through the device: moves them there and back."""

    name = "through-device"

    def __init__(self) -> None:
        self.copier = PinnedCopier()

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        return self.copier.gather([moved(source) for source in sources], manifest, region)

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        return self.copier.digest(manifest, region)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        there = [moved(target) for target in targets]
        self.copier.scatter(manifest, region, there)
        for source, target in zip(there, targets, strict=True):
            bring_back(source, target)

    def verify(self, manifest: Manifest, region: Region) -> None:
        self.copier.verify(manifest, region)
