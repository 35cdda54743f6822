"""The native copier: the compiled library copies and computes digests in one pass."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from omni_kvlink._native import dlpack, host
from omni_kvlink.copier.base import Copier
from omni_kvlink.copier.fit import check_targets
from omni_kvlink.copier.streams import DeviceCopies
from omni_kvlink.copier.torch_copier import COPYING, LARGE_STEP, gather_steps
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.digests import mismatch
from omni_kvlink.payload.header_template import SIMPLE_QUOTES, quote_id
from omni_kvlink.payload.paged import PagedTensor
from omni_kvlink.payload.tensor_memory import address_of, are_whole, writable
from omni_kvlink.payload.views import (
    TensorView,
    check_fit,
    dense_addresses,
    is_dense,
    packed_host_view,
    tensor_view,
)
from omni_kvlink.system.deadline import NEVER, check_deadline, deadline_passed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.layouts import Layout
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


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
        self.threads = threads
        self._copies = DeviceCopies()
        self._describe = dlpack.describer_of(torch.Tensor)

    @property
    def features(self) -> str:
        """The instruction set in use, as of `host.features`."""
        return host.features()

    def device_copies(self) -> dict[str, int]:
        """Bytes of device tensors copied so far, by torch."""
        return self._copies.nbytes()

    def gather(
        self,
        sources: Sequence[TensorView],
        manifest: Manifest,
        region: Region,
        *,
        deadline: float = NEVER,
    ) -> list[str]:
        """Copy in one call of the library; torch copies what it cannot address."""
        sources = check_fit(sources, manifest, region)
        if manifest.nbytes <= _SMALL:
            digests = self._gather_few(sources, manifest, region) if len(sources) <= _FEW else None
            if digests is not None:
                return digests
            pairs = zip(sources, manifest.tensors, strict=True)
            packed = [packed_host_view(source, spec.where) for source, spec in pairs]
            if all(packed):
                return self._gather_small(packed, manifest, region)
        native, torch_batch, torch_copies = self._split(sources, manifest, region, deadline)
        for source, target, spec in torch_copies:
            for _ in gather_steps(source, target, spec, LARGE_STEP):
                check_deadline(deadline, COPYING)
        by_name = native.gather()
        if torch_batch is not None:
            by_name |= torch_batch.digest()
        return [by_name[spec.name] for spec in manifest.tensors]

    def pack(self, sources: Sequence[TensorView], manifest: Manifest) -> bytes:
        """Put dense tensors together in one call of the library."""
        packed, request_id = manifest.packed, manifest.request_id
        if packed is None:
            return super().pack(sources, manifest)
        sizes = manifest.nbytes, manifest.header_nbytes
        payload = self._pack_plain(packed, *sizes, request_id, sources)
        if payload is not None:
            return payload
        addresses = dense_addresses(sources, manifest.tensors)
        if addresses is None:
            return super().pack(sources, manifest)
        return packed.pack(*sizes, quote_id(request_id), addresses)

    def pack_known(
        self, sources: Sequence[TensorView], layout: Layout, request_id: str
    ) -> bytes | None:
        """Put dense tensors together in one call of the library."""
        packed = layout.template.packed
        if packed is None:
            return None
        header_nbytes = layout.template.header_nbytes(len(request_id) + SIMPLE_QUOTES)
        nbytes = header_nbytes + layout.data_nbytes
        payload = self._pack_plain(packed, nbytes, header_nbytes, request_id, sources)
        if payload is not None:
            return payload
        addresses = dense_addresses(sources, layout.tensors)
        if addresses is None:
            return None
        quoted_id = quote_id(request_id)
        header_nbytes = layout.template.header_nbytes(len(quoted_id))
        return packed.pack(header_nbytes + layout.data_nbytes, header_nbytes, quoted_id, addresses)

    def _pack_plain(
        self,
        packed: host.PackedLayout,
        nbytes: int,
        header_nbytes: int,
        request_id: str,
        sources: Sequence[TensorView],
    ) -> bytes | None:
        """Pack tensors that the library looks at by itself; None if one is not plain and dense.

        To ask torch for shape, dtype and address takes as long as all else that a small put does,
        and gives the interpreter's lock away for each tensor.
        """
        if not self._describe or {*map(type, sources)} - _PLAIN:
            return None
        request = request_id.encode()
        try:
            if not are_whole(sources, packed.itemsizes, packed.sizes):  # type: ignore[arg-type]
                return None
            return packed.pack_tensors(nbytes, header_nbytes, request, sources, self._describe)
        except RuntimeError:  # torch cannot describe one
            return None

    def _gather_few(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str] | None:
        """Gather dense tensors, each by one call; None if a tensor is not dense, or was refused."""
        data, digests = manifest.header_nbytes, []
        for view, spec in zip(sources, manifest.tensors, strict=True):
            if not is_dense(view):
                return None
            start, nbytes, digest = data + spec.start, spec.stop - spec.start, bool(spec.digest)
            address = address_of(view, spec.where)
            crc = host.gather_dense(
                region.address, region.nbytes, start, address, nbytes, digest=digest
            )
            if crc < 0:
                return None
            digests.append(f"{crc:08x}" if digest else "")
        return digests

    def _gather_small(
        self, packed: Sequence[host.PackedView], manifest: Manifest, region: Region
    ) -> list[str]:
        """Gather what costs less to copy than to divide."""
        batch = host.CopyBatch(region.address, region.nbytes, threads=1, stores=host.AUTO)
        data, specs = manifest.header_nbytes, manifest.tensors
        for view, spec in zip(packed, specs, strict=True):
            batch.add(data + spec.start, spec.stop - spec.start, view, digest=bool(spec.digest))
        try:
            text = batch.gather().hex()
        except host.CopyFailed:
            with failures(specs):
                raise
        if not text:
            return [""] * len(specs)
        if len(text) == 8 * len(specs):
            return [text[start : start + 8] for start in range(0, len(text), 8)]
        return split_digests(text, specs)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        """Copy out and check digests in one call; torch copies what the library cannot address."""
        targets = check_targets(targets, manifest, region)
        native, torch_batch, torch_copies = self._split(
            targets, manifest, region, NEVER, writing=True
        )
        native.scatter()
        if torch_batch is not None:
            torch_batch.verify()
        for target, source, spec in torch_copies:
            if isinstance(target, PagedTensor):
                target.fill(source)
            else:
                writable(target, spec.where).copy_(source)

    def digest(self, manifest: Manifest, region: Region, *, deadline: float = NEVER) -> list[str]:
        """Compute the digests of a payload in one call of the library."""
        batch = _Batch(manifest, region, self.threads, deadline)
        for spec in manifest.tensors:
            batch.add(spec)
        return list(batch.digest().values())

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check all digests in one call of the library."""
        batch = _Batch(manifest, region, self.threads)
        for spec in manifest.tensors:
            if spec.digest:
                batch.add(spec)
        batch.verify()

    def _split(
        self,
        views: Sequence[TensorView],
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
            packed = packed_host_view(view, spec.where, writing=writing)
            if packed:
                native.add(spec, packed)
            else:
                torch_batch = torch_batch or _Batch(manifest, region, self.threads, deadline)
                torch_batch.add(spec)
                torch_copies.append((view, tensor_view(region, spec, manifest.header_nbytes), spec))
        self._count([view for view, *_ in torch_copies])
        return native, torch_batch, torch_copies

    def _count(self, views: list[TensorView]) -> None:
        """Count the device tensors among those that torch copies."""
        if views:
            self._copies.add("pageable", views)


class _Batch:
    """A `host.CopyBatch` whose copies and digests are a manifest's tensors."""

    def __init__(self, manifest: Manifest, region: Region, threads: int, deadline: float = NEVER):
        # By the whole payload: one cached layer would evict the others.
        stores = host.STREAM if manifest.nbytes > host.LARGE else host.AUTO
        self._batch = host.CopyBatch(
            region.address, region.nbytes, threads=threads, stores=stores, deadline=deadline
        )
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
        names = (spec.name for spec in self._specs)
        return dict(zip(names, split_digests(digests.hex(), self._specs), strict=True))


def split_digests(text: str, specs: Sequence[TensorSpec]) -> list[str]:
    """The digests of each tensor, as many digits as its blank digest has."""
    digests, start = [], 0
    for spec in specs:
        stop = start + len(spec.digest)
        digests.append(text[start:stop])
        start = stop
    return digests


@contextmanager
def failures(specs: Sequence[TensorSpec]) -> Iterator[None]:
    """Translate the library's errors; see `copy_error`."""
    try:
        yield
    except host.CopyFailed as failed:
        raise copy_error(failed, specs) from None


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
