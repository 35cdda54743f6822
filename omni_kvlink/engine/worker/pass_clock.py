"""`PassClock`: how long forward passes take, without a wait for the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing import TypeAlias

_Mark: TypeAlias = "tuple[float, Any]"  # the host's seconds, and the device's event if there is one


class PassClock:
    """Runs from its making to `stop`: on a CUDA device between two events of its current stream.

    Neither call waits. Elsewhere, and where the device has not reached the second event when
    `seconds` is called, it is the host's clock that counts.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._start = self._stop = self._mark()

    def stop(self) -> None:
        """End the time here, behind all work that was enqueued."""
        self._stop = self._mark()

    def seconds(self) -> float:
        """Return the seconds until the last `stop`."""
        (began, start), (ended, stop) = self._start, self._stop
        if stop is not None and stop.query():
            return float(1e-3 * start.elapsed_time(stop))
        return ended - began

    def _mark(self) -> _Mark:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
        return time.perf_counter(), event
