"""`Mapping`: pages of memory, of a file or of nobody else, which are mapped in this process.

Nothing is unmapped explicitly: every region, view and tensor holds a reference to its mapping,
which is unmapped when the last of them is freed. A view never points at unmapped memory.

A forked child has none of the memory that `Mapping` made: the parent goes on reusing it, so that
inherited views would show other bytes, and it would stay allocated after the parent's end. In the
child the addresses are inaccessible (an access is a SIGSEGV) and `Lease.region` raises ClosedError.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections import deque
from errno import EINVAL
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.errors import CapacityError, ClosedError, KVLinkError, UnavailableError
from omni_kvlink.memory.region import CallAtEnd, Region, address_of_buffer, closer, take
from omni_kvlink.system import process
from omni_kvlink.system.failures import cure_of
from omni_kvlink.system.threads import start_detached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
STEP = 4 << 20
"""Bytes of an arena that a thread allocates at a time; a millisecond."""
MAX_THREADS = 4
"""Threads that touch the pages of a new arena, the caller's among them."""
_UNWANTED = "the memory is not wanted any more"
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since Linux 5.14
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MFD_FLAGS = 0x1 | 0x2  # linux/memfd.h: CLOEXEC | ALLOW_SEALING; Python has them only if libc does
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # linux/mman.h
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h; Python has them only if libc does
SEALS = 0x1 | 0x2 | 0x4 | 0x10  # SEAL | SHRINK | GROW | FUTURE_WRITE

