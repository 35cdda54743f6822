"""Binding of the CUDA library, whose C interface is described in `csrc/cuda/kvlink_cuda.h`.

The library is loaded at first use; if there is none, or no device, `missing()` and `no_device()`
say why and what helps.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from array import array
from typing import TYPE_CHECKING

from omni_kvlink._native import host
from omni_kvlink._native.loader import CompiledPart
from omni_kvlink.errors import NativeError
from omni_kvlink.memory.mapping import MappedPages
from omni_kvlink.settings import Size, from_environment

if TYPE_CHECKING:
    from omni_kvlink.memory.region import Region

ABI = 4
LIBRARY = "_kvlink_cuda.so"
ENVIRONMENT = "OMNI_KVLINK_CUDA_CROSSOVER"
"""Environment variable, in bytes: views whose contiguous runs are shorter on average are copied by
a kernel, others by copy engines. Measured if it is not set."""
CURE = "install the CUDA toolkit (CUDACXX names nvcc) and reinstall omni-kvlink"
DEVICE_CURE = (
    "install NVIDIA's driver, as new as the CUDA toolkit at installation, "
    "and let this process see a device (CUDA_VISIBLE_DEVICES)"
)

_MEASURED = (1 << 64) - 1


class _DeviceOptions(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("device", "stream", "after", "crossover"))


class Ticket:
    """Owns the copies that were started with it, and keeps the memory they use until they end.

    It is created before the copies are started, so that an interrupt cannot leave copies without
    an owner. A copy cannot be cancelled: a ticket that is dropped blocks until its copies are
    complete. `keep` owns the memory that the copies read and write.
    """

    def __init__(self, keep: object):
        self._number = ctypes.c_uint64()  # the library's; 0: nothing was started
        self._num_digests = 0
        # `keep` is the finalizer's: in a cycle that is collected, memory that only the ticket kept
        # would be freed before the ticket's `__del__` runs.
        self._close = weakref.finalize(self, _finish, self._number, os.getpid(), keep)
        self._close.atexit = False  # the end of the process stops the device

    def wait(self) -> None:
        """Block until all copies are complete; any thread, several at once."""
        call("kvlc_wait", self._number)

    def is_complete(self) -> bool:
        """Whether all copies are complete; does not block."""
        flag = ctypes.c_uint64()
        call("kvlc_poll", self._number, ctypes.byref(flag))
        return flag.value > 0

    def digests(self) -> bytes:
        """Block until all copies are complete; return their digests, 4 bytes each."""
        buffer = array("I", bytes(4 * self._num_digests))
        address, count = buffer.buffer_info()
        call("kvlc_digests", self._number, address if count else None, count)
        return host.big_endian(buffer).tobytes()

    def make_stream_wait(self, stream: int) -> None:
        """Make later work on a stream of this device wait for all copies; does not block."""
        call("kvlc_stream_wait", self._number, stream)

    def close(self) -> None:
        """Block until all copies are complete; a second call does nothing."""
        _check(self._close() or 0)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class DeviceBatch(host.CopyBatch):
    """The copies of one call between one payload and views whose bases are device addresses.

    The device computes the digests of the bytes as they are in its memory. `crossover` is as the
    function of this name returns it.
    """

    def __init__(self, address: int, nbytes: int, crossover: int):
        super().__init__(address, nbytes)
        self._crossover = crossover

    def begin(
        self, verb: str, ticket: Ticket, device: int, stream: int, after: Ticket | None = None
    ) -> None:
        """Enqueue copies after the work that `stream` holds now, or after a ticket of `record`.

        To "gather" copies the views into the payload; to "scatter" copies it into the views, and
        later work on `stream` waits for that, unless `after` is given.
        """
        number = 0 if after is None else after._number.value
        packed = array("q", self._copies())
        ticket._num_digests = self._num_digests
        options = _DeviceOptions(device, stream, number, self._crossover)
        status = getattr(_load(), f"kvlc_{verb}")(
            *self._payload,
            packed.buffer_info()[0] if packed else None,
            self._count,
            options,
            self.report,
            ticket._number,
        )
        if status:
            raise host.CopyFailed(_last_error(), status, self.report)


def record(device: int, stream: int) -> Ticket:
    """Record what a stream holds now, as a ticket; neither it nor its end blocks."""
    ticket = Ticket(None)
    call("kvlc_record", device, stream, ctypes.byref(ticket._number))
    return ticket


def no_device() -> str | None:
    """Return why there is no device to copy from or to, and what helps; None if there is one."""
    try:
        call("kvlc_devices", ctypes.byref(ctypes.c_uint64()))
    except NativeError as error:
        return f"{error}; {DEVICE_CURE}"
    return None


@functools.lru_cache
def describe(device: int) -> str:
    """Return CUDA's version and the device's name, such as "cuda 13.0, NVIDIA H200"."""
    text = ctypes.create_string_buffer(256)
    call("kvlc_describe", device, text, len(text))
    return text.value.decode(errors="replace")


def crossover() -> int:
    """Return the crossover set by the environment, in bytes; 2**64 - 1 to have it measured."""
    nbytes: int = from_environment(ENVIRONMENT, Size(), _MEASURED)
    return nbytes


def measured_crossovers(device: int) -> tuple[int, int]:
    """Return the bytes from which copy engines are faster than a kernel: (gather, scatter)."""
    sizes = (ctypes.c_uint64 * 2)()
    call("kvlc_crossover", device, sizes)
    return sizes[0], sizes[1]


def register(region: Region, device: int) -> str | None:
    """Page-lock the whole mapping of a region, once, for all devices; return why not, or None.

    The mapping is unregistered when its last view is freed, just before it is unmapped.
    """
    pages = region.owner
    if not isinstance(pages, MappedPages):
        return "its memory is no mapping of this library's; reserve it from a link"
    with _register_lock:
        try:
            return _registered[pages]
        except KeyError:
            reason = _registered[pages] = _register(pages, device)
            return reason


_register_lock = threading.Lock()
_registered: weakref.WeakKeyDictionary[MappedPages, str | None] = weakref.WeakKeyDictionary()


def _register(pages: MappedPages, device: int) -> str | None:
    try:
        call("kvlc_register", device, pages.address, pages.nbytes, pages.readonly)
    except NativeError as error:
        return str(error)
    finalizer = weakref.finalize(pages, _unregister, pages.address, os.getpid())
    finalizer.atexit = False  # the end of the process unmaps everything
    return None


# These two are finalizers and run in any thread at any line: they take none of this file's locks.


def _unregister(address: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child has the mapping, but no CUDA
        _load().kvlc_unregister(ctypes.c_void_p(address))


def _finish(number: ctypes.c_uint64, pid: int, keep: object) -> int:
    """Block until the ticket's copies are complete; return the library's status."""
    if not number.value or pid != os.getpid():
        return 0
    return int(_load().kvlc_finish(number))


def _declare(library: ctypes.CDLL) -> int:
    library.kvlc_last_error.restype = ctypes.c_char_p
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    structs = tuple(ctypes.POINTER(kind) for kind in (_DeviceOptions, host.Report, number))
    for begin in (library.kvlc_gather, library.kvlc_scatter):
        begin.argtypes = (pointer, number, pointer, number, *structs)
    return int(library.kvlc_version())


_part = CompiledPart("CUDA part", LIBRARY, ABI, CURE, _declare)
_load, missing = _part.load, _part.missing


def call(name: str, *arguments: object) -> None:
    """Call a function of the library, ints and addresses as 64 bits; NativeError if it fails."""
    wide = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
    _check(getattr(_load(), name)(*wide))


def _check(status: int) -> None:
    if status:
        raise NativeError(_last_error())


def _last_error() -> str:
    return str(_load().kvlc_last_error(), errors="replace")
