"""Ownership of memory: `Mapping` (mapped pages), `Region` (a span of them), `Lease` (its owner).

Nothing is unmapped explicitly: every region, view and tensor holds a reference to its mapping,
which is unmapped when the last of them is freed. A view never points at unmapped memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omni_kvlink.errors import CapacityError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = mmap.PAGESIZE
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since Linux 5.14
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h; Python has them only if libc does
SEALS = 0x1 | 0x2 | 0x4 | 0x10  # SEAL | SHRINK | GROW | FUTURE_WRITE


class Region:
    """A span of memory: `nbytes` from `address` on; `device` is "cpu" or a torch device's name.

    Attributes:
        owner: the object that every view of the region keeps alive.
        readonly: whether views are readonly.
        span: a ctypes array that all views of this region share. A finalizer on it runs when the
            last view is freed.
    """

    __slots__ = ("address", "device", "nbytes", "owner", "readonly", "span")

    def __init__(
        self,
        address: int,
        nbytes: int,
        owner: object,
        *,
        device: str = "cpu",
        readonly: bool = False,
    ):
        self.address, self.nbytes, self.owner = address, nbytes, owner
        self.device, self.readonly = device, readonly
        self.span = (ctypes.c_char * nbytes).from_address(address)
        self.span.owner = owner  # type: ignore[attr-defined]

    def slice(self, start: int, nbytes: int) -> Region:
        """Return a part of the region, as a region with its own span."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start}…{start + nbytes} of a region of {self.nbytes}")
        return Region(
            self.address + start, nbytes, self.owner, device=self.device, readonly=self.readonly
        )

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes `start` to `stop` as a view that keeps the memory mapped."""
        whole = memoryview(self.span).cast("B")
        return (whole.toreadonly() if self.readonly else whole)[start:stop]


class Lease:
    """The only owner of a region until it is released or moved; a context manager that releases.

    `release` is called once. `tag` is a value of the code that made the lease.
    """

    def __init__(self, region: Region, release: Callable[[], None], tag: object = None):
        self._region: Region | None = region
        self.capacity = region.nbytes  # before `shrink`
        self._release, self.tag = release, tag

    @property
    def region(self) -> Region:
        """The leased memory; raises ClosedError if it was released or moved."""
        if self._region is None:
            raise ClosedError("this lease was released or published; reserve a new one")
        return self._region

    def shrink(self, nbytes: int) -> None:
        """Reduce the region to its first `nbytes`."""
        self._region = self.region.slice(0, nbytes)

    def move(self) -> Region:
        """Transfer the region to a new owner and return it; `release` does nothing afterwards."""
        region = self.region
        self._region = None
        return region

    def release(self) -> None:
        """Release the memory; a second call does nothing."""
        if self._region is not None:
            self._region = None
            self._release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class MappedPages:
    """Owner of the regions of a mapping; holds the only reference to its mmap.

    A finalizer of this object runs before the memory is unmapped (an object's weak references are
    cleared before its attributes); one of the mmap itself would run after.
    """

    def __init__(self, pages: mmap.mmap, nbytes: int, *, readonly: bool):
        self.address: int = np.frombuffer(memoryview(pages), np.uint8).ctypes.data
        self.nbytes, self.readonly = nbytes, readonly
        self._pages = pages


class Mapping:
    """A mapping of `nbytes` of memory, all of which is its `region`.

    It closes `fd`, the file behind it (-1: none), when it is freed.
    """

    def __init__(self, pages: mmap.mmap, nbytes: int, *, fd: int = -1, readonly: bool = False):
        self.fd, self.nbytes = fd, nbytes
        owner = MappedPages(pages, nbytes, readonly=readonly)
        self.region = Region(owner.address, nbytes, owner, readonly=readonly)

    @classmethod
    def anonymous(cls, nbytes: int) -> Mapping:
        """Map private memory, with its pages allocated, so that a copy into it has no page faults.

        Raises CapacityError if the machine has not enough memory.
        """
        check_available(nbytes)
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _full(nbytes, error) from None
        _advise(pages, mmap.MADV_HUGEPAGE)
        _advise(pages, _MADV_POPULATE_WRITE)
        return cls(pages, nbytes)

    @classmethod
    def shared(cls, name: str, nbytes: int) -> Mapping:
        """Map a new memfd that is writable through this mapping only.

        Its pages are allocated, so that no access raises SIGBUS. Its seals forbid every process to
        resize it or to write to it in another way: a receiver of the descriptor can only read.
        Raises CapacityError if the machine has not enough memory.
        """
        check_available(nbytes)
        fd = -1
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, nbytes)
            pages = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            seal(fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise _full(nbytes, error) from None
        _advise(pages, _MADV_POPULATE_WRITE)
        return cls(pages, nbytes, fd=fd)

    @classmethod
    def readonly(cls, fd: int, nbytes: int) -> Mapping:
        """Map a peer's memfd for reading, and close `fd`; the caller has checked `is_sealed`."""
        try:
            pages = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise _full(nbytes, error) from None
        finally:
            os.close(fd)
        _advise(pages, _MADV_POPULATE_READ)
        return cls(pages, nbytes, readonly=True)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
            self.fd = -1


def available_bytes() -> int:
    """Return the bytes that the machine has available and the process's cgroup allows."""
    available = [1 << 62]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:  # else not Linux: unknown
        found = (line for line in lines if line.startswith("MemAvailable:"))
        available += [int(line.split()[1]) * 1024 for line in found]
    # Without cgroup v2 only the machine's figure counts.
    with contextlib.suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            available.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, min(available))


def check_available(nbytes: int) -> None:
    """Raise CapacityError if `nbytes` are not available: else the kernel would kill a process."""
    free = available_bytes()
    if nbytes > free:
        raise CapacityError(
            f"{nbytes} bytes of memory requested, {free} are available on this machine",
            requested=nbytes,
            free=free,
        )


def _advise(pages: mmap.mmap, advice: int) -> None:
    # Optional: without it the first copy has page faults, or all copies use small pages.
    with contextlib.suppress(OSError, ValueError):
        pages.madvise(advice)


def _full(nbytes: int, error: OSError) -> CapacityError:
    return CapacityError(
        f"the system refused {nbytes} bytes of memory: {error.strerror}",
        requested=nbytes,
        free=available_bytes(),
    )


def seal(fd: int) -> None:
    """Forbid resizing, new writable mappings and write(2) on a memfd, for good."""
    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is a memfd with every seal that `seal` sets, and all memory allocated.

    Reading it then raises no SIGBUS, and takes no memory but its owner's.
    """
    try:
        is_final = fcntl.fcntl(fd, F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False  # not a memfd
    found = os.fstat(fd)
    return is_final and found.st_blocks * 512 >= found.st_size
