"""The only file that knows the CUDA library: its place, its C interface, its errors.

`csrc/cuda/kvlink_cuda.h` describes the interface. The library is loaded at first use; where there
is none, or no device, `missing()` and `no_device()` say why and what helps.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from array import array

from omni_kvlink._native import host
from omni_kvlink._native.loader import CompiledPart
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.region import MappedPages, Region

ABI = 1
LIBRARY = "_kvlink_cuda.so"
EXCUSE = "_kvlink_cuda.missing"
"""Written by the build in the library's stead: why there is none."""
ENVIRONMENT = "OMNI_KVLINK_CUDA_CROSSOVER"
"""Bytes: views whose contiguous runs are shorter are copied by a kernel, others by copy engines."""
CURE = "install the CUDA toolkit (CUDACXX names nvcc) and reinstall omni-kvlink"
DEVICE_CURE = (
    "install NVIDIA's driver, as new as the CUDA toolkit at installation, "
    "and let this process see a device (CUDA_VISIBLE_DEVICES)"
)

_MEASURED = (1 << 64) - 1


class _Options(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("crossover", ctypes.c_uint64),
    )


class Ticket:
    """Copies that are begun with it. What they read and write lives at least until they are done.

    It is there before they are, so that an interrupt cannot leave copies that nobody waits for.
    Dropped unfinished, it sleeps until they are done: a copy cannot be called back.

    Args:
        keep: what the copies read and write.
    """

    def __init__(self, keep: object):
        self._number = ctypes.c_uint64()  # the library's; 0: nothing was begun
        self._finish = weakref.finalize(self, _finish, self._number, os.getpid(), keep)
        self._finish.atexit = False  # the process's end stops the device

    def wait(self, copy: int) -> None:
        """Sleep until copies 0 to `copy` are complete; any thread, several at once."""
        _check(_load().kvlc_wait(self._number, ctypes.c_uint64(copy)))

    def complete(self) -> int:
        """How many of the first copies are."""
        found = ctypes.c_uint64()
        _check(_load().kvlc_poll(self._number, ctypes.byref(found)))
        return found.value

    def finish(self) -> None:
        """Sleep until all are complete; a second call does nothing.

        Raises:
            NativeError: CUDA failed.
        """
        _check(self._finish() or 0)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()


class DeviceBatch(host.CopyBatch):
    """The copies of one call between one device's memory and one payload.

    Views are a `host.PackedView` each, with the device's address in the place of the base.
    """

    def begin_gather(self, ticket: Ticket, device: int, stream: int) -> None:
        """Enqueue copying the views into the payload, behind what `stream` holds now."""
        self._begin("kvlc_gather", ticket, device, stream)

    def begin_scatter(self, ticket: Ticket, device: int, stream: int) -> None:
        """Enqueue copying the payload into the views; `stream` goes on when it is done."""
        self._begin("kvlc_scatter", ticket, device, stream)

    def _begin(self, name: str, ticket: Ticket, device: int, stream: int) -> None:
        packed, options = array("q", self._copies()), _Options(device, stream, crossover())
        status = getattr(_load(), name)(
            *self._payload,
            ctypes.c_void_p(packed.buffer_info()[0] if packed else None),
            ctypes.c_uint64(len(self)),
            ctypes.byref(options),
            ctypes.byref(self.report),
            ctypes.byref(ticket._number),
        )
        if status:
            copy, chunk = self.report.copy, self.report.chunk
            raise host.CopyFailed(_last_error(), status=status, copy=copy, chunk=chunk)


def missing() -> str | None:
    """Why the library cannot be used, and what helps; None when it can."""
    try:
        _load()
    except NativeError as error:
        return str(error)
    return None


def no_device() -> str | None:
    """Why there is no device to copy from or to; None when there is one."""
    try:
        device_count()
    except NativeError as error:
        return f"{error}; {DEVICE_CURE}"
    return None


def device_count() -> int:
    """How many devices there are.

    Raises:
        NativeError: no library, no driver, or no device.
    """
    found = ctypes.c_uint64()
    _check(_load().kvlc_devices(ctypes.byref(found)))
    return found.value


@functools.lru_cache
def describe(device: int) -> str:
    """CUDA's version and the device's name, such as "cuda 13.0, NVIDIA H200"."""
    text = ctypes.create_string_buffer(256)
    _check(_load().kvlc_describe(ctypes.c_uint64(device), text, ctypes.c_uint64(256)))
    return text.value.decode(errors="replace")


def crossover() -> int:
    """What the environment says, in bytes; the largest 64-bit number has it measured."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return _MEASURED
    if not text.isascii() or not text.isdigit() or int(text) >= _MEASURED:
        raise NativeError(f"{ENVIRONMENT}={text!r}; wanted a number of bytes")
    return int(text)


def measured_crossovers(device: int) -> tuple[int, int]:
    """Bytes from which copy engines are faster than a kernel: out of the device, and into it."""
    found = (ctypes.c_uint64 * 2)()
    _check(_load().kvlc_crossover(ctypes.c_uint64(device), found))
    return found[0], found[1]


def register(region: Region, device: int) -> str | None:
    """Page-lock the whole mapping that a region lies in, once, for all devices.

    It is unregistered before it is unmapped: that is when the mapping's last view, and so the
    object that its weak reference watches, is gone.

    Returns:
        None, or why it cannot be page-locked, and what helps.
    """
    pages = region.owner
    if not isinstance(pages, MappedPages):
        return "its memory is no mapping of this library's; reserve it from a link"
    with _registering:
        if pages not in _registered:
            _registered[pages] = _register(pages, device)
        return _registered[pages]


_registering = threading.Lock()
_registered: weakref.WeakKeyDictionary[MappedPages, str | None] = weakref.WeakKeyDictionary()


def _register(pages: MappedPages, device: int) -> str | None:
    status = _load().kvlc_register(
        ctypes.c_uint64(device),
        ctypes.c_void_p(pages.address),
        ctypes.c_uint64(pages.nbytes),
        ctypes.c_uint64(pages.readonly),
    )
    if status:
        return _last_error()
    end = weakref.finalize(pages, _unregister, pages.address, os.getpid())
    end.atexit = False  # the process's end unmaps all at once
    return None


# These two run wherever garbage is collected: they take none of this file's locks.


def _unregister(address: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child has the mapping, and no CUDA
        _load().kvlc_unregister(ctypes.c_void_p(address))


def _finish(number: ctypes.c_uint64, pid: int, keep: object) -> int:
    """Sleep until the ticket's copies are complete; gives the library's status."""
    if not number.value or pid != os.getpid():
        return 0
    status: int = _load().kvlc_finish(number)
    return status


def _load() -> ctypes.CDLL:
    return _part.load()


def _declare(library: ctypes.CDLL) -> int:
    library.kvlc_last_error.restype = ctypes.c_char_p
    version: int = library.kvlc_version()
    return version


_part = CompiledPart(
    "CUDA part", library=LIBRARY, excuse=EXCUSE, abi=ABI, cure=CURE, declare=_declare
)


def _check(status: int) -> None:
    if status:
        raise NativeError(_last_error())


def _last_error() -> str:
    text: bytes = _load().kvlc_last_error()
    return text.decode(errors="replace")
