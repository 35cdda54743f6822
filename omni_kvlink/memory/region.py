"""Regions of memory and their owners: `Region`, `Lease`, and the `Finalizer` that ends ownership.

An exception of a signal handler, which comes in the main thread wherever a Python function begins,
a call of C returns or a loop repeats, must lose nothing that is owned. So nothing is owned by a
value that is on its way from a call to a variable:

- What the library takes from itself (memory, a key) is written into its owner in the same
  assignment that takes it. The owner exists before: `ArenaPool.reserve(nbytes, owner)`.
- What the system gives as a number, such as a descriptor, is appended to a list by `take`.
- What is released when an object is freed is released by a `Finalizer`.

Nothing is freed under a reader: every view and tensor of a region holds its owner.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from omni_kvlink.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_BOUNDARY = 256  # of a payload in memory
_Byte = ctypes.c_char
LOST = "the memory belongs to the process that this one was forked from"


def take(into: list[T], function: Callable[..., T], *arguments: object) -> T:
    """Append what a function of C returns to `into`, in one step; return it.

    The caller has `into` before, and releases what it has then after any exception.
    """
    into.extend(map(function, *[(argument,) for argument in arguments]))
    return into[-1]


def closer(descriptors: list[Any]) -> Callable[[], object]:
    """Return a function that closes the descriptors of a list, each once, and empties it.

    No signal handler runs in between. The list gets a None as its first element here.
    """
    descriptors.insert(0, None)  # `iter` ends at it
    return partial(deque, map(os.close, iter(descriptors.pop, None)), 0)


def call_if_alive(method: weakref.WeakMethod[Any], *arguments: object) -> None:
    """Call a method, if its object still lives."""
    bound = method()
    if bound is not None:
        bound(*arguments)


class Finalizer(weakref.ref[Any]):
    """Calls `end` once, when its object was freed or, by `run`, before; not at exit.

    Unlike a `weakref.finalize` or a `__del__`, it loses no call to a signal handler's exception,
    which Python ignores there. After one, `end` is called again: it may run twice. It runs in any
    thread, and must neither block nor take a lock.
    """

    __slots__ = ("is_alive",)

    is_alive: bool
    """Whether `end` has not been called."""
    # Here, since a module's names are gone at exit.
    _alive: ClassVar[dict[int, _SecondCall]] = {}

    def end(self) -> None:
        """Release what the object had."""
        raise NotImplementedError

    def begin(self, owner: object) -> None:
        """Watch `owner`, the object that this was made of, from now on."""
        second = _SecondCall(owner, _SecondCall.run)
        second.first = self
        self.is_alive = True
        self._alive[id(self)] = second

    def run(self) -> None:
        """Call `end` now; a second call does nothing."""
        was_alive = False
        try:
            was_alive, self.is_alive = self.is_alive, False
            if was_alive:
                self.end()
        except BaseException:
            if was_alive:
                self.end()
            raise
        finally:
            self._alive.pop(id(self), None)

    def detach(self) -> bool:
        """Leave the release to the caller; False if it was done."""
        was_alive, self.is_alive = self.is_alive, False
        self._alive.pop(id(self), None)
        return was_alive


class _SecondCall(weakref.ref[Any]):
    """Runs a finalizer whose own call was interrupted before its first line."""

    __slots__ = ("first",)
    first: Finalizer

    def run(self) -> None:
        if self.first.is_alive:
            self.first.run()


class CallAtEnd(Finalizer):
    """Calls a function when an object was freed; see `Finalizer`."""

    __slots__ = ("_function",)
    _function: Callable[[], object]

    @classmethod
    def of(cls, owner: object, function: Callable[[], object]) -> CallAtEnd:
        """Return a new one; `function` must not refer to `owner`."""
        call = cls(owner, cls.run)
        call._function = function
        call.begin(owner)
        return call

    def end(self) -> None:
        """Call the function."""
        self._function()


@runtime_checkable
class DeviceMemory(Protocol):
    """The owner of regions of a device's memory, by address."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes to the host; blocks for that."""

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to the device; blocks for that."""


class Region:
    """A span of memory: `nbytes` from `address` on; `device` is "cpu" or a torch device's name.

    Attributes:
        owner: the object that every view of the region keeps alive.
        readonly: whether views are readonly.
    """

    __slots__ = ("_span", "address", "device", "nbytes", "owner", "readonly")

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
        self._span: ctypes.Array[ctypes.c_char] | None = None

    @property
    def span(self) -> ctypes.Array[ctypes.c_char]:
        """A ctypes array that all views share; a finalizer on it runs when the last is freed."""
        if self._span is None:  # most regions are only an address to copy from or to
            span = _array_type(self.nbytes).from_address(self.address)
            span.owner = self.owner  # type: ignore[attr-defined]
            self._span = span
        return self._span

    @classmethod
    def private(cls, nbytes: int) -> Region:
        """Return new memory of the process, on a 256-byte boundary; the views free it."""
        owner, start, address = _aligned(nbytes)
        return cls(address + start, nbytes, owner)

    @classmethod
    def copy_of(cls, data: memoryview) -> Region:
        """Return a readonly copy of bytes, in memory as `private` makes it."""
        nbytes = data.nbytes
        owner, start, address = _aligned(nbytes)
        memoryview(owner)[start : start + nbytes] = data  # a bytearray would copy it twice
        return cls(address + start, nbytes, owner, readonly=True)

    @classmethod
    def of_buffer(cls, buffer: memoryview) -> Region:
        """Return the memory of a buffer, which the region keeps."""
        return cls(address_of_buffer(buffer), buffer.nbytes, buffer, readonly=buffer.readonly)

    def __repr__(self) -> str:
        access = ", readonly" if self.readonly else ""
        return f"<Region: {self.nbytes} bytes on {self.device}{access}>"

    @property
    def is_lost(self) -> bool:
        """Whether this is a forked child, which has not inherited the memory."""
        return bool(getattr(self.owner, "is_lost", False))  # not every owner is mapped here

    def slice(self, start: int, nbytes: int) -> Region:
        """Return a part of the region, as a region with its own span."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start}…{start + nbytes} of a region of {self.nbytes}")
        return Region(
            self.address + start, nbytes, self.owner, device=self.device, readonly=self.readonly
        )

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return bytes `start` to `stop` as a view that keeps the memory mapped.

        ValueError if they are a device's, which the host can only `read` and `write`.
        """
        if self.device != "cpu":
            raise ValueError(f"memory of {self.device} has no view on the host")
        full_view = memoryview(self.span).cast("B")
        if self.readonly:
            full_view = full_view.toreadonly()
        return full_view[start:stop]

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return a copy of bytes `start` to `stop`, from a device, too; blocks for that."""
        if self.device == "cpu":
            return bytes(self.view(start, stop))
        part = self.slice(start, (self.nbytes if stop is None else stop) - start)
        return self._device_memory.read(part.address, part.nbytes)

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Copy bytes to `start`, to a device, too; blocks for that."""
        if self.device == "cpu":
            self.view(start, start + len(data))[:] = data
        else:
            part = self.slice(start, len(data))
            self._device_memory.write(part.address, bytes(data))

    @property
    def _device_memory(self) -> DeviceMemory:
        if not isinstance(self.owner, DeviceMemory):
            raise ValueError(f"memory of {self.device} that is not this library's")
        return self.owner


class Scratch:
    """Memory in which a small payload is put together, before it is kept as `bytes`; used again."""

    _spare: ClassVar[deque[Scratch]] = deque(maxlen=8)
    _LEAST = 32 << 10
    """Bytes of new memory: what most small payloads need."""

    def __init__(self, nbytes: int):
        self.region = Region.private(nbytes)
        self._view = self.region.view()

    @classmethod
    def take(cls, nbytes: int) -> Scratch:
        """Return memory of at least `nbytes`; its content is undefined."""
        try:
            scratch = cls._spare.pop()
        except IndexError:
            scratch = cls(cls._LEAST)
        return scratch if scratch.region.nbytes >= nbytes else cls(nbytes)

    def clear(self, nbytes: int) -> None:
        """Fill the first `nbytes` with zeros."""
        self._view[:nbytes] = bytes(nbytes)

    def give_back(self, nbytes: int) -> bytes:
        """Return a copy of the first `nbytes`. The memory is used again from now on."""
        payload = bytes(self._view[:nbytes])
        self._spare.append(self)
        return payload


@functools.lru_cache(maxsize=256)
def _array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Kept, because ctypes forgets a type that is not in use, and one takes long to make."""
    return _Byte * nbytes


