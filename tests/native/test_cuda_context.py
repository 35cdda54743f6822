"""A thread's CUDA context, with a library that stands in for NVIDIA's driver."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from omni_kvlink._native import cuda_context
from omni_kvlink.errors import NativeError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DRIVER = """
#include <cstdint>
static bool initialized = false;
static thread_local void *current = nullptr;
extern "C" {
int retained = 0;
int cuInit(unsigned) { initialized = true; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    retained++;
    *context = reinterpret_cast<void *>(uintptr_t(4096 + device));
    return 0;
}
int cuCtxGetCurrent(void **context) { *context = current; return initialized ? 0 : 3; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    names = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
    compiler = next((name for name in names if name and shutil.which(name[0])), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    library = str(tmp_path / "libcuda.so")
    flags = ["-std=c++17", "-fPIC", "-shared", str(tmp_path / "driver.cpp")]
    subprocess.run([*compiler, *flags, "-o", library], check=True)
    monkeypatch.setattr(cuda_context, "LIBRARY", library)
    cuda_context.driver.cache_clear()
    # What the real driver, or its absence, has left; and below what this one leaves.
    cuda_context._primary_context.cache_clear()
    yield ctypes.CDLL(library)
    cuda_context.driver.cache_clear()
    cuda_context._primary_context.cache_clear()  # as above


def test_a_thread_takes_a_context(driver: ctypes.CDLL) -> None:
    assert cuda_context.current() == 0  # CUDA was not used yet

    def work() -> int:
        cuda_context.use_device(1)
        return cuda_context.current()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == 4097
        assert cuda_context.current() == 0  # each thread has its own
        assert pool.submit(work).result() == 4097
    assert ctypes.c_int.in_dll(driver, "retained").value == 1
    cuda_context.use(4096)
    assert cuda_context.current() == 4096
    cuda_context.use(0)
    assert cuda_context.current() == 4096
    with pytest.raises(NativeError, match="cuDeviceGet failed with status 101"):
        cuda_context.use_device(2)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_context, "driver", lambda: None)
    assert cuda_context.current() == 0
    cuda_context.use(4096)
    with pytest.raises(NativeError, match=r"there is no libcuda\.so\.1; install NVIDIA's driver"):
        cuda_context.use_device(7)
