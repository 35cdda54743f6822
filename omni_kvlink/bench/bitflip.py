"""A copier that flips a bit: a comparison that cannot fail proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.copier import Copier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


class BitflipCopier(Copier):
    """Copies with another copier; while `armed`, flips one bit after the digests are taken."""

    name = "flip-one-bit"

    def __init__(self, copier: Copier):
        self._copier = copier
        self.armed = False

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        """Gather, and flip a bit in the middle of the last tensor with bytes if armed."""
        digests = self._copier.gather(sources, manifest, region)
        if self.armed:
            spec = next(spec for spec in reversed(manifest.tensors) if spec.nbytes)
            at = manifest.header_nbytes + (spec.start + spec.stop) // 2
            region.view()[at] ^= 1
        return digests

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        """As the other copier does."""
        return self._copier.digest(manifest, region)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        """As the other copier does."""
        self._copier.scatter(manifest, region, targets)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """As the other copier does."""
        self._copier.verify(manifest, region)
