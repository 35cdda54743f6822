"""The pinned copier: asynchronous copies between CUDA devices and page-locked memory."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from omni_kvlink._native import cuda, host
from omni_kvlink.copier import device_payload
from omni_kvlink.copier.base import GatherHandle
from omni_kvlink.copier.fit import check_targets
from omni_kvlink.copier.native import NativeCopier, failures, split_digests
from omni_kvlink.copier.streams import StreamEvents, current_stream, device_of
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.digests import chunks_of, compare
from omni_kvlink.payload.manifest import TensorSpec
from omni_kvlink.payload.views import TensorView, check_sizes, check_view_fits, packed_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

MAX_THREADS = 8
"""Threads of the host that read as fast as PCIe 5 delivers, 54 GB/s: one alone reads 10 to 24."""
FIRST_PART, LAST_PART = 8 << 20, 64 << 20
"""Bytes whose copies are enqueued before later tensors are prepared: few at first, so that the
first byte moves at once, then twice as many each time."""


class PinnedCopier(NativeCopier):
    """Copies dense, strided and paged device tensors; host tensors are left to the native copier.

    The payload's memory is page-locked at its first use, a whole mapping at a time. If the system
    refuses that, torch copies through pageable memory, and one warning says why and what helps.
    A device computes the digests of what it copies, from the bytes in its own memory: what a
    consumer compares with them has crossed the bus. A payload in a device's own memory is copied
    there: no byte meets the host. `threads=0` chooses the number of threads that `verify` runs by
    the number of cores.
    """

    name = "pinned"
    uses_device_memory = True

    def __init__(self, *, threads: int = 0):
        reason = cuda.missing() or cuda.no_device()
        if reason:
            raise NativeError(reason)
        super().__init__(threads=threads)
        threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._verifier = NativeCopier(threads=threads)
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
        """Copy out, blocking until device copies are complete, whose digests devices compute."""
        check_targets(targets, manifest, region)
        views, specs, copies = list[TensorView](), list[TensorSpec](), list[_Copies]()
        with ExitStack() as pending:
            for part in _parts(manifest):
                others, their_specs, devices = self._by_device(part, targets, manifest, region)
                views += others
                specs += their_specs
                for each in devices:
                    copies.append(each.begin("scatter", manifest, region, pending))
                    self._count_begun(each, region)
            if specs:
                self._scatter_others(_part(manifest, specs), region, views)
            for those in copies:
                those.verify()

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        """Compute the digests where the payload lies."""
        is_near = region.device == "cpu"
        return (super().digest if is_near else device_payload.digests)(manifest, region)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check all digests where the payload lies."""
        is_near = region.device == "cpu"
        (self._verifier.verify if is_near else device_payload.verify)(manifest, region)

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
        whole = range(len(manifest.tensors))
        views, specs, devices = self._by_device(whole, targets, manifest, region)
        for part in devices:
            self.verify(_part(manifest, part.specs), region)
        _follow(views, after)
        if specs:
            self._scatter_others(_part(manifest, specs), region, views)
        ends = [*self.record(views).events]  # of the copies that torch made
        with ExitStack() as pending:
            for part in devices:
                copies = part.begin("scatter", manifest, region, pending, after, digest=False)
                self._count_begun(part, region)
                ends.append(_TicketEvent(part.device, copies.ticket))
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
        check_sizes(sources, manifest, region)
        views, specs, copies = list[TensorView](), list[TensorSpec](), list[_Copies]()
        for part in _parts(manifest):
            for number in part:
                check_view_fits(sources[number], manifest.tensors[number])
            others, their_specs, devices = self._by_device(part, sources, manifest, region)
            views += others
            specs += their_specs
            for each in devices:
                copies.append(each.begin("gather", manifest, region, pending, after))
                self._count_begun(each, region)
        by_name = self._gather_others(_part(manifest, specs), region, views, after) if specs else {}

        def wait() -> list[str]:
            for each in copies:
                by_name.update(each.digests())
            return [by_name[spec.name] for spec in manifest.tensors]

        return wait

    def _gather_others(
        self,
        manifest: Manifest,
        region: Region,
        views: Sequence[TensorView],
        after: StreamEvents | None,
    ) -> dict[str, str]:
        """Copy, by the host or by torch, what no device copies by itself; return the digests."""
        _follow(views, after)
        if region.device == "cpu":
            digests = super().gather(views, manifest, region)
        else:
            device_payload.copy_in(views, manifest.tensors, manifest.header_nbytes, region)
            digests = device_payload.digests(manifest, region)
        names = (spec.name for spec in manifest.tensors)
        return dict(zip(names, digests, strict=True))

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
        self, part: range, views: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> tuple[list[TensorView], list[TensorSpec], list[_OnDevice]]:
        """Split tensors by who copies them, each in the manifest's order; the host comes first."""
        on_host, specs = list[TensorView](), list[TensorSpec]()
        devices: dict[int, _OnDevice] = {}
        reached: dict[int, bool] = {}
        for number in part:
            view, spec = views[number], manifest.tensors[number]
            device = device_of(view)
            packed = () if device is None else packed_view(view, on=view.device.type)
            if packed and device not in reached:
                assert device is not None
                reached[device] = self._can_reach(region, device)
            if device is None or not packed or not reached[device]:
                on_host.append(view)
                specs.append(spec)
                continue
            if device not in devices:
                devices[device] = _OnDevice(device)
            devices[device].add(view, spec, packed)
        self._copies.add("pageable", on_host)
        return on_host, specs, list(devices.values())

    def _count_begun(self, each: _OnDevice, region: Region) -> None:
        """Count what a device copies: behind the call that lets it begin."""
        self._copies.add("pinned" if region.device == "cpu" else "device", each.views)

    def _count(self, views: list[TensorView]) -> None:
        """Count nothing: `_by_device` and `_count_begun` do so."""

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


