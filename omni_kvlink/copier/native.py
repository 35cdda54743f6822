"""The native copier: the compiled library copies and computes digests in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omni_kvlink._native import dlpack, host
from omni_kvlink.copier.base import MAX_PACKED, Copier
from omni_kvlink.copier.streams import DeviceCopies
from omni_kvlink.copier.torch_copier import COPYING, LARGE_STEP, gather_steps
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.digests import mismatch
from omni_kvlink.payload.manifest import SIMPLE_QUOTES, quote_id
from omni_kvlink.payload.overlap import check_targets
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import (
    are_whole,
    dense_addresses,
    tensor_view,
    writable,
)
from omni_kvlink.payload.views import TensorView, Views, check_fit, packed_view
from omni_kvlink.system.waits import NEVER, check_deadline, deadline_passed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Layout, Manifest, TensorSpec


_SMALL = 1 << 20
"""Bytes of a payload that are not worth a second thread."""
_PLAIN = {torch.Tensor}
"""The types of tensors that have no behaviour of their own."""
_FEW = 4
"""Number of tensors up to which one call each is cheaper than packing all for a single call."""


class NativeCopier(Copier):
    """Copies dense, strided and paged host tensors at memory speed.

    Tensors that the library cannot address (on other devices, or with more than four dimensions
    with gaps) are copied by torch; the library computes their digests in the payload. `threads=0`
    chooses the number of copying threads by size and by the number of idle cores.
    """

    name = "native"

    def __init__(self, *, threads: int = 0):
        reason = host.missing()
        if reason:
            raise NativeError(reason)
        self.threads, self.features = threads, host.features()
        self._copies = DeviceCopies()
        self._describe = dlpack.describer_of(torch.Tensor)

    def device_copies(self) -> dict[str, int]:
        """Bytes of device tensors copied so far, by torch."""
        return self._copies.nbytes()

    def gather(
        self, sources: Views, manifest: Manifest, region: Region, *, deadline: float = NEVER
    ) -> list[str]:
        """Copy in one call of the library; torch copies what it cannot address."""
        addresses, specs = None, manifest.tensors
        if region.nbytes >= manifest.nbytes:
            addresses = dense_addresses(sources, specs)
        if addresses is None:  # strided, paged, on a device; or refused, by name
            return self._gather_views(sources, manifest, region, deadline)
        if manifest.nbytes <= _SMALL and len(sources) <= _FEW:
            digests = self._gather_few(addresses, manifest, region)
            if digests is not None:
                return digests
        batch = _Batch(manifest, region, self.threads, deadline)
        for address, spec in zip(addresses, specs, strict=True):
            batch.add_tensor(spec, host.packed_flat_view(address, spec.stop - spec.start))
        return split_digests(batch.gather().hex(), specs)

    def _gather_views(
        self, sources: Views, manifest: Manifest, region: Region, deadline: float
    ) -> list[str]:
        """Gather tensors of any kind."""
        sources = check_fit(sources, manifest, region)
        native, torch_batch, torch_copies = self._split(sources, manifest, region, deadline)
        for source, target, spec in torch_copies:
            for _ in gather_steps(source, target, spec, LARGE_STEP):
                check_deadline(deadline, COPYING)
        digests = split_digests(native.gather().hex(), native.specs)
        if torch_batch is None:
            return digests
        specs = [*native.specs, *torch_batch.specs]
        digests += split_digests(torch_batch.digest().hex(), torch_batch.specs)
        by_name = {spec.name: digest for spec, digest in zip(specs, digests, strict=True)}
        return [by_name[spec.name] for spec in manifest.tensors]

    def pack(self, sources: Views, manifest: Manifest) -> bytes:
        """Put dense tensors together in one call of the library."""
        layout = manifest.layout
        payload = None if layout is None else self.pack_known(sources, layout, manifest.request_id)
        if payload is None or len(payload) != manifest.nbytes:
            return super().pack(sources, manifest)
        return payload

    def pack_known(self, sources: Views, layout: Layout, request_id: str) -> bytes | None:
        """Put dense tensors together in one call of the library."""
        packed = layout.packed
        if packed is None:
            return None
        header_nbytes = layout.header_nbytes(len(request_id) + SIMPLE_QUOTES)
        nbytes = header_nbytes + layout.data_nbytes
        payload = bytes(nbytes)  # nobody else has it while the library writes to it
        if self._pack_plain(packed, payload, nbytes, header_nbytes, request_id, sources):
            return payload
        addresses = dense_addresses(sources, layout.tensors)
        if addresses is None:
            return None
        quoted_id = quote_id(request_id)
        header_nbytes = layout.header_nbytes(len(quoted_id))
        return packed.pack(header_nbytes + layout.data_nbytes, header_nbytes, quoted_id, addresses)

    def pack_into(self, sources: Views, manifest: Manifest, region: Region) -> bool:
        """Write a small payload with its header in one call of the library."""
        layout = manifest.layout if manifest.is_plan else None
        packed = None if layout is None else layout.packed
        sizes = manifest.nbytes, manifest.header_nbytes
        if packed is None or not sizes[0] <= min(region.nbytes, MAX_PACKED):
            return False
        if region.device != "cpu":
            return False
        return self._pack_plain(packed, region.address, *sizes, manifest.request_id, sources)

    def _pack_plain(
        self,
        packed: host.PackedLayout,
        payload: bytes | int,
        nbytes: int,
        header_nbytes: int,
        request_id: str,
        sources: Views,
    ) -> bool:
        """Pack tensors that the library looks at by itself; False if one is not plain and dense.

        To ask torch for shape, dtype and address takes as long as all else that a small put does,
        and gives the interpreter's lock away for each tensor.
        """
        if not self._describe or {*map(type, sources)} - _PLAIN:
            return False
        request = request_id.encode()
        try:
            return are_whole(sources, packed.itemsizes, packed.sizes) and packed.pack_tensors(  # type: ignore[arg-type]
                payload, nbytes, header_nbytes, request, sources, self._describe
            )
        except RuntimeError:  # torch cannot describe one
            return False

    def _gather_few(
        self, addresses: Sequence[int], manifest: Manifest, region: Region
    ) -> list[str] | None:
        """Gather dense tensors, each by one call; None if the library refused one."""
        data, digests = manifest.header_nbytes, []
        for address, spec in zip(addresses, manifest.tensors, strict=True):
            start, nbytes, digest = data + spec.start, spec.stop - spec.start, bool(spec.digest)
            crc = host.gather_dense(
                region.address, region.nbytes, start, address, nbytes, digest=digest
            )
            if crc < 0:
                return None
            digests.append(f"{crc:08x}" if digest else "")
        return digests

    def scatter(self, manifest: Manifest, region: Region, targets: Views) -> None:
        """Copy out and check digests in one call; torch copies what the library cannot address."""
        targets = check_targets(targets, manifest, region)
        native, torch_batch, torch_copies = self._split(
            targets, manifest, region, NEVER, writing=True
        )
        native.scatter(native.committed())
        if torch_batch is not None:
            torch_batch.verify(torch_batch.committed())
        for target, source, spec in torch_copies:
            if isinstance(target, PagedTensor):
                target.fill(source)
            else:
                writable(target, spec.where).copy_(source)

    def digest(self, manifest: Manifest, region: Region, *, deadline: float = NEVER) -> list[str]:
        """Compute the digests of a payload in one call of the library."""
        batch = _Batch(manifest, region, self.threads, deadline)
        for spec in manifest.tensors:
            batch.add_tensor(spec)
        return split_digests(batch.digest().hex(), batch.specs)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check all digests in one call of the library."""
        batch = _Batch(manifest, region, self.threads)
        for spec in manifest.tensors:
            if spec.digest:
                batch.add_tensor(spec)
        batch.verify(batch.committed())

    def _split(
        self,
        views: Views,
        manifest: Manifest,
        region: Region,
        deadline: float,
        *,
        writing: bool = False,
    ) -> tuple[_Batch, _Batch | None, list[tuple[TensorView, torch.Tensor, TensorSpec]]]:
        """Return what the library copies, and what torch does: its digests, and both tensors."""
        native, torch_batch = _Batch(manifest, region, self.threads, deadline), None
        torch_copies = []
        for view, spec in zip(views, manifest.tensors, strict=True):
            packed: host.PackedView = ()
            if view.device.type == "cpu":
                packed = packed_view(view, spec.where, writing=writing)
            if packed:
                native.add_tensor(spec, packed)
            else:
                torch_batch = torch_batch or _Batch(manifest, region, self.threads, deadline)
                torch_batch.add_tensor(spec)
                torch_copies.append((view, tensor_view(region, spec, manifest.header_nbytes), spec))
        if torch_copies:
            self._count([view for view, *_ in torch_copies])
        return native, torch_batch, torch_copies

    def _count(self, views: list[TensorView]) -> None:
        """Count the device tensors among those that torch copies."""
        self._copies.add("pageable", views)


