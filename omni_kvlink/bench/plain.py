"""The yardstick: one thread copies as many bytes between two warm buffers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

_STEP = 512 << 10
_TRIALS = 3


class PlainCopy:
    """The fastest of three plain ways to copy `nbytes` bytes, chosen once, on this machine.

    Attributes:
        name: of the way that won.
        source, target: the buffers, uint8 [nbytes].
    """

    def __init__(self, nbytes: int):
        self.source = np.ones(nbytes, np.uint8)
        self.target = np.ones(nbytes, np.uint8)
        ways: dict[str, Callable[[], object]] = {
            "numpy.copyto": self._copyto,
            "memmove": self._memmove,
            "numpy.copyto in steps of 512 KiB": self._steps,
        }
        best = {way: min(_seconds(way) for _ in range(_TRIALS)) for way in ways.values()}
        self._way = min(best, key=lambda way: best[way])
        self.name = next(name for name, way in ways.items() if way == self._way)

    def seconds(self) -> float:
        """Copy once."""
        return _seconds(self.copy)

    def copy(self) -> None:
        self._way()

    def _copyto(self) -> None:
        np.copyto(self.target, self.source)

    def _memmove(self) -> None:
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, self.source.nbytes)

    def _steps(self) -> None:
        for start in range(0, len(self.source), _STEP):
            np.copyto(self.target[start : start + _STEP], self.source[start : start + _STEP])


def _seconds(way: Callable[[], object]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
