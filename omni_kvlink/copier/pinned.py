"""The pinned copier: asynchronous copies between CUDA devices and page-locked memory."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING

from omni_kvlink._native import cuda, device_memory, host
from omni_kvlink.copier import device_payload
from omni_kvlink.copier.base import GatherHandle
from omni_kvlink.copier.native import NativeCopier, copy_error, split_digests
from omni_kvlink.copier.streams import DeviceEvent, StreamEvents, current_stream, device_of
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.digests import chunks_of, compare
from omni_kvlink.payload.overlap import check_targets
from omni_kvlink.payload.views import (
    TensorView,
    Views,
    aliases,
    check_sizes,
    check_view_fits,
    packed_view,
)
from omni_kvlink.system.waits import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec

MAX_THREADS = 8
"""Threads of the host that read as fast as PCIe 5 delivers, 54 GB/s: one alone reads 10 to 24."""
FIRST_PART, LAST_PART = 12 << 20, 64 << 20
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
        self._native = NativeCopier(threads=threads)
        self._crossover = cuda.crossover()
        self.features += f", {cuda.describe(0)}"  # CUDA's version, and the first device's name
        self._warned = False

    def gather(
        self, sources: Views, manifest: Manifest, region: Region, *, deadline: float = NEVER
    ) -> list[str]:
        """Copy and wait; device tensors are copied while host tensors are."""
        with _CopiesInProgress() as copies:
            return self._begin(sources, manifest, region, copies, deadline=deadline)()

    def pack(self, sources: Views, manifest: Manifest) -> bytes:
        """Leave it to the native copier: no source lies on a device."""
        return self._native.pack(sources, manifest)

    def _event_on(self, device: int) -> DeviceEvent:
        return _TicketEvent(device, cuda.record(device, current_stream(device)))

    def begin_gather(
        self,
        sources: Views,
        manifest: Manifest,
        region: Region,
        *,
        after: StreamEvents | None = None,
    ) -> GatherHandle:
        """Enqueue device copies on streams of the library; copy host tensors at once."""
        with _CopiesInProgress() as copies:
            digests = self._begin(sources, manifest, region, copies, after)

        def wait() -> list[str]:
            with copies:
                return digests()

        return GatherHandle(wait)

    def scatter(self, manifest: Manifest, region: Region, targets: Views) -> None:
        """Copy out, blocking until device copies are complete, whose digests devices compute."""
        targets = check_targets(targets, manifest, region)
        assignment = _Assignment(self, targets, manifest, region, writing=True)
        with _CopiesInProgress() as copies:
            for part in _parts(manifest):
                assignment.begin("scatter", assignment.assign(part), copies)
            if assignment.host_numbers:
                host_manifest, views = assignment.host_part()
                self._scatter_others(host_manifest, region, views)
            for copy in copies.drain():
                copy.verify()

    def digest(self, manifest: Manifest, region: Region, *, deadline: float = NEVER) -> list[str]:
        """Compute the digests where the payload lies."""
        if region.device != "cpu":
            return device_payload.digests(manifest, region)
        return super().digest(manifest, region, deadline=deadline)

    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check all digests where the payload lies."""
        is_near = region.device == "cpu"
        (self._native.verify if is_near else device_payload.verify)(manifest, region)

    def begin_scatter(
        self,
        manifest: Manifest,
        region: Region,
        targets: Views,
        *,
        after: StreamEvents | None = None,
    ) -> StreamEvents:
        """Check digests, copy host tensors, then enqueue device copies on streams of the library.

        Unlike `scatter`, no device tensor is written if a byte of one is wrong.
        """
        targets = check_targets(targets, manifest, region)
        assignment = _Assignment(self, targets, manifest, region, after, digest=False, writing=True)
        new = assignment.assign(range(len(manifest.tensors)))
        for each in new:
            self.verify(_part(manifest, each.numbers), region)
        host_manifest, views = assignment.host_part()
        _follow(views, after)
        if views:
            self._scatter_others(host_manifest, region, views)
        ends = [*self.record(views).events]  # of the copies that torch made
        with _CopiesInProgress() as copies:
            assignment.begin("scatter", new, copies)
        ends += [_TicketEvent(copy.device, copy.ticket) for copy in copies]
        return StreamEvents(ends)

    def _begin(
        self,
        sources: Views,
        manifest: Manifest,
        region: Region,
        copies: _CopiesInProgress,
        after: StreamEvents | None = None,
        deadline: float = NEVER,
    ) -> Callable[[], list[str]]:
        """Copy host tensors and start copying the others; return what waits for the digests."""
        check_sizes(sources, manifest, region)
        sources = aliases(sources)
        assignment = _Assignment(self, sources, manifest, region, after)
        for part in _parts(manifest):
            for number in part:
                check_view_fits(sources[number], manifest.tensors[number])
            assignment.begin("gather", assignment.assign(part), copies)
        digests = [""] * len(sources)
        if assignment.host_numbers:
            host_manifest, views = assignment.host_part()
            host_digests = self._gather_others(host_manifest, region, views, after, deadline)
            for number, digest in zip(assignment.host_numbers, host_digests, strict=True):
                digests[number] = digest

        def wait() -> list[str]:
            for copy in copies.drain():
                for number, digest in zip(copy.numbers, copy.digests(), strict=True):
                    digests[number] = digest
            return digests

        return wait

    def _gather_others(
        self,
        manifest: Manifest,
        region: Region,
        views: Views,
        after: StreamEvents | None,
        deadline: float,
    ) -> list[str]:
        """Copy, by the host or by torch, what no device copies by itself; return the digests."""
        _follow(views, after)
        if region.device == "cpu":
            return super().gather(views, manifest, region, deadline=deadline)
        device_payload.copy_in(views, manifest.tensors, manifest.header_nbytes, region)
        return device_payload.digests(manifest, region)

    def _scatter_others(self, manifest: Manifest, region: Region, views: Views) -> None:
        """Copy out, by the host or by torch, what no device copies by itself."""
        if region.device == "cpu":
            super().scatter(manifest, region, views)
        else:
            device_payload.verify(manifest, region)
            device_payload.copy_out(views, manifest.tensors, manifest.header_nbytes, region)

    def _count(self, views: list[TensorView]) -> None:
        """Count nothing: `_Assignment` does so."""

    def _can_reach(self, region: Region, device: int) -> bool:
        """Whether a device copies from and to a payload by itself."""
        if region.device != "cpu":
            return device_memory.number_of(region.device) == device
        reason = cuda.register(region, device)
        if reason and not self._warned:
            self._warned = True
            warnings.warn(
                f"the payload cannot be page-locked: {reason}. "
                "Device tensors are copied by torch: the same bytes, more slowly",
                RuntimeWarning,
                stacklevel=6,
            )
        return reason is None