class _Batch(host.CopyBatch):
    """The copies and digests of a manifest's tensors; an error names the tensor."""

    def __init__(self, manifest: Manifest, region: Region, threads: int, deadline: float = NEVER):
        # By the whole payload: one cached layer would evict the others.
        stores = host.STREAM if manifest.nbytes > host.LARGE else host.AUTO
        count = 1 if manifest.nbytes <= _SMALL else threads
        super().__init__(
            region.address, region.nbytes, threads=count, stores=stores, deadline=deadline
        )
        self._data = manifest.header_nbytes
        self.specs: list[TensorSpec] = []

    def add_tensor(self, spec: TensorSpec, view: host.PackedView = ()) -> None:
        self.specs.append(spec)
        start, nbytes = self._data + spec.start, spec.stop - spec.start
        self.add(start, nbytes, view, digest=bool(spec.digest))

    def committed(self) -> bytes:
        """The digests that the manifest has."""
        return bytes.fromhex("".join([spec.digest for spec in self.specs]))

    def error(self, failed: host.CopyFailed) -> Exception:
        return copy_error(failed, self.specs)


def split_digests(text: str, specs: Sequence[TensorSpec]) -> list[str]:
    """The digests of each tensor, as many digits as its blank digest has."""
    digests, start = [], 0
    for spec in specs:
        stop = start + len(spec.digest)
        digests.append(text[start:stop])
        start = stop
    return digests


def copy_error(failed: host.CopyFailed, specs: Sequence[TensorSpec]) -> Exception:
    """The error to raise, which names the tensor; `specs` are in the order of the copies."""
    spec = specs[failed.copy]
    if failed.status == host.DIGEST:
        return mismatch(spec, failed.chunk)
    if failed.status == host.DEADLINE:
        return deadline_passed(COPYING)
    if failed.status in (host.ARGUMENT, host.BOUNDS, host.OVERLAP):
        return SchemaError(f"{spec.where()}: {failed}")
    return failed
