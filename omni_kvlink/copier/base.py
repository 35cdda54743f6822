"""The interface of a copier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from omni_kvlink.copier.streams import DeviceEvent, StreamEvents, device_of
from omni_kvlink.memory.region import Scratch
from omni_kvlink.system.waits import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Layout, Manifest
    from omni_kvlink.payload.views import Views


class GatherHandle:
    """A gather in progress; `wait` blocks until the bytes are in the payload.

    A handle that is dropped without `wait` blocks until its copies are complete, so that the
    memory they use is not freed under them.
    """

    def __init__(self, wait: Callable[[], list[str]]):
        self._wait: Callable[[], list[str]] | None = wait
        self._digests: list[str] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'copies' if self._wait else 'done'}>"

    def wait(self) -> list[str]:
        """Block until all bytes are in the payload; return the digests as `Copier.gather` does.

        Raises what `Copier.gather` raises. A second call returns the same digests at once.
        """
        if self._wait:
            self._digests = self._wait()
            self._wait = None
        return self._digests


MAX_PACKED = 64 << 10
"""Bytes of a payload that `Copier.pack_into` writes at most, as no other thread runs meanwhile."""


class Copier(ABC):
    """Copies bytes between tensors and a payload; never allocates its destination.

    `check_copier` in `omni_kvlink.testing` checks an implementation against this contract.
    """

    name: ClassVar[str]
    uses_device_memory: ClassVar[bool] = False
    """Whether a payload's region may be memory of a CUDA device (`Region.device`)."""
    features: str = ""
    """The instruction set in use; empty if the copier does not choose one."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def device_copies(self) -> dict[str, int]:
        """Bytes of device tensors copied so far, by kind; empty if not counted.

        "pinned": a device copied them from or to page-locked memory of a payload by itself;
        "device": from or to a payload in its own memory; "pageable": torch copied them.
        """
        return {}

    @abstractmethod
    def gather(
        self, sources: Views, manifest: Manifest, region: Region, *, deadline: float = NEVER
    ) -> list[str]:
        """Copy each tensor to its position in the payload; blocks until all are copied.

        Args:
            sources: in the manifest's order, dense or paged, with any strides, on any device.
            manifest: the plan.
            region: the payload's memory, at least `manifest.nbytes` long.
            deadline: when to stop unfinished (`time.monotonic`); looked at every few MiB. Copies
                that a device has begun are waited for.

        Returns:
            For each tensor the digest of the copied bytes, in the form of `TensorSpec.digest`;
            empty strings if the plan has no digests.

        Raises:
            SchemaError: a source does not match the plan.
            TransferTimeout: the deadline passed; nothing writes to the payload any more.
        """

    def pack(self, sources: Views, manifest: Manifest) -> bytes:
        """Copy a small payload together; return all of it, header and tensors, as `bytes`.

        Sources and errors are those of `gather`; each source lies on the host.
        """
        scratch = Scratch.take(manifest.nbytes)
        scratch.clear(manifest.nbytes)
        digests = self.gather(sources, manifest, scratch.region)
        scratch.region.write(0, manifest.encode(digests))
        return scratch.give_back(manifest.nbytes)

    def pack_known(self, sources: Views, layout: Layout, request_id: str) -> bytes | None:
        """Do what `pack` does, without a manifest, for the layout of an earlier payload.

        None if this copier cannot, or a source is not dense or not as the layout says: `pack` then
        copies it, or says what is wrong.
        """
        return None

    def pack_into(self, sources: Views, manifest: Manifest, region: Region) -> bool:
        """Do what `pack` does, into the region, which the payload begins; False if it cannot.

        For at most `MAX_PACKED` bytes, digests and header in the same pass; nothing is written if
        it returns False: `gather` then copies the tensors, or says what is wrong.
        """
        return False

    def record(self, views: Views) -> StreamEvents:
        """Record what the calling thread's current streams hold now, on the devices of tensors.

        Another thread can then begin to copy them `after` that; it has current streams of its own.
        Does not block.
        """
        devices = {device_of(view) for view in views} - {None}
        return StreamEvents([self._event_on(device) for device in devices if device is not None])

    def _event_on(self, device: int) -> DeviceEvent:
        """Record what the calling thread's current stream of a device holds now."""
        return _TorchEvent(device)

    def begin_gather(
        self,
        sources: Views,
        manifest: Manifest,
        region: Region,
        *,
        after: StreamEvents | None = None,
    ) -> GatherHandle:
        """Start what `gather` does. No source may change until the handle's `wait` has returned.

        Device tensors are copied behind the calling thread's current streams, or `after` what
        `record` returned for them. A manifest with some of the payload's tensors copies those.
        """
        if after is not None:
            after.make_streams_wait()
        digests = self.gather(sources, manifest, region)
        return GatherHandle(lambda: digests)

    @abstractmethod
    def digest(self, manifest: Manifest, region: Region, *, deadline: float = NEVER) -> list[str]:
        """Return what `gather` returns, for bytes that are in the payload already.

        TransferTimeout if the deadline passed before.
        """

    @abstractmethod
    def scatter(self, manifest: Manifest, region: Region, targets: Views) -> None:
        """Copy a payload into the caller's dense or paged tensors, checking digests on the way.

        Raises:
            SchemaError: a target does not match the manifest, or shares memory with another one,
                with itself or with the payload; nothing was written.
            IntegrityError: bytes differ from those committed; the targets' content is invalid.
        """

    def begin_scatter(
        self,
        manifest: Manifest,
        region: Region,
        targets: Views,
        *,
        after: StreamEvents | None = None,
    ) -> StreamEvents:
        """Start what `scatter` does; digests are checked, and host tensors copied, on return.

        Device tensors are written behind the calling thread's current streams, or `after` what
        `record` returned for them. The result is the end of the copies: `wait` for it, or
        `make_streams_wait`, before the targets are used and before the payload is released. A
        manifest with some of the payload's tensors copies those. Raises what `scatter` does.
        """
        if after is not None:
            after.make_streams_wait()
        self.scatter(manifest, region, targets)
        return self.record(targets)

    @abstractmethod
    def verify(self, manifest: Manifest, region: Region) -> None:
        """Check every digest of a payload.

        Raises:
            IntegrityError: names branch, layer, K or V, and the first MiB that differs.
        """


class _TorchEvent(DeviceEvent):
    """An event of torch, recorded on the calling thread's current stream."""

    def __init__(self, device: int):
        self.device = device
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()

    def is_done(self) -> bool:
        return bool(self._event.query())

    def make_stream_wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._event)
