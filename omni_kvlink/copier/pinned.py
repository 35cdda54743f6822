"""The pinned copier: asynchronous copies between CUDA devices and page-locked memory."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from omni_kvlink._native import cuda, host
from omni_kvlink.copier import device_payload
from omni_kvlink.copier.base import GatherHandle
from omni_kvlink.copier.fit import check_targets
from omni_kvlink.copier.native import NativeCopier, failures
from omni_kvlink.copier.streams import StreamEvents, current_stream, device_of
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.manifest import TensorSpec
from omni_kvlink.payload.views import TensorView, check_fit, packed_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

BATCH = 8 << 20
"""Bytes that one thread digests at a time, while later ones are still being copied."""
MAX_THREADS = 4
"""Threads that digest as fast as one PCIe link delivers."""


class PinnedCopier(NativeCopier):
    """Copies dense, strided and paged device tensors; host tensors are left to the native copier.

    The payload's memory is page-locked at its first use, a whole mapping at a time. If the system
    refuses that, torch copies through pageable memory, and one warning says why and what helps.
    A payload in a device's own memory is copied and digested there: no byte meets the host.
    `threads=0` chooses the number of threads that compute digests by the number of cores.
    """

    name = "pinned"
    uses_device_memory = True

    def __init__(self, *, threads: int = 0):
        reason = cuda.missing() or cuda.no_device()
        if reason:
            raise NativeError(reason)
        super().__init__(threads=threads)
        self._digester = NativeCopier(threads=1)
        self._threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._warned = False

    @property
    def features(self) -> str:
        """The host's instruction set, CUDA's version, and the first device's name."""
        return f"{host.features()}, {cuda.describe(0)}"

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        """Copy and wait; device tensors are copied while host tensors are."""
        with ExitStack() as pending:  # on an error, too: no copy is in progress afterwards
            return self._begin(sources, manifest, region, pending)()

    def record(self, views: Sequence[TensorView]) -> StreamEvents:
        """Record an event for each device on the calling thread's current stream."""
        devices = {device_of(view) for view in views} - {None}
        return StreamEvents(
            [
                _TicketEvent(device, cuda.record(device, current_stream(device)))
                for device in devices
                if device is not None
            ]
        )

    def begin_gather(
        self,
        sources: Sequence[TensorView],
        manifest: Manifest,
        region: Region,
        *,
        after: StreamEvents | None = None,
    ) -> GatherHandle:
        """Enqueue device copies on streams of the library; copy host tensors at once."""
        with ExitStack() as stack:
            digests = self._begin(sources, manifest, region, stack, after)
            pending = stack.pop_all()

        def wait() -> list[str]:
            with pending:
                return digests()

        return GatherHandle(wait)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        """Copy out, blocking until device copies are complete; digests are checked on the host."""
        check_targets(targets, manifest, region)
        views, specs, devices = self._by_device(targets, manifest, region)
        with ExitStack() as pending:
            for part in devices:
                part.begin("scatter", manifest, region, pending)
            self._scatter_others(_part(manifest, specs), region, views)
            for part in devices:
                self.verify(_part(manifest, part.specs), region)

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        """Compute the digests where the payload lies."""
        is_near = region.device == "cpu"
        return (super().digest if is_near else device_payload.digests)(manifest, region)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check all digests where the payload lies."""
        is_near = region.device == "cpu"
        (super().verify if is_near else device_payload.verify)(manifest, region)

    def begin_scatter(
        self,
        manifest: Manifest,
        region: Region,
        targets: Sequence[TensorView],
        *,
        after: StreamEvents | None = None,
    ) -> StreamEvents:
        """Check digests, copy host tensors, then enqueue device copies on streams of the library.

        Unlike `scatter`, no device tensor is written if a byte of one is wrong.
        """
        check_targets(targets, manifest, region)
        views, specs, devices = self._by_device(targets, manifest, region)
        for part in devices:
            self.verify(_part(manifest, part.specs), region)
        _follow(views, after)
        self._scatter_others(_part(manifest, specs), region, views)
        ends = [*self.record(views).events]  # of the copies that torch made
        with ExitStack() as pending:
            for part in devices:
                ticket = part.begin("scatter", manifest, region, pending, after)
                ends.append(_TicketEvent(part.device, ticket, len(part.specs)))
            pending.pop_all()
        return StreamEvents(ends)

    def _begin(
        self,
        sources: Sequence[TensorView],
        manifest: Manifest,
        region: Region,
        pending: ExitStack,
        after: StreamEvents | None = None,
    ) -> Callable[[], list[str]]:
        """Copy host tensors and start copying the others; return what waits for the digests."""
        check_fit(sources, manifest, region)
        views, specs, devices = self._by_device(sources, manifest, region)
        tickets = [part.begin("gather", manifest, region, pending, after) for part in devices]
        _follow(views, after)
        if region.device == "cpu":
            digests = super().gather(views, _part(manifest, specs), region)
        else:
            device_payload.copy_in(views, specs, manifest.header_nbytes, region)
            digests = device_payload.digests(_part(manifest, specs), region)
        by_name = {spec.name: text for spec, text in zip(specs, digests, strict=True)}

        def wait() -> list[str]:
            for part, ticket in zip(devices, tickets, strict=True):
                by_name.update(self._digests(part.specs, ticket, manifest, region))
            return [by_name[spec.name] for spec in manifest.tensors]

        return wait

    def _scatter_others(
        self, manifest: Manifest, region: Region, views: Sequence[TensorView]
    ) -> None:
        """Copy out, by the host or by torch, what no device copies by itself."""
        if region.device == "cpu":
            super().scatter(manifest, region, views)
        else:
            device_payload.verify(manifest, region)
            device_payload.copy_out(views, manifest.tensors, manifest.header_nbytes, region)

    def _by_device(
        self, views: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> tuple[list[TensorView], list[TensorSpec], list[_OnDevice]]:
        """Split tensors by who copies them, each in the manifest's order; the host comes first."""
        on_host, specs = list[TensorView](), list[TensorSpec]()
        devices: dict[int, _OnDevice] = {}
        for view, spec in zip(views, manifest.tensors, strict=True):
            device = device_of(view)
            packed = () if device is None else packed_view(view, on=view.device.type)
            if device is None or not packed or not self._can_reach(region, device):
                on_host.append(view)
                specs.append(spec)
            else:
                devices.setdefault(device, _OnDevice(device)).add(view, spec, packed)
        self._copies.add("pageable", on_host)
        for part in devices.values():
            self._copies.add("pinned" if region.device == "cpu" else "device", part.views)
        return on_host, specs, list(devices.values())

    def _count(self, views: list[TensorView]) -> None:
        """Count nothing: `_by_device` has done so."""

    def _can_reach(self, region: Region, device: int) -> bool:
        """Whether a device copies from and to a payload by itself."""
        if region.device != "cpu":
            return device_payload.is_on(region, device)
        reason = cuda.register(region, device)
        if reason and not self._warned:
            self._warned = True
            warnings.warn(
                f"the payload cannot be page-locked: {reason}. "
                "Device tensors are copied by torch: the same bytes, more slowly",
                RuntimeWarning,
                stacklevel=5,
            )
        return reason is None

    def _digests(
        self, specs: list[TensorSpec], ticket: cuda.Ticket, manifest: Manifest, region: Region
    ) -> dict[str, str]:
        """Compute each tensor's digest, by name, as soon as the tensor was copied."""
        if region.device != "cpu":  # by the device, which is fast only if it has much to do
            ticket.wait(len(specs) - 1)
            texts = iter(device_payload.digests(_part(manifest, specs), region))
            return {spec.name: text for spec, text in zip(specs, texts, strict=True)}

        def digest(batch: range) -> list[str]:
            ticket.wait(batch[-1])
            part = _part(manifest, specs[batch.start : batch.stop])
            return self._digester.digest(part, region)

        batches = list(_batches(specs))
        if len(batches) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "kvlink-digest")
        each = self._pool.map(digest, batches) if self._pool else map(digest, batches)
        texts = chain.from_iterable(each)
        return {spec.name: text for spec, text in zip(specs, texts, strict=True)}