# Its calls release the GIL, which those of the module mmap do not.
_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _FilePages:
    """Pages of a memfd, unmapped when this is freed; an `mmap` would keep a copy of its descriptor.

    Raises OSError if the system refuses them.
    """

    def __init__(self, fd: int, nbytes: int, rights: int):
        mapped: list[int] = []
        CallAtEnd.of(self, partial(_unmap, mapped, nbytes))
        address = take(mapped, _libc.mmap, None, nbytes, rights, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            error = ctypes.get_errno()
            mapped.clear()
            raise OSError(error, os.strerror(error))
        self.address: int = address


def _unmap(mapped: list[int], nbytes: int) -> None:
    for address in mapped.copy():
        del mapped[0]  # first: the addresses are another's once unmapped
        _libc.munmap(address, nbytes)


class MappedPages:
    """Owner of the regions of a mapping; holds the only reference to its pages.

    A finalizer of this object runs before the memory is unmapped (an object's weak references are
    cleared before its attributes); one of the pages themselves would run after.

    Attributes:
        is_lost: whether this is a forked child and the memory only its parent's.
    """

    def __init__(self, pages: mmap.mmap | _FilePages, nbytes: int, *, readonly: bool):
        if isinstance(pages, _FilePages):
            self.address = pages.address
        else:
            self.address = address_of_buffer(memoryview(pages))
        self.nbytes, self.readonly, self.is_lost = nbytes, readonly, False
        self._pages = pages

    def lose(self) -> None:
        """Release the memory in a forked child, keeping the addresses from being used again."""
        self.is_lost = True
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        if _libc.mmap(self.address, self.nbytes, 0, flags, -1, 0) != self.address:
            raise OSError(ctypes.get_errno(), "inherited memory could not be released")


class Mapping:
    """A mapping of `nbytes` of memory, all of which is its `region`.

    It closes `fd`, the file behind it (-1: none), when it is freed. A forked child inherits neither
    the memory nor the file of a mapping that one of the class methods made.

    Attributes:
        readers: the same memory mapped for reading, if readers in this process need it.
    """

    readers: Mapping | None = None

    def __init__(
        self, pages: mmap.mmap | _FilePages, nbytes: int, *, fd: int = -1, readonly: bool = False
    ):
        self.fd, self.nbytes = fd, nbytes
        self._file = None if fd < 0 else CallAtEnd.of(self, closer([fd]))
        self._pages = MappedPages(pages, nbytes, readonly=readonly)
        self.region = Region(self._pages.address, nbytes, self._pages, readonly=readonly)

    def __repr__(self) -> str:
        return f"<Mapping of {self.region!r}>"

    @classmethod
    def anonymous(cls, nbytes: int, is_wanted: Callable[[], bool] = lambda: True) -> Mapping:
        """Map private memory, with its pages allocated, so that a copy into it has no page faults.

        Allocating takes a second a gigabyte, and more; other threads run meanwhile, and up to
        `MAX_THREADS` share it. `is_wanted` is asked every `STEP` bytes, in this thread, and may
        raise an error of its own. Raises CapacityError if the machine has not enough memory, and
        ClosedError if it is not wanted any more.
        """
        check_available(nbytes)
        with _refusals(nbytes):
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping = cls(pages, nbytes)._not_inherited()
        with contextlib.suppress(OSError, ValueError):  # else all copies use small pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        mapping.populate(is_wanted, threads=MAX_THREADS)
        return mapping

    @classmethod
    def shared(
        cls, name: str, nbytes: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Mapping:
        """Map a new memfd that is writable through this mapping only.

        Its pages are allocated, so that no access raises SIGBUS. Its seals forbid every process to
        resize it or to write to it in another way: a receiver of the descriptor can only read.
        Blocks and raises as `anonymous` does.
        """
        check_available(nbytes)
        fd = -1
        try:
            with _refusals(nbytes):
                fd = _memfd(name)
                os.ftruncate(fd, nbytes)
                pages = _FilePages(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        mapping = cls(pages, nbytes, fd=fd)._not_inherited()
        if _has_huge_shared_pages():
            # Before the file has pages. What fails here is allocated, or reported, with the file.
            _libc.madvise(mapping.region.address, nbytes, mmap.MADV_HUGEPAGE)
            mapping.populate(is_wanted, threads=MAX_THREADS)
        with _refusals(nbytes):
            # Faster than page faults; in one thread, since a second one waits for the file's lock.
            for start, length in _steps(nbytes):
                if not is_wanted():
                    raise ClosedError(_UNWANTED)
                os.posix_fallocate(fd, start, length)
            seal(fd)
        mapping.populate(is_wanted, threads=MAX_THREADS)
        return mapping

    @classmethod
    def readonly(cls, fd: int, nbytes: int, *, populate: bool = True) -> Mapping:
        """Map a peer's memfd for reading, and close `fd`; the caller has checked `is_sealed`.

        Without `populate`, the first access to each page is a page fault, until `populate` is done.
        """
        try:
            mapping = cls._readonly(fd, nbytes)
        finally:
            os.close(fd)
        if populate:
            mapping.populate()
        return mapping

    @classmethod
    def _readonly(cls, fd: int, nbytes: int) -> Mapping:
        with _refusals(nbytes):
            pages = _FilePages(fd, nbytes, mmap.PROT_READ)
        return cls(pages, nbytes, readonly=True)._not_inherited()

    @classmethod
    def for_readers(
        cls, name: str, nbytes: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> Mapping:
        """Map as `shared` does, and once more for readers in this process, who cannot write."""
        mapping = cls.shared(name, nbytes, is_wanted)
        mapping.readers = cls._readonly(mapping.fd, nbytes)
        mapping.close_file()
        mapping.readers.populate()
        return mapping

    def _not_inherited(self) -> Mapping:
        process.call_in_children(self, Mapping.close_file)  # the file would keep the memory, too
        process.call_in_children(self._pages, MappedPages.lose)
        return self

    def populate(self, is_wanted: Callable[[], bool] = lambda: True, *, threads: int = 1) -> None:
        """Map every page, so that the first copy has no page faults; the GIL is released.

        Up to `threads` share it, one for each idle core; another one may still be at its last step
        at the end, which changes no byte. Raises ClosedError if it is not wanted any more:
        `is_wanted` is asked every `STEP` bytes.
        """
        left = deque(_steps(self.nbytes))
        helpers = min(threads - 1, idle_cores(), len(left) - 1) if threads > 1 else 0
        try:
            while left:
                if not is_wanted():
                    raise ClosedError(_UNWANTED)
                is_advised = self._populate_next(left)
                with contextlib.suppress(CapacityError):  # no more threads: this one does all
                    while is_advised and helpers > 0:
                        helpers -= 1
                        start_detached(partial(self._help_populate, left))
        finally:
            left.clear()

    def _help_populate(self, left: deque[tuple[int, int]]) -> None:
        while left:
            self._populate_next(left)

    def _populate_next(self, left: deque[tuple[int, int]]) -> bool:
        """Map the pages of a step; False if an older kernel cannot, and this thread wrote them."""
        with contextlib.suppress(IndexError):  # another thread has taken the last step
            start, length = left.popleft()
            readonly, address = self.region.readonly, self.region.address + start
            advice = _MADV_POPULATE_READ if readonly else _MADV_POPULATE_WRITE
            if _libc.madvise(address, length, advice) and ctypes.get_errno() == EINVAL:
                if not readonly:
                    ctypes.memset(address, 0, length)  # nobody else has written to it yet
                return False
        return True

    def close_file(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        self.fd = -1  # first: its number is another's once closed
        if self._file is not None:
            self._file.run()


def _has_huge_shared_pages() -> bool:
    """Whether a memfd has huge pages if its mapping asks for them."""
    with contextlib.suppress(OSError):
        return "[advise]" in _SHMEM_HUGE_PAGES.read_text()
    return False


def available_bytes() -> int:
    """Return the bytes that the machine has available and the process's cgroup allows."""
    available = [1 << 62]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:  # else not Linux: unknown
        matching_lines = (line for line in lines if line.startswith("MemAvailable:"))
        available += [int(line.split()[1]) * 1024 for line in matching_lines]
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


def idle_cores() -> int:
    """Return the cores on which nothing runs now, of those that this process may use."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg") as loads:
        running = int(loads.read().split()[3].partition("/")[0])  # this thread, too
        return max(0, len(os.sched_getaffinity(0)) - running)
    return 0


def _steps(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each step."""
    for start in range(0, nbytes, STEP):
        yield start, min(STEP, nbytes - start)


def _memfd(name: str) -> int:
    """Make a memory file; by libc itself, where Python was built for one that lacks the call.

    UnavailableError if this libc has none.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_FLAGS)
    try:
        create = _libc.memfd_create
    except AttributeError:
        raise UnavailableError(
            "this libc has no memfd_create, which shared memory takes: use glibc 2.27 or later, or "
            "zmq+ipc://"
        ) from None
    fd: int = create(name.encode(), _MFD_FLAGS)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


@contextlib.contextmanager
def _refusals(nbytes: int) -> Iterator[None]:
    """Raise CapacityError for a system call of this block that fails."""
    try:
        yield
    except KVLinkError:  # also a TransferTimeout, which is an OSError
        raise
    except OSError as error:
        cure = cure_of(error.errno or 0)
        raise CapacityError(
            f"the system refused {nbytes} bytes of memory: {error.strerror}; {cure}",
            requested=nbytes,
            free=available_bytes(),
        ) from None


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
    status = os.fstat(fd)
    return is_final and status.st_blocks * 512 >= status.st_size


MakeArena: TypeAlias = "Callable[[int, Callable[[], bool]], Mapping]"
"""Maps an arena of the given bytes; gives up when the given function returns False."""
