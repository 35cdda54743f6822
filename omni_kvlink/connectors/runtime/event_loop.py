"""One thread that sleeps until a descriptor, a call or a deadline needs it; never polls."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Handler = Callable[[int], None]


_AT_EXIT = 0.5
"""Seconds that a process which ends gives each loop for what was called, such as releases."""
_loops: weakref.WeakSet[EventLoop] = weakref.WeakSet()
_LONGEST = 86_400.0  # epoll counts milliseconds in an int; a longer sleep is two


def _never(now: float) -> float:
    return float("inf")


def _ignore(error: BaseException) -> None:
    pass


class EventLoop:
    """A daemon thread around a selector.

    `call` may be used anywhere, also in a finalizer or with locks held: it appends to a deque and
    writes an eventfd. Handlers and `tick` run in the loop's thread.

    Args:
        name: the thread's name.
        tick: does what is due and returns the monotonic time when it wants to run again.
        crashed: told of an error that ends the thread, so that nobody waits for it in vain.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[float], float] = _never,
        crashed: Callable[[BaseException], None] = _ignore,
    ):
        self._tick, self._crashed = tick, crashed
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._sleeps_until = 0.0
        self._running = True
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _loops.add(self)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` soon, in the loop's thread."""
        self._calls.append(function)
        self._poke()

    def catch_up(self) -> None:
        """Run what was called so far; in the loop's thread only."""
        while self._calls:
            self._calls.popleft()()

    def remind(self, when: float) -> None:
        """Make sure `tick` runs at `when`."""
        if when < self._sleeps_until:
            self._poke()

    def watch(self, what: int | HasFileno, events: int, handler: Handler) -> None:
        """Call `handler(events)` when they happen; in the loop's thread only."""
        try:
            self._selector.modify(what, events, handler)
        except KeyError:
            self._selector.register(what, events, handler)

    def unwatch(self, what: int | HasFileno) -> None:
        with contextlib.suppress(KeyError, ValueError):  # already gone
            self._selector.unregister(what)

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def drain(self, timeout: float) -> None:
        """Return when all that was called so far has run, or the time is over."""
        done = threading.Event()
        self.call(done.set)
        if self._thread.is_alive() and not self.is_own_thread:
            done.wait(timeout)

    def stop(self) -> None:
        """Run what was called so far, then end the thread."""
        if os.getpid() != self._pid:
            return  # a forked child has no such thread, and shares the descriptors
        self.call(self._finish)
        if not self.is_own_thread:
            self._thread.join()

    def _finish(self) -> None:
        self._running = False

    def _poke(self) -> None:
        if os.getpid() == self._pid:  # a forked child shares the descriptor, not the thread
            os.eventfd_write(self._wake, 1)

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._wake)

    def _run(self) -> None:
        try:
            while self._running:
                self.catch_up()
                now = time.monotonic()
                self._sleeps_until = float("inf")  # a `remind` during the tick must poke
                self._sleeps_until = self._tick(now)
                if self._calls or not self._running:
                    continue
                self._sleep(self._sleeps_until - now)
        except BaseException as error:
            self._crashed(error)
            raise
        finally:
            self._selector.close()
            self._tick, self._crashed = _never, _ignore  # breaks the cycle with the owner
            self._calls.clear()

    def __del__(self) -> None:
        # Not in `stop`: a late finalizer may still write to it, and its number must not be reused.
        os.close(self._wake)

    def _sleep(self, seconds: float) -> None:
        timeout = None if seconds == float("inf") else min(max(0.0, seconds), _LONGEST)
        for key, events in self._selector.select(timeout):
            key.data(events)


def _drain_all() -> None:
    """A daemon thread is stopped wherever it is; a view dropped a moment before counts as read."""
    for loop in list(_loops):
        if loop._pid == os.getpid():
            loop.drain(_AT_EXIT)


atexit.register(_drain_all)


def readable_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, or -1 where that cannot be had."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
