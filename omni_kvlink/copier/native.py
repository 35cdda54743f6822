"""The native copier: one pass over the bytes by the compiled library, digests included."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from omni_kvlink._native import cuda, host
from omni_kvlink.copier.base import Copier, check_fit, mismatch
from omni_kvlink.copier.torch_copier import TorchCopier
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.branch import DTYPES
from omni_kvlink.payload.dtypes import dtype_name, tensor_view
from omni_kvlink.payload.manifest import Manifest, TensorSpec
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.views import TensorView, packed_view


class NativeCopier(Copier):
    """Copies dense, strided and paged host tensors at the speed of memory.

    What the library does not know (other devices, more than four dimensions with gaps) is copied
    by torch, and its digests are computed here.

    Args:
        threads: how many copy; 0 chooses by size and by how many cores are idle.

    Raises:
        NativeError: there is no compiled library; says why and what helps.
    """

    name = "native"

    def __init__(self, *, threads: int = 0):
        reason = host.missing()
        if reason:
            raise NativeError(reason)
        self.threads = threads

    @property
    def features(self) -> str:
        """The instruction set in use: avx512, avx2 or portable."""
        return host.features()

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        check_places(sources, manifest, region)
        ours, others = self._calls(manifest, region), self._calls(manifest, region)
        for source, spec in zip(sources, manifest.tensors, strict=True):
            view = packed_view(source)
            if view:
                ours.add(spec, view)
            else:
                target = tensor_view(region, spec, manifest.header_nbytes)
                _copy(source, target)
                others.add(spec)
        digests = {**ours.gather(), **others.digest()}
        return [digests[spec.name] for spec in manifest.tensors]

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        check_places(targets, manifest, region)
        ours, others = self._calls(manifest, region), self._calls(manifest, region)
        rest: list[tuple[TensorView, torch.Tensor]] = []
        for target, spec in zip(targets, manifest.tensors, strict=True):
            view = packed_view(target)
            if view:
                ours.add(spec, view)
            else:
                rest.append((target, tensor_view(region, spec, manifest.header_nbytes)))
                others.add(spec)
        ours.scatter()
        others.verify()
        for target, source in rest:
            if isinstance(target, PagedTensor):
                target.fill(source)
            else:
                target.detach().copy_(source)

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        call = self._calls(manifest, region)
        for spec in manifest.tensors:
            call.add(spec)
        digests = call.digest()
        return [digests[spec.name] for spec in manifest.tensors]

    def verify(self, manifest: Manifest, region: Region) -> None:
        call = self._calls(manifest, region)
        for spec in manifest.tensors:
            if spec.digest:
                call.add(spec)
        call.verify()

    def _calls(self, manifest: Manifest, region: Region) -> _Call:
        return _Call(manifest, region, self.threads)


class _Call:
    """One call of the library, in the manifest's words."""

    def __init__(self, manifest: Manifest, region: Region, threads: int):
        # A layer of a large payload pushes the others out of the cache, as the whole would.
        stores = host.STREAM if manifest.nbytes > host.LARGE else host.AUTO
        self._batch = host.CopyBatch(region.address, region.nbytes, threads=threads, stores=stores)
        self._data = manifest.header_nbytes
        self._specs: list[TensorSpec] = []

    def add(self, spec: TensorSpec, view: host.PackedView = ()) -> None:
        self._specs.append(spec)
        self._batch.add(self._data + spec.start, spec.nbytes, view, digest=bool(spec.digest))

    def gather(self) -> dict[str, str]:
        with failures(self._specs):
            return self._by_name(self._batch.gather())

    def digest(self) -> dict[str, str]:
        with failures(self._specs):
            return self._by_name(self._batch.digest())

    def scatter(self) -> None:
        with failures(self._specs):
            self._batch.scatter(self._committed())

    def verify(self) -> None:
        with failures(self._specs):
            self._batch.verify(self._committed())

    def _committed(self) -> bytes:
        return bytes.fromhex("".join(spec.digest for spec in self._specs))

    def _by_name(self, digests: bytes) -> dict[str, str]:
        """Each tensor's own digits: as many as its blank digest has."""
        text, found, at = digests.hex(), {}, 0
        for spec in self._specs:
            found[spec.name] = text[at : at + len(spec.digest)]
            at += len(spec.digest)
        return found


@contextmanager
def failures(specs: Sequence[TensorSpec]) -> Iterator[None]:
    """A library's errors, named by tensor; `specs` in the order of the call's copies."""
    try:
        yield
    except host.CopyFailed as failed:
        spec = specs[failed.copy]
        if failed.status == host.DIGEST:
            raise mismatch(spec, failed.chunk) from None
        if failed.status in (host.ARGUMENT, host.BOUNDS, host.OVERLAP):
            raise SchemaError(f"{spec.where()}: {failed}") from None
        raise


def fastest_copier() -> Copier:
    """The native copier, or torch's with one warning that says why and what helps.

    Where torch has CUDA, there is a device, and the CUDA part was built, the pinned one.

    Without an instruction for CRC-32C that the library knows, torch and the crc32c package are
    the faster pair: then it is torch's, and nothing is missing.
    """
    global _warned
    reason = host.missing()
    if reason is None and _has_device():
        from omni_kvlink.copier.pinned import PinnedCopier  # which needs this file

        return PinnedCopier()
    if reason is None:
        return TorchCopier() if host.features() == "portable" else NativeCopier()
    if not _warned:
        _warned = True
        warnings.warn(
            f"{reason}. Copies are made by torch: the same bytes, more slowly",
            RuntimeWarning,
            stacklevel=2,
        )
    return TorchCopier()


_warned = False


def _has_device() -> bool:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return cuda.missing() is None and cuda.no_device() is None


def check_places(places: Sequence[TensorView], manifest: Manifest, region: Region) -> None:
    """See `check_fit`."""
    codes = [DTYPES[dtype_name(place.dtype)] for place in places]
    check_fit(places, manifest, region, codes)


def _copy(source: TensorView, target: torch.Tensor) -> None:
    if isinstance(source, PagedTensor):
        for _ in source.read(target):
            pass
    else:
        target.copy_(source.detach())
