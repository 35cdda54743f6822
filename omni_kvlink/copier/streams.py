"""CUDA streams: moments in their work, and the calling thread's current ones."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import torch

from omni_kvlink.payload.paged import PagedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from omni_kvlink.payload.views import TensorView

T = TypeVar("T")

# Without a Stream object, which costs more than the call; in builds of torch with CUDA.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class DeviceEvent(ABC):
    """A moment in the work of one device."""

    device: int

    @abstractmethod
    def wait(self) -> None:
        """Block until the device has reached it."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the device has reached it; does not block."""

    @abstractmethod
    def make_stream_wait(self) -> None:
        """Make later work of the calling thread's current stream wait for it; does not block."""


class DeviceCopies:
    """Bytes of device tensors that a copier has copied, in either direction; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = {"pinned": 0, "device": 0, "pageable": 0}

    def add(self, kind: str, views: Iterable[TensorView]) -> None:
        """Add tensors of one kind; see `Copier.device_copies`."""
        self.add_nbytes(kind, sum(view.nbytes for view in views if device_of(view) is not None))

    def add_nbytes(self, kind: str, nbytes: int) -> None:
        """Add bytes of device tensors of one kind."""
        with self._lock:
            self._nbytes[kind] += nbytes

    def nbytes(self) -> dict[str, int]:
        """The bytes so far, by kind."""
        with self._lock:
            return dict(self._nbytes)


class StreamEvents:
    """A moment in the work of one or more devices, from `Copier.record` or `begin_scatter`.

    Any thread may use it. Until `wait` has returned, or the object is dropped, it keeps the memory
    that the copies before it use; dropping it blocks until those copies are complete.
    """

    def __init__(self, events: Sequence[DeviceEvent] = ()):
        self.events = tuple(events)
        self.devices = frozenset(event.device for event in events)

    def __repr__(self) -> str:
        return f"<StreamEvents of {len(self.devices)} devices>"

    def wait(self) -> None:
        """Block until the devices have reached it."""
        for event in self.events:
            event.wait()
        self.events = ()

    def is_done(self) -> bool:
        """Whether the devices have reached it; does not block."""
        return all(event.is_done() for event in self.events)

    def make_streams_wait(self) -> None:
        """Make later work of the calling thread's current streams wait for it; does not block."""
        for event in self.events:
            event.make_stream_wait()

    def of(self, device: int) -> DeviceEvent | None:
        """The moment of one device; None if it is not one of `devices`, or was waited for."""
        return next((event for event in self.events if event.device == device), None)


def device_of(view: TensorView) -> int | None:
    """The number of a tensor's CUDA device; None if it is on another kind, or on the host."""
    tensor = view.pool if isinstance(view, PagedTensor) else view
    return tensor.get_device() if tensor.is_cuda else None


def current_stream(device: int) -> int:
    """The calling thread's current stream of a device, as CUDA's handle."""
    if _raw_stream is not None:
        return int(_raw_stream(device))
    return int(torch.cuda.current_stream(device).cuda_stream)


def synchronize(device: int) -> None:
    """Block until the calling thread's current stream of a device has done its work."""
    torch.cuda.current_stream(device).synchronize()


class CurrentStreams:
    """The current CUDA streams of the thread that makes this, for another one that works for it.

    Each thread has current streams of its own: what a second thread copies would not wait for the
    work that the first one has queued.
    """

    def __init__(self) -> None:
        # A process that has not used CUDA must not open a context here.
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    def __repr__(self) -> str:
        return f"<CurrentStreams of {len(self._streams)} devices>"

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Make them the calling thread's current streams within the `with` block."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def call(self, function: Callable[[], T]) -> T:
        """Call a function while they are the calling thread's."""
        with self.use():
            return function()
