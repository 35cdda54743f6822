"""The contract of a copier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from omni_kvlink.errors import IntegrityError, SchemaError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.manifest import DIGEST_CHUNK, Manifest, TensorSpec
from omni_kvlink.payload.views import TensorView


class GatherHandle:
    """A gather under way. Dropped without `wait`, it ends before its memory goes.

    Args:
        finish: waits, and gives the digests.
    """

    def __init__(self, finish: Callable[[], list[str]]):
        self._finish: Callable[[], list[str]] | None = finish
        self._digests: list[str] = []

    def wait(self) -> list[str]:
        """Sleep until all bytes have landed; the digests of what landed, as `Copier.gather` gives.

        Raises what `gather` does.
        """
        if self._finish:
            self._digests = self._finish()
            self._finish = None
        return self._digests


class Copier(ABC):
    """Moves bytes between tensors and a payload; never allocates its destination.

    `check_copier` in `omni_kvlink.testing` holds an implementation to this contract.
    """

    name: ClassVar[str]

    @property
    def features(self) -> str:
        """The instruction set in use, where the copier chooses one."""
        return ""

    @abstractmethod
    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        """Copy each tensor to its place in the payload.

        Args:
            sources: in the manifest's order, in pages or of any strides, on any device; only read.
            manifest: the plan.
            region: the payload's memory, at least `manifest.nbytes` long.

        Returns:
            For each tensor the digest of the bytes that landed, as `TensorSpec.digest` holds it;
            empty strings if the plan has digests switched off.

        Raises:
            SchemaError: a source is not what the plan says.
        """

    def begin_gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> GatherHandle:
        """Begin what `gather` does. Until `wait` returned, no source may change.

        A manifest that has a part of the payload's tensors copies that part.
        """
        digests = self.gather(sources, manifest, region)
        return GatherHandle(lambda: digests)

    @abstractmethod
    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        """What `gather` returns, of bytes that are in the payload already."""

    @abstractmethod
    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        """Copy a payload out into the caller's tensors or pages, checking digests in the same pass.

        Raises:
            SchemaError: a target is not what the manifest says.
            IntegrityError: bytes differ from those committed; the targets are then worthless.
        """

    @abstractmethod
    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check every digest of a payload.

        Raises:
            IntegrityError: names branch, layer, K or V, and the first MiB that differs.
        """


def check_fit(
    tensors: Sequence[TensorView], manifest: Manifest, region: Region, codes: Sequence[str]
) -> None:
    """Refuse, before a byte moves, tensors or a region that are not what the manifest says."""
    if region.nbytes < manifest.nbytes:
        raise SchemaError(f"a payload of {manifest.nbytes} bytes in a region of {region.nbytes}")
    if len(tensors) != len(manifest.tensors):
        raise SchemaError(f"{len(tensors)} tensors, the manifest has {len(manifest.tensors)}")
    for tensor, spec, code in zip(tensors, manifest.tensors, codes, strict=True):
        if tensor.device.type == "meta":
            raise SchemaError(f"{spec.where()} has no bytes: it is a plan, made by blank()")
        if tuple(tensor.shape) != spec.shape or code != spec.dtype:
            raise SchemaError(
                f"{spec.where()}: {tensor.dtype} {list(tensor.shape)}, "
                f"the manifest says {spec.dtype} {list(spec.shape)}"
            )


def mismatch(spec: TensorSpec, chunk: int) -> IntegrityError:
    """The error for a chunk whose digest is not the committed one."""
    return IntegrityError(
        f"{spec.where()}: the bytes from {chunk * DIGEST_CHUNK} on are not those committed "
        f"(MiB {chunk} of {len(spec.digest) // 8})"
    )
