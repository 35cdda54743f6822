"""The CUDA library on a fake device: tensors in host memory stand in for those of a GPU."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import hashlib
import os
import shlex
import shutil
import subprocess
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink._native import cuda, cuda_context
from omni_kvlink.copier import base, device_payload, native, pinned, streams
from omni_kvlink.link import put_operation
from omni_kvlink.payload import tensor_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import TensorSpec
    from omni_kvlink.payload.views import TensorView

# Reaches into _PLAIN, _part, _registered: the process has loaded one CUDA library; a test puts
# another in its place.

ENGINES, MIXED, KERNEL = "0", "300", str(1 << 62)
"""Values of OMNI_KVLINK_CUDA_CROSSOVER."""
CSRC = Path(__file__).resolve().parents[3] / "csrc"
FIELDS = (
    "devices",
    "refuses_registration",
    "fails_after",
    "unregistered",
    "unregistered_late",
    "readonly",
    "blocking",
    "capturing_elsewhere",
    "held",
    "refuses_memory",
)

_calls: list[object] = []  # ctypes functions; the library keeps none, and may call them late


def build(directory: Path) -> None:
    """The library's own sources, with `csrc/tests/fake_cuda.cpp` instead of CUDA.

    Compiled once for all processes and runs, until a source or a flag changes.
    """
    names = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    compiler = next((name for name in names if name and shutil.which(name[0])), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [*(CSRC / "cuda").glob("*.cpp"), CSRC / "view.cpp", CSRC / "failure.cpp"]
    fake = CSRC / "tests" / "fake_cuda.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", f"-I{CSRC}/tests/fake_cuda"]
    flags += shlex.split(os.environ.get("FAKE_CUDA_FLAGS", ""))
    command = [*compiler, *flags, *map(str, sorted(sources)), str(fake), "-o"]
    state = hashlib.sha256(repr(command).encode())
    for path in sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp")):
        state.update(path.read_bytes())
    cache = CSRC.parent / "build" / "fake_cuda"
    cache.mkdir(parents=True, exist_ok=True)
    built = cache / f"{state.hexdigest()[:16]}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            subprocess.run([*command, str(cache / "new.so")], check=True)
            (cache / "new.so").rename(built)
    shutil.copy(built, directory / cuda.LIBRARY)


def address(view: TensorView) -> int:
    """Where a tensor's memory begins: copiers see other objects on the same memory."""
    return view.data_ptr() if isinstance(view, torch.Tensor) else 0


class FakeDevice:
    """The fake device's state, and which tensors count as its own."""

    def __init__(self, library: ctypes.CDLL):
        self.holds: Callable[[TensorView], bool] = lambda view: True
        self._library, self._current = library, threading.local()
        self._field = library.fake_cuda_field
        self._field.restype = ctypes.POINTER(ctypes.c_int)
        library.fake_cuda_nbytes.restype = ctypes.c_uint64

    def get(self, name: str) -> int:
        value: int = self._field(FIELDS.index(name))[0]
        return value

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the device's memory that are allocated."""
        return int(self._library.fake_cuda_nbytes(0))

    @property
    def crossed_nbytes(self) -> int:
        """Bytes that were copied between the host and the device, either way."""
        return int(self._library.fake_cuda_nbytes(1))

    @property
    def stream(self) -> int:
        """The calling thread's current stream; 0 in a thread that has chosen none."""
        stream: int = getattr(self._current, "stream", 0)
        return stream

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Make a stream the calling thread's current one, as `torch.cuda.stream` does."""
        before, self._current.stream = self.stream, stream
        try:
            yield
        finally:
            self._current.stream = before

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        """Enqueue work on a stream; it runs once somebody waits for what is behind it."""
        call = ctypes.CFUNCTYPE(None)(work)
        _calls.append(call)
        self._library.fake_cuda_call(ctypes.c_uint64(stream), call)

    def hold(self, held: bool) -> None:
        """Let nothing that is enqueued run from now on, or again."""
        self._field(FIELDS.index("held"))[0] = int(held)

    def run(self, stream: int) -> None:
        """Run all work of a stream, and what it waits for."""
        self._library.fake_cuda_run(ctypes.c_uint64(stream))

    @contextmanager
    def without_blocking(self) -> Iterator[None]:
        """Count the calling thread's calls that may block, in `get("blocking")`."""
        self._library.fake_cuda_forbid_blocking(1)
        try:
            yield
        finally:
            self._library.fake_cuda_forbid_blocking(0)

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
    for module in (base, pinned, streams):
        monkeypatch.setattr(module, "device_of", lambda view: 0 if device.holds(view) else None)
    monkeypatch.setattr(put_operation, "is_on_device", lambda view: device.holds(view))

    def host_addresses(sources: Sequence[TensorView], specs: Sequence[TensorSpec]) -> Any:
        on_device = any(map(device.holds, sources))
        return None if on_device else tensor_memory.dense_addresses(sources, specs)

    monkeypatch.setattr(native, "dense_addresses", host_addresses)
    monkeypatch.setattr(native, "_PLAIN", set())  # torch itself says that all lie on the host
    monkeypatch.setattr(pinned, "current_stream", lambda number: device.stream)
    monkeypatch.setattr(device_payload, "synchronize", device.run)
    monkeypatch.setattr(cuda_context, "use_device", lambda number: None)
    monkeypatch.setattr(tensor_memory, "byte_tensor", byte_tensor)
    return device


def byte_tensor(region: Region) -> torch.Tensor:
    """`tensor_memory.byte_tensor`, with tensors of the host for those of the device."""
    return torch.frombuffer(region.span, dtype=torch.uint8)  # type: ignore[call-overload, unused-ignore,no-any-return]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library on the fake device was built."""
    made = tmp_path_factory.mktemp("fake")
    build(made)
    return made


@pytest.fixture
def device(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The fake device, in place of all others, for one test."""
    monkeypatch.setenv(cuda.ENVIRONMENT, MIXED)
    yield install(directory, monkeypatch)
    gc.collect()  # unregister with this library, not with the next one
