"""Who owns which bytes: `Mapping` (the memory), `Region` (a span of it), `Lease` (its one owner).

Nothing here ever unmaps by hand. A mapping lives as long as any region, span or tensor on it,
because each of them holds a reference; a view can therefore never point at unmapped memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np

from omni_kvlink.errors import CapacityError, ClosedError

PAGE = mmap.PAGESIZE
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since Linux 5.14


class Region:
    """A span of memory that somebody else owns: address, length in bytes, device, readonly.

    `span` is the one object that every view of this region shares: a finalizer on it runs when
    the last view is gone.
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
        """A smaller region, with a span of its own."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start}…{start + nbytes} of a region of {self.nbytes}")
        return Region(
            self.address + start, nbytes, self.owner, device=self.device, readonly=self.readonly
        )

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes, as a view that keeps the region alive; readonly if the region is."""
        whole = memoryview(self.span).cast("B")
        return (whole.toreadonly() if self.readonly else whole)[start:stop]


class Lease:
    """The sole owner of one region until it is released or moved away; a context manager.

    Attributes:
        room: bytes that the region had before `shrink`.
    """

    def __init__(self, region: Region, release: Callable[[], None], tag: object = None):
        self._region: Region | None = region
        self.capacity = region.nbytes
        self._release = release
        self.tag = tag

    @property
    def region(self) -> Region:
        if self._region is None:
            raise ClosedError("this lease was released or published; reserve a new one")
        return self._region

    def shrink(self, nbytes: int) -> None:
        """Keep the first `nbytes` only."""
        self._region = self.region.slice(0, nbytes)

    def move(self) -> Region:
        """Hand the region to a new owner: this lease is spent, `release` does nothing more."""
        region = self.region
        self._region = None
        return region

    def release(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self._region is not None:
            self._region = None
            self._release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class MappedPages:
    """What every region of a mapping holds: the only reference to its mmap.

    A weak reference to an mmap itself is told after it was unmapped; one to this, before: an
    object's weak references are cleared ahead of its attributes.
    """

    def __init__(self, pages: mmap.mmap, nbytes: int, *, readonly: bool):
        self.address: int = np.frombuffer(memoryview(pages), np.uint8).ctypes.data
        self.nbytes, self.readonly = nbytes, readonly
        self._pages = pages


class Mapping:
    """One mapping of memory; `fd` is the file behind it, or -1.

    The descriptor is closed with the mapping, so that a dropped arena leaves nothing open.
    """

    def __init__(self, pages: mmap.mmap, nbytes: int, *, fd: int = -1, readonly: bool = False):
        self.fd, self.nbytes = fd, nbytes
        owner = MappedPages(pages, nbytes, readonly=readonly)
        self.region = Region(owner.address, nbytes, owner, readonly=readonly)

    @classmethod
    def anonymous(cls, nbytes: int) -> Mapping:
        """Memory of this process alone, touched so that a copy into it meets no page fault."""
        ensure_room(nbytes)
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _full(nbytes, error) from None
        _advise(pages, mmap.MADV_HUGEPAGE)
        _advise(pages, _MADV_POPULATE_WRITE)
        return cls(pages, nbytes)

    @classmethod
    def shared(cls, name: str, nbytes: int) -> Mapping:
        """A memfd: allocated (never a SIGBUS later), touched, writable through this mapping only.

        The seals forbid anyone, this process included, to resize it or to write to it in any
        other way, so whoever gets the descriptor can read and nothing else.
        """
        ensure_room(nbytes)
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
        """Map a peer's memfd for reading; takes `fd` over. The seals must have been checked."""
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
    """Memory this process may still take: what the machine has, and what its cgroup allows."""
    limits = [_meminfo_available()]
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as now,
        ):
            text = limit.read().strip()
            if text != "max":
                limits.append(int(text) - int(now.read()))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the machine's own figure stands alone
    return max(0, min(limits))


def ensure_room(nbytes: int) -> None:
    """Refuse before the kernel would: shared memory over the limit ends in the OOM killer."""
    free = available_bytes()
    if nbytes > free:
        raise CapacityError(
            f"{nbytes} bytes of memory wanted, {free} are available on this machine",
            asked=nbytes,
            free=free,
        )


def _meminfo_available() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: no figure to refuse on
    return 1 << 62


def _advise(pages: mmap.mmap, advice: int) -> None:
    # A kernel that refuses makes copies slower: the first pays the page faults, or all small pages.
    with contextlib.suppress(OSError, ValueError):
        pages.madvise(advice)


def _full(nbytes: int, error: OSError) -> CapacityError:
    return CapacityError(
        f"the system refused {nbytes} bytes of memory: {error.strerror}",
        asked=nbytes,
        free=available_bytes(),
    )


F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h; Python names them only where libc does
SEALS = 0x1 | 0x2 | 0x4 | 0x10  # SEAL | SHRINK | GROW | FUTURE_WRITE


def seal(fd: int) -> None:
    """No resizing, no new writable mapping, no write(2), and no way to lift this."""
    import fcntl

    fcntl.fcntl(fd, F_ADD_SEALS, SEALS)


def is_sealed(fd: int) -> bool:
    """Whether every seal that `seal` sets is on the descriptor a peer passed."""
    import fcntl

    try:
        return fcntl.fcntl(fd, F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False  # not a memfd at all
