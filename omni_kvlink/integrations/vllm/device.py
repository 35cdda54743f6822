"""Where an engine's KV pools are, and how copies of their blocks are ordered with its passes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from omni_kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Mark: TypeAlias = Any
"""A position in a stream, from `PoolDevice.record`; None on the host."""


class PoolDevice(ABC):
    """The memory of an engine's KV pools. No method waits for the device."""

    overlaps: ClassVar[bool]
    """Whether the engine's thread may go on while blocks are copied: both are ordered by marks."""

    @abstractmethod
    def record(self) -> Mark:
        """Mark the end of the work that the calling thread's current stream holds now."""

    @abstractmethod
    def follow(self, mark: Mark) -> AbstractContextManager[None]:
        """Run the copies that this thread begins in the block behind a mark, on a stream of ours.

        `record` in the block marks the end of these copies.
        """

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """Make later work of the calling thread's current stream wait for a mark."""

    @staticmethod
    def of(pools: Iterable[torch.Tensor]) -> PoolDevice:
        """The device that all pools are on.

        Raises:
            UnavailableError: they are on several devices, or on one of a kind not supported.
        """
        devices = {pool.device for pool in pools}
        names = ", ".join(sorted(map(str, devices)))
        if len(devices) != 1:
            raise UnavailableError(
                f"the KV pools are on {names or 'no device'}; this connector moves those of one "
                "device: run the layers of each device in a rank of its own"
            )
        (device,) = devices
        if device.type == "cpu":
            return HostMemory()
        if device.type == "cuda":
            return CudaDevice(device)
        raise UnavailableError(
            f"the KV pools are on {device}: this connector moves those of CUDA devices and of "
            "vLLM's CPU backend"
        )


class HostMemory(PoolDevice):
    """Pools in host memory: a copy has ended when the call that makes it returns."""

    overlaps = False

    def record(self) -> Mark:
        """None: there is no stream."""
        return None

    def follow(self, mark: Mark) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()

    def wait(self, mark: Mark) -> None:
        """Nothing to wait for."""


class CudaDevice(PoolDevice):
    """Pools on one CUDA device; each thread that copies has a stream, behind whose work copies run.

    The copier enqueues its copies behind torch's current stream, so that is what `follow` sets.
    """

    overlaps = True

    def __init__(self, device: torch.device):
        self._device = device
        self._own = threading.local()

    def record(self) -> Mark:
        """An event on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def follow(self, mark: Mark) -> Iterator[None]:
        """Make this thread's own stream wait for the event, and the current one."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(mark)
            yield

    def wait(self, mark: Mark) -> None:
        """Make the current stream wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(mark)
