"""The pinned copier: between a GPU and page-locked memory, overlapped with everything else."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import torch

from omni_kvlink._native import cuda, host
from omni_kvlink.copier.base import Copier, GatherHandle
from omni_kvlink.copier.native import NativeCopier, check_places, failures
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.manifest import Manifest, TensorSpec
from omni_kvlink.payload.views import TensorView, packed_view

BATCH = 8 << 20
"""Bytes digested by one thread at a time, while others are still on their way."""
MOST_THREADS = 4
"""As many digest what one link of PCIe brings."""


class PinnedCopier(Copier):
    """Copies dense, strided and paged device tensors; a host tensor goes the native copier's way.

    The payload's memory is page-locked at its first use, whole mappings at a time. Where that is
    refused, torch copies through pageable memory, and one warning says why and what helps.

    Args:
        threads: how many compute digests; 0 chooses by the number of cores.

    Raises:
        NativeError: there is no CUDA library, no native one, or no device; says what helps.
    """

    name = "pinned"

    def __init__(self, *, threads: int = 0):
        reason = cuda.missing() or cuda.no_device()
        if reason:
            raise NativeError(reason)
        self._host, self._digester = NativeCopier(threads=threads), NativeCopier(threads=1)
        self._threads = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._warned = False

    @property
    def features(self) -> str:
        """Instruction set, CUDA's version, and the first device's name."""
        return f"{host.features()}, {cuda.describe(0)}"

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        with ExitStack() as moving:  # whatever happens, nothing is moving afterwards
            return self._begin(sources, manifest, region, moving)()

    def begin_gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> GatherHandle:
        with ExitStack() as begun:
            digests = self._begin(sources, manifest, region, begun)
            moving = begun.pop_all()

        def finish() -> list[str]:
            with moving:
                return digests()

        return GatherHandle(finish)

    def digest(self, manifest: Manifest, region: Region) -> list[str]:
        return self._host.digest(manifest, region)

    def scatter(self, manifest: Manifest, region: Region, targets: Sequence[TensorView]) -> None:
        check_places(targets, manifest, region)
        host, devices = self._split(targets, manifest, region)
        with ExitStack() as moving:
            for part in devices:
                part.begin_scatter(manifest, region, moving)
            self._host.scatter(_part(manifest, host.specs), region, host.places)
            for part in devices:
                self._host.verify(_part(manifest, part.specs), region)

    def verify(self, manifest: Manifest, region: Region) -> None:
        self._host.verify(manifest, region)

    def _begin(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region, moving: ExitStack
    ) -> Callable[[], list[str]]:
        """Copy what is on the host, and begin the rest; gives what waits for the digests."""
        check_places(sources, manifest, region)
        host, devices = self._split(sources, manifest, region)
        tickets = [part.begin_gather(manifest, region, moving) for part in devices]
        digests = self._host.gather(host.places, _part(manifest, host.specs), region)
        found = dict(zip(_names(host.specs), digests, strict=True))

        def finish() -> list[str]:
            for part, ticket in zip(devices, tickets, strict=True):
                found.update(self._digests(part.specs, ticket, manifest, region))
            return [found[spec.name] for spec in manifest.tensors]

        return finish

    def _split(
        self, places: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> tuple[_Host, list[_OnDevice]]:
        """What the native copier moves, and what each device does; in the manifest's order."""
        host, devices = _Host([], []), dict[int, _OnDevice]()
        for place, spec in zip(places, manifest.tensors, strict=True):
            device = _device_of(place)
            words = () if device is None else packed_view(place, on=place.device.type)
            if device is None or not words or not self._is_pinned(region, device):
                host.places.append(place)
                host.specs.append(spec)
            else:
                devices.setdefault(device, _OnDevice(device)).add(place, spec, words)
        return host, list(devices.values())

    def _is_pinned(self, region: Region, device: int) -> bool:
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
        """Each tensor's digest by name, computed as soon as it has landed."""

        def digest(batch: range) -> list[str]:
            ticket.wait(batch[-1])
            part = _part(manifest, specs[batch.start : batch.stop])
            return self._digester.digest(part, region)

        batches = list(_batches(specs))
        if len(batches) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "kvlink-digest")
        each = self._pool.map(digest, batches) if self._pool else map(digest, batches)
        return dict(zip(_names(specs), [text for batch in each for text in batch], strict=True))


class _Host(NamedTuple):
    """What the native copier moves."""

    places: list[TensorView]
    specs: list[TensorSpec]


class _OnDevice:
    """What one device moves."""

    def __init__(self, device: int):
        self.device = device
        self.places: list[TensorView] = []
        self.specs: list[TensorSpec] = []
        self._views: list[host.PackedView] = []

    def add(self, place: TensorView, spec: TensorSpec, words: host.PackedView) -> None:
        self.places.append(place)
        self.specs.append(spec)
        self._views.append(words)

    def begin_gather(self, manifest: Manifest, region: Region, moving: ExitStack) -> cuda.Ticket:
        call, ticket = self._call(manifest, region), cuda.Ticket((region, self.places))
        moving.enter_context(ticket)
        with failures(self.specs):
            call.begin_gather(ticket, self.device, _current_stream(self.device))
        return ticket

    def begin_scatter(self, manifest: Manifest, region: Region, moving: ExitStack) -> None:
        call, ticket = self._call(manifest, region), cuda.Ticket((region, self.places))
        moving.enter_context(ticket)
        with failures(self.specs):
            call.begin_scatter(ticket, self.device, _current_stream(self.device))

    def _call(self, manifest: Manifest, region: Region) -> cuda.DeviceBatch:
        call = cuda.DeviceBatch(region.address, region.nbytes)
        for spec, view in zip(self.specs, self._views, strict=True):
            call.add(manifest.header_nbytes + spec.start, spec.nbytes, view, digest=False)
        return call


def _device_of(place: TensorView) -> int | None:
    return place.device.index if place.device.type == "cuda" else None


def _current_stream(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def _part(manifest: Manifest, specs: Sequence[TensorSpec]) -> Manifest:
    return msgspec.structs.replace(manifest, tensors=tuple(specs))


def _names(specs: Sequence[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def _batches(specs: Sequence[TensorSpec]) -> Iterator[range]:
    """Neighbours of at least `BATCH` bytes."""
    start = nbytes = 0
    for number, spec in enumerate(specs):
        nbytes += spec.nbytes
        if nbytes >= BATCH or number + 1 == len(specs):
            yield range(start, number + 1)
            start, nbytes = number + 1, 0
