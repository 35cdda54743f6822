"""Threads of the library, and calls that no exception of a signal handler cuts.

Such an exception comes in the main thread alone. What opens a link makes threads, descriptors and
files one after the other; instead of an owner for each moment between two of them, all of it runs
in another thread, where there is no such moment.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from omni_kvlink.errors import CapacityError
from omni_kvlink.system.failures import cure_of

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_local = threading.local()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; CapacityError if the system has no more.

    `Thread.start`, if an exception cuts it, may leave its thread waiting for it for ever.
    """
    try:
        uninterrupted(thread.start)
    except RuntimeError as error:  # so Python reports it, without an errno
        text = f"thread {thread.name}: {error}; {cure_of(errno.EAGAIN)}"
        raise CapacityError(text) from None


def start_detached(function: Callable[[], object]) -> None:
    """Start a function in a thread that nobody joins; CapacityError if the system has no more.

    In one step, unlike `Thread.start`: after an exception of a signal handler the function runs, or
    never does.
    """
    try:
        _thread.start_new_thread(_run_detached, ([function],))
    except RuntimeError as error:
        raise CapacityError(f"a thread: {error}; {cure_of(errno.EAGAIN)}") from None


def is_abandoned() -> bool:
    """Whether this thread makes an `uninterrupted` call that nobody waits for any more."""
    call = getattr(_local, "call", None)
    return call is not None and call.is_abandoned


def uninterrupted(
    call: Callable[[], T],
    *,
    undo: Callable[[T], object] | None = None,
    cancel: Callable[[int], object] | None = None,
) -> T:
    """Return what a call returns; an exception of a signal handler ends the wait, not the call.

    After it, `cancel` is given the identifier of the call's thread, to wake it up, and what the
    call returns nevertheless is given to `undo`. Outside the main thread, and where there is no
    other thread to be had, the call runs in the caller's.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return call()
    shielded = _Call(call, undo)
    try:
        try:
            start_detached(shielded.run)
        except CapacityError:
            return call()
        shielded.is_over.acquire()
        return shielded.result()
    except BaseException:
        shielded.abandon()
        if cancel is not None and shielded.thread:
            cancel(shielded.thread)
        raise


class _Call(Generic[T]):
    """One call in a thread of its own; what it returned has one owner at any time."""

    def __init__(self, call: Callable[[], T], undo: Callable[[T], object] | None):
        self._to_make, self._undo = [call], undo
        self._results = list[T]()
        self._error: BaseException | None = None
        self.is_abandoned = False
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.thread = 0  # while the call is made

    def run(self) -> None:
        """Make the call; in its thread."""
        self.thread, _local.call = threading.get_ident(), self
        try:
            while self._to_make:
                self._results.append(self._to_make.pop()())
        except BaseException as error:
            self._error = error
        finally:
            if self.is_abandoned:
                self._discard()
            _unregister_thread()  # before the caller goes on
            self.thread, _local.call = 0, None
            self.is_over.release()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._results.pop()
        finally:
            del error  # its traceback refers to this frame

    def abandon(self) -> None:
        """Undo the call, now or when it is over; one that has not begun is not made."""
        self._to_make.clear()
        self.is_abandoned = True
        self._discard()  # what was returned before; else the thread sees that it is abandoned

    def _discard(self) -> None:
        self._error = None
        while self._results:
            result = self._results.pop()
            if self._undo is not None:
                self._undo(result)


def _run_detached(functions: list[Callable[[], object]]) -> None:
    try:
        functions.pop()()  # an error that the function keeps has this frame, which must not keep it
    finally:
        _unregister_thread()


def _unregister_thread() -> None:
    """Remove this thread, which `threading` did not start, from its list; Python 3.12 does that."""
    number, active = threading.get_ident(), getattr(threading, "_active", {})
    if isinstance(active.get(number), getattr(threading, "_DummyThread", ())):
        active.pop(number, None)


def lower_priority(niceness: int) -> None:
    """Add this to the niceness of the calling thread, if the system lets it."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + niceness)
