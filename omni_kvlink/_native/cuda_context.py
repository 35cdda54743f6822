"""A thread's CUDA context, by the driver's own functions; without a driver there is none."""

from __future__ import annotations

import ctypes
import functools

from omni_kvlink.errors import NativeError

LIBRARY = "libcuda.so.1"


@functools.lru_cache
def driver() -> ctypes.CDLL | None:
    """The driver's library; None on a machine without one."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def current() -> int:
    """Return the calling thread's context; 0 if it has none, or CUDA was not used yet."""
    library, context = driver(), ctypes.c_void_p()
    if library is None or library.cuCtxGetCurrent(ctypes.byref(context)):
        return 0
    return context.value or 0


def use(context: int) -> None:
    """Make a context the calling thread's; 0 changes nothing."""
    library = driver()
    if context and library is not None:
        _check("cuCtxSetCurrent", library.cuCtxSetCurrent(ctypes.c_void_p(context)))


def use_device(number: int) -> None:
    """Make a device's primary context, which torch uses, the calling thread's."""
    use(_primary_context(number))


@functools.lru_cache
def _primary_context(number: int) -> int:
    """Retain a device's primary context, until the end of the process."""
    library = driver()
    if library is None:
        raise NativeError(f"there is no {LIBRARY}; install NVIDIA's driver")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuInit", library.cuInit(0))
    _check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), number))
    retained = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check("cuDevicePrimaryCtxRetain", retained)
    return context.value or 0


def _check(name: str, status: int) -> None:
    if status:
        raise NativeError(f"{name} failed with status {status}; see the driver's cuda.h")
