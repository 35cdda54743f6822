"""Waits of threads: for how long (`Deadline`), and for what (`Answer`, `LazyEvent`)."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni_kvlink.errors import TransferTimeout, format_seconds, without_frames
from omni_kvlink.settings import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
MAX_TIMEOUT = 1e9
"""Seconds that every clock of the system accepts; a longer timeout is shortened to this one."""
_TIMEOUT = Seconds(endless=True)
_NUMBERS = (float, int)
NEVER = math.inf
"""A deadline (`time.monotonic`) that does not pass."""


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return a timeout that every clock accepts; infinity means no limit.

    SchemaError for a negative number, for NaN, and for what is no number.
    """
    if type(seconds) in _NUMBERS and 0 <= seconds < MAX_TIMEOUT:  # a call costs more than the test
        return seconds
    limit: float = _TIMEOUT.read(seconds, name)
    return min(MAX_TIMEOUT, limit)


class Deadline:
    """The end of a call with a timeout of so many seconds, counted from now.

    With a timeout of 0 the call waits for nobody, and its own work takes as long as it takes.
    SchemaError as of `check_timeout`.

    Attributes:
        timeout: in seconds.
        at: when it waits no longer (`time.monotonic`).
        work: when its own work, such as copying, ends unfinished: `at`, or `NEVER`.
    """

    def __init__(self, timeout: float):
        self.timeout = check_timeout(timeout)
        self.at = time.monotonic() + self.timeout
        self.work = self.at if self.timeout else NEVER

    def seconds_left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(0.0, self.at - time.monotonic())

    @property
    def timeout_left(self) -> float:
        """The timeout of a call below this one: 0 only if this one waits for nobody."""
        return max(1e-9, self.at - time.monotonic()) if self.timeout else 0.0

    def check(self, key: str) -> None:
        """Raise TransferTimeout if the timeout has passed."""
        if self.timeout and not self.seconds_left():
            raise self.passed(key, "reserving memory")

    def passed(self, key: str, phase: str) -> TransferTimeout:
        """Return the error for one of `check_deadline`, with the payload's key and the timeout."""
        text = f"{format_seconds(self.timeout)} have passed while {phase}: raise timeout="
        return TransferTimeout(
            f"payload {key!r}: {text}", key=key, waited=self.timeout, phase=phase
        )


def check_deadline(deadline: float, phase: str) -> None:
    """Raise TransferTimeout if a deadline (`time.monotonic`) has passed in this phase of the work.

    For loops over large pieces of work: the caller knows for what, and names it.
    """
    if time.monotonic() >= deadline:
        raise deadline_passed(phase)


def deadline_passed(phase: str) -> TransferTimeout:
    """The error of `check_deadline`."""
    return TransferTimeout(f"the deadline passed while {phase}: raise timeout=", phase=phase)


_making = threading.RLock()  # a finalizer, or a signal handler, may come while it is held


def _renew_making() -> None:
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_renew_making)  # a thread of the parent may have held it


def made_of(owner: object, name: str, make: Callable[[], T]) -> T:
    """Return this attribute of `owner`, made now if it is None; any thread.

    An object that makes its lists when they are needed costs the garbage collector less.
    """
    with _making:
        attribute: T | None = getattr(owner, name)
        if attribute is None:
            attribute = make()
            setattr(owner, name, attribute)
        return attribute


class LazyEvent:
    """An event that has no lock until somebody waits for it, unlike `threading.Event`."""

    _is_set = False
    _waiting: list[threading.Lock] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'set' if self._is_set else 'not set'}>"

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake those who wait; after an interrupt, the next call wakes the others."""
        self._is_set = True
        waiting = self._waiting
        if not waiting:  # who comes later sees that it is set
            return
        for lock in tuple(waiting):
            with suppress(RuntimeError):  # another thread was faster
                lock.release()
            with suppress(ValueError):
                waiting.remove(lock)  # last: an interrupt loses none

    def clear(self) -> None:
        """Undo `set`."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Block until it is set, for `timeout` seconds at most; return whether it is."""
        if self._is_set:
            return True
        deadline, lock = time.monotonic() + timeout, threading.Lock()
        lock.acquire()
        waiting = made_of(self, "_waiting", list[Any])
        is_released = True
        # A `set` from before the last `clear` may release the lock as late as now.
        while is_released and not self._is_set:
            waiting.append(lock)
            if self._is_set:  # it may have come before the lock was there to be released
                break
            is_released = lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        with suppress(ValueError):
            waiting.remove(lock)
        return self._is_set


class Answer(LazyEvent, Generic[T]):
    """A result or an error that comes once; unlike a `Future`, it has no lock until it is needed.

    One owner sets it. `future` returns the same as a `Future`, for those who need one.
    """

    error: Exception | None = None
    _result: T
    _callbacks: list[Callable[[Answer[T]], None]] | None = None

    def set_result(self, result: T) -> None:
        """End with a result."""
        self._result = result
        self.set()
        if self._callbacks:
            self._call_back()

    def set_error(self, error: Exception) -> None:
        """End with an error, whose frames are dropped: they would keep what they use."""
        self.error = without_frames(error)
        self.set()
        if self._callbacks:
            self._call_back()

    def result(self) -> T:
        """Return the result, or raise a copy of the error; only when it is set.

        The traceback of the error itself would keep the frames that wait, and what they use.
        """
        if self.error is not None:
            raise copy.copy(self.error)
        return self._result

    def add_done_callback(self, callback: Callable[[Answer[T]], None]) -> None:
        """Call this with this object when it is set, at once or later, in any thread.

        Once; or twice if another thread calls meanwhile, or after an interrupt.
        """
        made_of(self, "_callbacks", list[Any]).append(callback)
        if self._is_set:
            self._call_back()

    def future(self) -> Future[T]:
        """Return a new future that ends as this does."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # only this object ends it
        self.add_done_callback(partial(_end, future))
        return future

    def _call_back(self) -> None:
        while self._callbacks:
            with suppress(IndexError, ValueError):  # another thread was faster
                callback = self._callbacks[0]
                callback(self)
                self._callbacks.remove(callback)  # last: an interrupt loses none


def _end(future: Future[T], answer: Answer[T]) -> None:
    with suppress(InvalidStateError):
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.result())
