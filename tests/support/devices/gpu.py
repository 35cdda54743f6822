"""Fixtures of the tests on a device: the reason to skip, and tensors moved with their strides."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink._native import cuda
from omni_kvlink.copier import Copier, PinnedCopier
from omni_kvlink.payload.paged import PagedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


def occupy(cycles: int) -> None:
    """Enqueue a kernel that keeps the current stream busy for so many cycles of the device."""
    torch.cuda._sleep(cycles)  # torch's own tests use it, too; no public kernel lasts


@pytest.fixture(scope="session", autouse=True)
def loaded() -> None:
    """Torch loads a kernel at its first launch, which waits for the device."""
    if REASON is None:
        torch.zeros(8, dtype=torch.bfloat16, device=DEVICE).fill_(7)
        occupy(1)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Free what tests left between them: that waits for the device, or ends another's capture."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Moved:
    """Host views on the device: the same strides, offsets and bytes, gaps included.

    Views that share memory share it there, too. Views of `region` stay where they are.
    """

    def __init__(self, views: Sequence[TensorView], region: Region | None = None):
        self._region = region
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.views = [self._move(view) for view in views]

    def bring_back(self) -> None:
        """Copy all bytes of the device's memory to where they came from."""
        for here, there in self._storages.values():
            here.copy_(there)

    def _move(self, view: TensorView) -> TensorView:
        if isinstance(view, PagedTensor):
            pool = self._move(view.pool)
            assert isinstance(pool, torch.Tensor)
            return PagedTensor(pool, view.block_table, view.where)
        region = self._region
        if region and 0 <= view.data_ptr() - region.address < region.nbytes:
            return view
        here = _bytes_of(view)
        _, there = self._storages.setdefault(here.data_ptr(), (here, here.to(DEVICE)))
        blank = torch.empty(0, dtype=view.dtype, device=DEVICE)
        form = view.storage_offset(), view.shape, view.stride()
        return blank.set_(there.untyped_storage(), *form)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    blank = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return blank.set_(tensor.untyped_storage())


class ThroughDevice(Copier):
    """Runs the conformance kit's host tensors through the device: moves them there and back."""

    name = "through-device"

    def __init__(self) -> None:
        self.copier = PinnedCopier()

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        return self.copier.gather(Moved(sources).views, manifest, region, **options)

    def digest(self, manifest: Manifest, region: Region, **options: float) -> list[str]:
        return self.copier.digest(manifest, region, **options)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        moved = Moved(targets, region)
        self.copier.scatter(manifest, region, moved.views)
        moved.bring_back()

    def verify(self, manifest: Manifest, region: Region) -> None:
        self.copier.verify(manifest, region)
