"""The CUDA library on a fake device: tensors in host memory stand in for those of a GPU."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_kvlink._native import cuda
from omni_kvlink.copier import pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.payload.views import TensorView

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FIELDS = (
    "devices",
    "refuses_registration",
    "fails_after",
    "unregistered",
    "unregistered_late",
    "readonly",
)


def build(directory: Path) -> None:
    """The library's own sources, with `csrc/tests/fake_cuda.cpp` instead of CUDA."""
    names = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    compiler = next((name for name in names if name and shutil.which(name[0])), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [*(CSRC / "cuda").glob("*.cpp"), CSRC / "view.cpp", CSRC / "failure.cpp"]
    fake = CSRC / "tests" / "fake_cuda.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", f"-I{CSRC}/tests/fake_cuda"]
    command = [*compiler, *flags, *map(str, sources), str(fake), "-o"]
    subprocess.run([*command, str(directory / cuda.LIBRARY)], check=True)


class FakeDevice:
    """The fake device's state, and which tensors count as its own."""

    def __init__(self, library: ctypes.CDLL):
        self.holds: Callable[[TensorView], bool] = lambda view: True
        self._field = library.fake_cuda_field
        self._field.restype = ctypes.POINTER(ctypes.c_int)

    def get(self, name: str) -> int:
        value: int = self._field(FIELDS.index(name))[0]
        return value

    @contextmanager
    def set(self, name: str, value: int) -> Iterator[None]:
        field = self._field(FIELDS.index(name))
        before, field[0] = field[0], value
        try:
            yield
        finally:
            field[0] = before


def install(directory: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Use the library in `directory` as the CUDA library until the end of the test."""
    library = cuda._part.open(directory)
    device = FakeDevice(library)
    monkeypatch.setattr(cuda._part, "loaded", library)
    monkeypatch.setattr(cuda, "_registered", weakref.WeakKeyDictionary())
    monkeypatch.setattr(cuda, "describe", lambda device: "cuda 13.0, Fake")
    monkeypatch.setattr(pinned, "_device_of", lambda view: 0 if device.holds(view) else None)
    monkeypatch.setattr(pinned, "_current_stream", lambda device: 0)
    return device
