"""The reference copier passes the conformance kit, and broken copiers fail it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink.copier import Copier, TorchCopier
from omni_kvlink.testing import COPIER_CHECKS, CheckFailed, check_copier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


@pytest.mark.parametrize("check", COPIER_CHECKS, ids=lambda check: check.__name__[6:])
def test_torch_copier(check: Callable[[Copier], None]) -> None:
    check(TorchCopier())


class WithoutDigests(TorchCopier):
    """Returns the blank digests."""

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        super().gather(sources, manifest, region, **options)
        return [spec.digest for spec in manifest.tensors]


class OneByteShort(TorchCopier):
    """Loses the last byte of each payload."""

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        last = region.view()[manifest.nbytes - 1]
        digests = super().gather(sources, manifest, region, **options)
        region.view()[manifest.nbytes - 1] = last
        return digests


class Contiguous(TorchCopier):
    """Reads strided sources as if they were contiguous."""

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        dense = [source for source in sources if isinstance(source, torch.Tensor)]
        flat = [source.as_strided(source.shape, _dense(source.shape)) for source in dense]
        return super().gather(flat, manifest, region, **options)


class Trusting(TorchCopier):
    """Verifies nothing."""

    def verify(self, manifest: Manifest, region: Region) -> None:
        pass


class Overshooting(TorchCopier):
    """Writes one byte beyond the payload."""

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, **options: float
    ) -> list[str]:
        digests = super().gather(sources, manifest, region, **options)
        region.view()[manifest.nbytes] = 0
        return digests


def _dense(shape: Sequence[int]) -> list[int]:
    return [shape[1] * shape[2], shape[2], 1]


@pytest.mark.parametrize(
    "broken", [WithoutDigests, OneByteShort, Trusting, Overshooting], ids=lambda kind: kind.__name__
)
def test_kit_notices_a_broken_copier(broken: type[TorchCopier]) -> None:
    with pytest.raises(CheckFailed, match="check_"):
        check_copier(broken())


def test_kit_notices_ignored_strides() -> None:
    with pytest.raises((CheckFailed, RuntimeError)):
        check_copier(Contiguous())
