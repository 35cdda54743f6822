"""The pinned copier: asynchronous copies between CUDA devices and page-locked memory."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from omni_kvlink._native import cuda, host
from omni_kvlink.copier import device_payload
from omni_kvlink.copier.base import GatherHandle
from omni_kvlink.copier.fit import check_targets
from omni_kvlink.copier.native import NativeCopier, copy_error, split_digests
from omni_kvlink.copier.streams import StreamEvents, current_stream, device_of
from omni_kvlink.errors import NativeError, SchemaError
from omni_kvlink.payload.digests import chunks_of, compare
from omni_kvlink.payload.views import TensorView, aliases, check_sizes, check_view_fits, packed_view
from omni_kvlink.system.deadline import NEVER

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
        self._warned = False

    @property
    def features(self) -> str:
        """The host's instruction set, CUDA's version, and the first device's name."""
        return f"{host.features()}, {cuda.describe(0)}"

    def gather(
        self,
        sources: Sequence[TensorView],
        manifest: Manifest,
        region: Region,
        *,
        deadline: float = NEVER,
    ) -> list[str]:
        """Copy and wait; device tensors are copied while host tensors are."""
        with _CopiesInProgress() as copies:
            return self._begin(sources, manifest, region, copies, deadline=deadline)()

    def pack(self, sources: Sequence[TensorView], manifest: Manifest) -> bytes:
        """Leave it to the native copier: no source lies on a device."""
        return self._native.pack(sources, manifest)

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
        with _CopiesInProgress() as copies:
            digests = self._begin(sources, manifest, region, copies, after)

        def wait() -> list[str]:
            with copies:
                return digests()

        return GatherHandle(wait)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        """Copy out, blocking until device copies are complete, whose digests devices compute."""
        targets = check_targets(targets, manifest, region)
        assignment = _Assignment(self, targets, manifest, region, writing=True)
        with _CopiesInProgress() as copies:
            for part in _parts(manifest):
                assignment.assign(part)
                assignment.begin("scatter", copies)
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
        targets: Sequence[TensorView],
        *,
        after: StreamEvents | None = None,
    ) -> StreamEvents:
        """Check digests, copy host tensors, then enqueue device copies on streams of the library.

        Unlike `scatter`, no device tensor is written if a byte of one is wrong.
        """
        targets = check_targets(targets, manifest, region)
        assignment = _Assignment(self, targets, manifest, region, after, digest=False, writing=True)
        assignment.assign(range(len(manifest.tensors)))
        for numbers in assignment.by_device():
            self.verify(_part(manifest, numbers), region)
        host_manifest, views = assignment.host_part()
        _follow(views, after)
        if views:
            self._scatter_others(host_manifest, region, views)
        ends = [*self.record(views).events]  # of the copies that torch made
        with _CopiesInProgress() as copies:
            assignment.begin("scatter", copies)
        ends += [_TicketEvent(copy.device, copy.ticket) for copy in copies]
        return StreamEvents(ends)

    def _begin(
        self,
        sources: Sequence[TensorView],
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
            assignment.assign(part)
            assignment.begin("gather", copies)
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
        views: Sequence[TensorView],
        after: StreamEvents | None,
        deadline: float,
    ) -> list[str]:
        """Copy, by the host or by torch, what no device copies by itself; return the digests."""
        _follow(views, after)
        if region.device == "cpu":
            return super().gather(views, manifest, region, deadline=deadline)
        device_payload.copy_in(views, manifest.tensors, manifest.header_nbytes, region)
        return device_payload.digests(manifest, region)

    def _scatter_others(
        self, manifest: Manifest, region: Region, views: Sequence[TensorView]
    ) -> None:
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
            return device_payload.is_on(region, device)
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
        views: Sequence[TensorView],
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
        self._devices: dict[int, _OnDevice | None] = {}  # None: it cannot reach the payload

    def assign(self, part: range) -> None:
        """Assign the tensors of these numbers, which follow those of the call before."""
        for number in part:
            view = self._views[number]
            device = device_of(view)
            label = self._manifest.tensors[number].where
            packed = () if device is None else packed_view(view, label, writing=self._writing)
            copies = None
            if device is not None and packed:
                if device not in self._devices:
                    self._devices[device] = self._on_device(device)
                copies = self._devices[device]
            if copies is None:
                self.host_numbers.append(number)
            else:
                copies.add(number, view, packed, digest=self._digest)

    def _on_device(self, device: int) -> _OnDevice | None:
        if not self._copier._can_reach(self._region, device):
            return None
        crossover = self._copier._crossover
        return _OnDevice(device, self._manifest, self._region, self._after, crossover)

    def by_device(self) -> list[list[int]]:
        """For each device, the numbers of the tensors that it will copy."""
        return [part.numbers for part in self._devices.values() if part is not None]

    def begin(self, verb: str, copies: _CopiesInProgress) -> None:
        """Begin to copy, on each device, what was assigned to it since the last call."""
        kind = "pinned" if self._region.device == "cpu" else "device"
        for part in self._devices.values():
            if part is not None and part.numbers:
                self._copier._copies.add_nbytes(kind, part.begin(verb, copies))

    def host_part(self) -> tuple[Manifest, list[TensorView]]:
        """The tensors that are left to the host and torch, which are counted as pageable."""
        views = [self._views[number] for number in self.host_numbers]
        self._copier._copies.add("pageable", views)
        return _part(self._manifest, self.host_numbers), views


class _OnDevice:
    """The copies of one device, collected and begun part by part."""

    def __init__(
        self,
        device: int,
        manifest: Manifest,
        region: Region,
        after: StreamEvents | None,
        crossover: int,
    ):
        self._device, self._stream, self._crossover = device, current_stream(device), crossover
        self._manifest, self._region, self._after = manifest, region, _recorded_on(device, after)
        self._clear()

    def _clear(self) -> None:
        self.numbers: list[int] = []
        self._views: list[TensorView] = []
        self._specs: list[TensorSpec] = []
        region = self._region
        self._batch = cuda.DeviceBatch(region.address, region.nbytes, self._crossover)
        self._nbytes = 0

    def add(self, number: int, view: TensorView, packed: host.PackedView, *, digest: bool) -> None:
        spec = self._manifest.tensors[number]
        start, nbytes = self._manifest.header_nbytes + spec.start, spec.stop - spec.start
        self.numbers.append(number)
        self._views.append(view)
        self._specs.append(spec)
        self._batch.add(start, nbytes, packed, digest=digest and bool(spec.digest))
        self._nbytes += nbytes

    def begin(self, verb: str, copies: _CopiesInProgress) -> int:
        """Begin what was added since the last call; return its bytes."""
        ticket, nbytes = cuda.Ticket((self._region, self._views)), self._nbytes
        copies.append(_Copies(self._device, ticket, self.numbers, self._specs))
        try:
            self._batch.begin(verb, ticket, self._device, self._stream, self._after)
        except host.CopyFailed as failed:
            raise copy_error(failed, self._specs) from None
        self._clear()
        return nbytes


class _Copies(NamedTuple):
    """The tensors that a ticket's copies move."""

    device: int
    ticket: cuda.Ticket
    numbers: Sequence[int]
    specs: Sequence[TensorSpec]

    def digests(self) -> list[str]:
        """Block until all is copied; return the tensors' digests, empty where there are none."""
        text = self.ticket.digests().hex()
        self.ticket.close()
        return split_digests(text, self.specs)

    def verify(self) -> None:
        """Block until all is copied; IntegrityError for bytes that are not those committed."""
        for spec, text in zip(self.specs, self.digests(), strict=True):
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