class _Copies(NamedTuple):
    """Tensors that a ticket's copies move, and the batch that knows their digests."""

    ticket: cuda.Ticket
    batch: cuda.DeviceBatch
    specs: Sequence[TensorSpec]

    def digests(self) -> dict[str, str]:
        """Block until all is copied; return the digests by name, empty where there are none."""
        text = self.batch.digests(self.ticket).hex()
        self.ticket.close()
        return split_digests(text, self.specs)

    def verify(self) -> None:
        """Block until all is copied; IntegrityError for bytes that are not those committed."""
        for spec, text in zip(self.specs, self.digests().values(), strict=True):
            if text != spec.digest:
                compare(spec, chunks_of(text))


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
        *,
        digest: bool = True,
    ) -> _Copies:
        recorded, data = _recorded_on(self.device, after), manifest.header_nbytes
        batch = cuda.DeviceBatch(region.address, region.nbytes)
        for spec, view in zip(self.specs, self._packed, strict=True):
            batch.add(data + spec.start, spec.nbytes, view, digest=digest and bool(spec.digest))
        ticket = pending.enter_context(cuda.Ticket((region, self.views)))
        with failures(self.specs):
            batch.begin(verb, ticket, self.device, current_stream(self.device), recorded)
        return _Copies(ticket, batch, self.specs)


class _TicketEvent:
    """A `DeviceEvent` of the CUDA library: the end of a ticket's copies."""

    def __init__(self, device: int, ticket: cuda.Ticket):
        self.device, self.ticket = device, ticket

    def wait(self) -> None:
        self.ticket.wait()

    def is_done(self) -> bool:
        return self.ticket.is_complete()

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


def _parts(manifest: Manifest) -> Iterator[range]:
    """Yield numbers of tensors whose copies are enqueued together; see `FIRST_PART`."""
    start, nbytes, enough = 0, 0, FIRST_PART
    for number, spec in enumerate(manifest.tensors):
        nbytes += spec.nbytes
        if nbytes >= enough or number + 1 == len(manifest.tensors):
            yield range(start, number + 1)
            start, nbytes, enough = number + 1, 0, min(2 * max(enough, nbytes), LAST_PART)