class _Assignment:
    """The tensors of a call, by the device that copies them, or left to the host and torch."""

    def __init__(
        self,
        copier: PinnedCopier,
        views: Views,
        manifest: Manifest,
        region: Region,
        after: StreamEvents | None = None,
        *,
        digest: bool = True,
        writing: bool = False,
    ):
        self.host_numbers: list[int] = []
        """Numbers of the tensors that are left to the host and torch."""
        self._copier, self._views, self._manifest, self._region = copier, views, manifest, region
        self._after, self._digest, self._writing = after, digest, writing
        self._can_reach: dict[int, bool] = {}

    def assign(self, part: range) -> list[_Copies]:
        """Assign the tensors of these numbers; return the copies of each device, to be begun."""
        by_device: dict[int, _Copies] = {}
        for number in part:
            view, spec = self._views[number], self._manifest.tensors[number]
            device = device_of(view)
            packed = () if device is None else packed_view(view, spec.where, writing=self._writing)
            if device is None or not packed or not self._reaches(device):
                self.host_numbers.append(number)
                continue
            if device not in by_device:
                crossover = self._copier._crossover
                by_device[device] = _Copies(device, self._region, self._after, crossover)
            start, digest = self._manifest.header_nbytes + spec.start, self._digest
            by_device[device].add(number, view, spec, start, packed, digest=digest)
        return list(by_device.values())

    def _reaches(self, device: int) -> bool:
        if device not in self._can_reach:
            self._can_reach[device] = self._copier._can_reach(self._region, device)
        return self._can_reach[device]

    def begin(self, verb: str, new: list[_Copies], copies: _CopiesInProgress) -> None:
        """Begin copies that were assigned; `copies` has those that were begun."""
        kind = "pinned" if self._region.device == "cpu" else "device"
        for each in new:
            copies.append(each)
            each.begin(verb)
            self._copier._copies.add_nbytes(kind, each.nbytes)

    def host_part(self) -> tuple[Manifest, list[TensorView]]:
        """The tensors that are left to the host and torch, which are counted as pageable."""
        views = [self._views[number] for number in self.host_numbers]
        self._copier._copies.add("pageable", views)
        return _part(self._manifest, self.host_numbers), views