def _aligned(nbytes: int) -> tuple[bytearray, int, int]:
    """New memory with `nbytes` on a 256-byte boundary: it, their start in it, and its address."""
    owner = bytearray(nbytes + _BOUNDARY - 1)
    address = ctypes.addressof(_Byte.from_buffer(owner))
    return owner, -address % _BOUNDARY, address


def address_of_buffer(buffer: memoryview) -> int:
    """Return the address of a buffer's first byte."""
    return np.frombuffer(buffer, np.uint8).ctypes.data


class Lease:
    """The only owner of a region until it is released or moved; a context manager that releases.

    `release` is called once. `tag` is a value of the code that made the lease. `drop`, if given,
    releases the memory of a lease that was dropped, as by an exception of a signal handler; it
    neither blocks nor takes a lock, and may be called twice.
    """

    def __init__(
        self,
        region: Region,
        release: Callable[[], None],
        tag: object = None,
        drop: Callable[[], None] | None = None,
    ):
        self._region: Region | None = region
        self.capacity = region.nbytes  # before `shrink`
        self._release, self.tag = release, tag
        self._dropped = None if drop is None else CallAtEnd.of(self, drop)

    @property
    def region(self) -> Region:
        """The leased memory; ClosedError if it was released or moved, and in a forked child."""
        if self._region is None:
            raise ClosedError("this lease was released or published; reserve a new one")
        if self._region.is_lost:
            raise ClosedError(f"{LOST}; open a link in this process")
        return self._region

    def shrink(self, nbytes: int) -> None:
        """Reduce the region to its first `nbytes`."""
        self._region = self.region.slice(0, nbytes)

    def move(self) -> Region:
        """Transfer the region to a new owner and return it; `release` does nothing afterwards."""
        region = self.region
        self._end()
        return region

    def release(self) -> None:
        """Release the memory; a second call does nothing."""
        if self._region is not None:
            self._release()  # first: an interrupt leaves it to `drop`
            self._end()

    def _end(self) -> None:
        self._region = None
        if self._dropped is not None:
            self._dropped.detach()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
