"""The plain copy, with which all is compared: one thread, two warm buffers, as many bytes."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP = 512 << 10
_TRIALS = 3


class PlainCopy:
    """The fastest of three methods to copy `nbytes` bytes, chosen once on this machine.

    It is named `name`, and copies `source` to `target`, both uint8 [nbytes].
    """

    def __init__(self, nbytes: int):
        self.source = np.ones(nbytes, np.uint8)
        self.target = np.ones(nbytes, np.uint8)
        methods: dict[str, Callable[[], object]] = {
            "numpy.copyto": self._copyto,
            "memmove": self._memmove,
            "numpy.copyto in steps of 512 KiB": self._steps,
        }
        best = {name: min(_seconds(m) for _ in range(_TRIALS)) for name, m in methods.items()}
        self.name = min(best, key=lambda name: best[name])
        self.copy = methods[self.name]

    def seconds(self) -> float:
        """Copy once; the seconds that it took."""
        return _seconds(self.copy)

    def _copyto(self) -> None:
        np.copyto(self.target, self.source)

    def _memmove(self) -> None:
        ctypes.memmove(self.target.ctypes.data, self.source.ctypes.data, self.source.nbytes)

    def _steps(self) -> None:
        for start in range(0, len(self.source), _STEP):
            np.copyto(self.target[start : start + _STEP], self.source[start : start + _STEP])


def _seconds(copy: Callable[[], object]) -> float:
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start