class _Copies:
    """Tensors that one device copies together, first collected, then begun with a ticket."""

    def __init__(self, device: int, region: Region, after: StreamEvents | None, crossover: int):
        self.device, self._after = device, _recorded_on(device, after)
        self._batch = cuda.DeviceBatch(region.address, region.nbytes, crossover)
        self._views: list[TensorView] = []
        self.ticket, self.nbytes = cuda.Ticket((region, self._views)), 0
        self.numbers: list[int] = []
        self._specs: list[TensorSpec] = []

    def add(
        self,
        number: int,
        view: TensorView,
        spec: TensorSpec,
        start: int,
        packed: host.PackedView,
        *,
        digest: bool,
    ) -> None:
        self.numbers.append(number)
        self._views.append(view)
        self._specs.append(spec)
        self._batch.add(start, spec.nbytes, packed, digest=digest and bool(spec.digest))
        self.nbytes += spec.nbytes

    def begin(self, verb: str) -> None:
        """Begin to copy what was added."""
        stream = current_stream(self.device)
        try:
            self._batch.begin(verb, self.ticket, self.device, stream, self._after)
        except host.CopyFailed as failed:
            raise copy_error(failed, self._specs) from None
        del self._batch, self._views, self._after  # the ticket keeps what the copies use

    def digests(self) -> list[str]:
        """Block until all is copied; return the tensors' digests, empty where there are none."""
        text = self.ticket.digests().hex()
        self.ticket.close()
        return split_digests(text, self._specs)

    def verify(self) -> None:
        """Block until all is copied; IntegrityError for bytes that are not those committed."""
        for spec, text in zip(self._specs, self.digests(), strict=True):
            if text != spec.digest:
                compare(spec, chunks_of(text))


class _CopiesInProgress(list[_Copies]):
    """The copies that a call has begun; as a context, none is in progress after an error."""

    def __enter__(self) -> _CopiesInProgress:
        return self

    def drain(self) -> Iterator[_Copies]:
        """Yield each of the copies; one is freed when the next one is asked for.

        Freeing them takes time, while later ones are in progress.
        """
        while self:
            yield self[0]
            del self[0]

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            with ExitStack() as stack:  # all of them, even if one fails
                for copy in self:
                    stack.callback(copy.ticket.close)


class _TicketEvent(DeviceEvent):
    """The end of a ticket's copies."""

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


def _follow(views: Views, after: StreamEvents | None) -> None:
    """Let what torch copies follow `after`, too: its copies run on the thread's own streams."""
    if after is not None and any(device_of(view) is not None for view in views):
        after.make_streams_wait()


def _part(manifest: Manifest, numbers: Sequence[int]) -> Manifest:
    return manifest.only(manifest.tensors[number] for number in numbers)


def _parts(manifest: Manifest) -> Iterator[range]:
    """Yield numbers of tensors whose copies are enqueued together; see `FIRST_PART`."""
    start, nbytes, enough, last = 0, 0, FIRST_PART, len(manifest.tensors) - 1
    for number, spec in enumerate(manifest.tensors):
        nbytes += spec.stop - spec.start
        if nbytes >= enough or number == last:
            yield range(start, number + 1)
            start, nbytes, enough = number + 1, 0, min(2 * max(enough, nbytes), LAST_PART)