class _OnDevice:
    """Tensors that one device copies."""

    def __init__(self, device: int):
        self.device, self.specs = device, list[TensorSpec]()
        self.views, self._packed = list[TensorView](), list[host.PackedView]()

    def add(self, view: TensorView, spec: TensorSpec, packed: host.PackedView) -> None:
        self.views.append(view)
        self.specs.append(spec)
        self._packed.append(packed)

    def begin(
        self,
        verb: str,
        manifest: Manifest,
        region: Region,
        pending: ExitStack,
        after: StreamEvents | None = None,
    ) -> cuda.Ticket:
        recorded = _recorded_on(self.device, after)
        batch = cuda.DeviceBatch(region.address, region.nbytes)
        for spec, view in zip(self.specs, self._packed, strict=True):
            batch.add(manifest.header_nbytes + spec.start, spec.nbytes, view, digest=False)
        ticket = pending.enter_context(cuda.Ticket((region, self.views)))
        with failures(self.specs):
            batch.begin(verb, ticket, self.device, current_stream(self.device), recorded)
        return ticket


class _TicketEvent:
    """A `DeviceEvent` of the CUDA library: the end of a ticket's copies."""

    def __init__(self, device: int, ticket: cuda.Ticket, copies: int = 1):
        self.device, self.ticket, self._copies = device, ticket, copies

    def wait(self) -> None:
        self.ticket.wait(self._copies - 1)

    def is_done(self) -> bool:
        return self.ticket.complete() >= self._copies

    def make_stream_wait(self) -> None:
        self.ticket.make_stream_wait(current_stream(self.device))


def _recorded_on(device: int, after: StreamEvents | None) -> cuda.Ticket | None:
    """The ticket to copy after on a device; None if there is nothing to wait for."""
    if after is None:
        return None
    event = after.of(device)
    if device not in after.devices or not isinstance(event, _TicketEvent | None):
        raise SchemaError(
            f"`after` was not recorded for tensors on cuda:{device} by this copier; "
            "call its `record` with the tensors that are copied"
        )
    return None if event is None else event.ticket


def _follow(views: Sequence[TensorView], after: StreamEvents | None) -> None:
    """Let what torch copies follow `after`, too: its copies run on the thread's own streams."""
    if after is not None and any(device_of(view) is not None for view in views):
        after.make_streams_wait()


def _part(manifest: Manifest, specs: Sequence[TensorSpec]) -> Manifest:
    return msgspec.structs.replace(manifest, tensors=tuple(specs))


def _batches(specs: Sequence[TensorSpec]) -> Iterator[range]:
    """Yield consecutive ranges of tensors with at least `BATCH` bytes each, but for the last."""
    start = nbytes = 0
    for number, spec in enumerate(specs):
        nbytes += spec.nbytes
        if nbytes >= BATCH or number + 1 == len(specs):
            yield range(start, number + 1)
            start, nbytes = number + 1, 0
