"""The thread of a connection, and waiting threads that receive in its place; none of them polls.

docs/threads.md says what runs in which thread.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from omni_kvlink.errors import CapacityError
from omni_kvlink.memory.region import CallAtEnd, closer, take
from omni_kvlink.system import process
from omni_kvlink.system.failures import system_error
from omni_kvlink.system.threads import start_thread

if TYPE_CHECKING:
    from omni_kvlink.system.waits import LazyEvent


class HasFileno(Protocol):
    """An object with a descriptor, as `select` accepts it."""

    def fileno(self) -> int:
        """Return the descriptor."""


Handler = Callable[[int], None]
"""Called with the events (`READ | WRITE`) that happened."""

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
EDGE = select.EPOLLET
"""Beside them for `watch`: call the handler once when they begin, not as long as they last."""

_AT_EXIT = 0.5
"""Seconds that an exiting process gives each loop for pending calls, such as releases."""
_GIVE_WAY = 5e-3
"""Seconds that a loop is given way at most: after so long, the interpreter would switch itself."""
_MAX_SLEEP = 86_400.0  # epoll counts milliseconds in an int; a longer sleep takes two
_MAX_POLL = 86_400_000  # milliseconds; poll counts them in an int, too
_PAUSE = 1e-3
"""Seconds from the end of a paused function to the next, at least; as many as it took."""
_LONGEST_REST = 0.1
"""At most so many, for a process that was stopped amid such a function."""
_MAX_EVENTS = 64
"""Descriptors that one round handles; the kernel reports the others in the next rounds."""
_loops: weakref.WeakSet[EventLoop] = weakref.WeakSet()


def _no_deadline(now: float) -> float:
    return float("inf")


def _ignore(error: BaseException) -> None:
    pass


class Wake:
    """A descriptor that is readable after `set`; closed when nobody has this object any more."""

    def __init__(self) -> None:
        descriptors = list[int]()
        # Not closed by its owner: a thread may still wait for it, and its number be reused.
        CallAtEnd.of(self, closer(descriptors))
        self.fd = take(descriptors, os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Undo `set`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class EventLoop:
    """A daemon thread around an epoll; handlers and `tick` run in it.

    It works in rounds: the calls that wait, `tick`, the handlers of at most `_MAX_EVENTS`
    descriptors, one deferred function, and one that is paused, if its time has come. A handler that
    leaves the rest of its work to `defer` delays no call, no deadline and no other descriptor for
    longer than one round.

    `call` may be used anywhere, also in a finalizer or with locks held: it appends to a deque and,
    if the thread sleeps, writes an eventfd. `tick` does what is due at the time it is given, and
    returns when to call it again (`time.monotonic`). `crashed` is called with an error that ends
    the thread, so that waiting calls can be failed.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[float], float] = _no_deadline,
        crashed: Callable[[BaseException], None] = _ignore,
    ):
        self._wake: Wake | None = None
        self._tick, self._crashed = tick, crashed
        self._calls: deque[Callable[[], None]] = deque()
        self._deferred: deque[Callable[[], None]] = deque()
        self._paused: deque[Callable[[], None]] = deque()
        self._paused_until = 0.0
        self._sleeps_until = 0.0
        # Numbers: of the sleep that the thread is in, 0 while it runs; of its last sleep; of the
        # last one that a call has ended.
        self._sleeping = self._sleeps = self._woken = 0
        self._running = True
        self._process = process.current
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._watched: dict[int, tuple[int, Handler]] = {}
        self._epoll = select.epoll()
        try:
            self._wake = Wake()
            self.watch(self._wake.fd, READ, self._on_wake)
            start_thread(self._thread)
        except (OSError, CapacityError):  # no thread runs; the loop is in a reference cycle
            self._watched.clear()
            self._epoll.close()
            self._wake = None
            raise
        _loops.add(self)

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the loop's thread, after earlier calls; never blocks, takes no lock."""
        self._calls.append(function)
        sleep = self._sleeping
        if sleep and sleep != self._woken:  # a thread that runs looks for calls before it sleeps
            self._wake_up()
            self._woken = sleep
        if self._wake is None:  # the loop has ended: a call that is kept would be a reference cycle
            self._calls.clear()

    def give_way(self) -> None:
        """Let the thread handle what has come, if anything has; blocks for that, not for long.

        For a thread that computes in Python: it keeps the loop from the interpreter's lock.
        """
        poll = select.poll()
        try:
            poll.register(self._epoll.fileno(), select.POLLIN)
        except ValueError:  # the loop has ended
            return
        is_busy = not self._sleeping or poll.poll(0)
        if is_busy and not self.is_own_thread:
            handled = threading.Lock()
            handled.acquire()
            self.call(handled.release)
            handled.acquire(timeout=_GIVE_WAY)

    def defer(self, function: Callable[[], None], *, paused: bool = False) -> None:
        """Run `function` in a later round, after what is ready then; in the loop's thread only.

        The deferred functions take turns, one a round. Of those that are `paused`, each is followed
        by a rest as long as it took, a millisecond at least: so that work which never ends leaves
        the processor, and the interpreter's lock, to others. The loop's end drops them.
        """
        (self._paused if paused else self._deferred).append(function)

    def run_pending(self) -> None:
        """Run the calls that are pending now, not those that they make; in the loop's thread."""
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def tick_by(self, moment: float) -> None:
        """Make sure that `tick` runs at `moment` (`time.monotonic`) or before."""
        if moment < self._sleeps_until:
            self._wake_up()

    def watch(self, source: int | HasFileno, events: int, handler: Handler) -> None:
        """Call `handler(events)` whenever they happen; any thread, one at a time a descriptor.

        ConnectorError if the system refuses to watch one more.
        """
        fd = source if isinstance(source, int) else source.fileno()
        if fd < 0:
            return  # it was closed: nothing happens to it
        is_watched, self._watched[fd] = fd in self._watched, (events, handler)
        try:
            if is_watched:
                with contextlib.suppress(FileNotFoundError):  # it was closed, its number reused
                    self._epoll.modify(fd, events)
                    return
            try:
                self._epoll.register(fd, events)
            except FileExistsError:
                self._epoll.modify(fd, events)
        except OSError as error:  # a context manager costs a small `get` more than the call
            other = "raise fs.epoll.max_user_watches"
            raise system_error(error, "watching a connection", other) from None

    def unwatch(self, source: int | HasFileno) -> None:
        """Undo `watch`; does nothing if `source` is not watched."""
        fd = source if isinstance(source, int) else source.fileno()
        if self._watched.pop(fd, None) is None:
            return
        try:  # noqa: SIM105 (a context manager costs a small `get` more than the call)
            self._epoll.unregister(fd)
        except (OSError, ValueError):  # it was closed; or the loop has ended
            pass

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Run the pending calls, then end the thread; blocks unless called in that thread."""
        if not self._process.is_current:
            return  # a forked child has no such thread, and shares the descriptors
        self.call(self._end_run)
        if not self.is_own_thread:
            self._thread.join()

    def _end_run(self) -> None:
        self._running = False

    def _wake_up(self) -> None:
        wake = self._wake
        # A forked child shares the descriptor, not the thread.
        if wake is not None and self._process.is_current:
            os.eventfd_write(wake.fd, 1)

    def _on_wake(self, events: int) -> None:
        assert self._wake is not None
        os.eventfd_read(self._wake.fd)

    def _run(self) -> None:
        try:
            while self._running:
                if self._calls:
                    self.run_pending()
                now = time.monotonic()
                self._sleeps_until = float("inf")  # a `tick_by` during the tick must wake it up
                self._sleeps_until = self._tick(now)
                self._sleeps += 1
                self._sleeping = self._sleeps
                if self._running:
                    is_busy = self._calls or self._deferred
                    wakeup = self._sleeps_until
                    if self._paused:
                        wakeup = min(wakeup, self._paused_until)
                    self._sleep(0.0 if is_busy else wakeup - now)
                self._sleeping = 0
                if self._running and (self._deferred or self._paused):
                    self._run_deferred()
            while self._calls:  # what the last calls have called
                self.run_pending()
        except BaseException as error:
            self._crashed(error)
            raise
        finally:
            self._epoll.close()
            self._watched.clear()
            self._tick, self._crashed = _no_deadline, _ignore  # breaks the cycle with the owner
            self._calls.clear()
            self._deferred.clear()
            self._paused.clear()
            self._wake = None  # closed once no `call` of another thread writes to it

    def _run_deferred(self) -> None:
        if self._deferred:
            self._deferred.popleft()()
        if self._paused and (now := time.monotonic()) >= self._paused_until:
            self._paused.popleft()()
            ended = time.monotonic()
            self._paused_until = ended + min(max(_PAUSE, ended - now), _LONGEST_REST)

    def _sleep(self, seconds: float) -> None:
        timeout = None if seconds == float("inf") else min(max(0.0, seconds), _MAX_SLEEP)
        ready = self._epoll.poll(timeout, _MAX_EVENTS)
        self._sleeping = 0
        for fd, events in ready:
            watched = self._watched.get(fd)
            if watched is not None:  # an earlier handler may have closed it
                interest, handler = watched
                handler(events if events in (READ, WRITE) else interest)  # else an end, or both


def _drain_all() -> None:
    """Run pending calls before the process exits: a view freed a moment before counts as read."""
    for loop in list(_loops):
        if loop._process.is_current and loop._thread.is_alive() and not loop.is_own_thread:
            done = threading.Event()
            loop.call(done.set)
            done.wait(_AT_EXIT)


atexit.register(_drain_all)


def readable_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 if there is none.

    Raises OSError if this process can open no more descriptors.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError) as error:
        if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
            raise
        return -1


class LeadingReceiver(ABC):
    """Lets a thread that waits for an answer receive it itself, and not the loop's thread.

    One thread at a time leads; the others sleep until their answers are set. An interrupt at any
    line leaves no lock held, and the connection to the loop.
    """

    _loop: EventLoop
    _wake: Wake | None = None
    """Set when another thread has ended the leader's get, or the connection."""

    def __init__(self) -> None:
        # Held by the thread that receives: the loop's, or the leader. An RLock, for interrupts: see
        # docs/threads.md.
        self._receiving = threading.RLock()
        self._leader = 0  # the thread that leads; 0: the loop receives

    @abstractmethod
    def _begin_leading(self, get: Any) -> int:
        """Have the loop leave messages to this thread; return their descriptor, or -1 to stop."""

    @abstractmethod
    def _receive_next(self, get: Any) -> bool:
        """Handle the next message if it is an answer, or none; return whether to wait on.

        An interrupt at any line must lose no message.
        """

    @abstractmethod
    def _watch_channel(self) -> None:
        """Have the loop wait for what it handles now, also for what is there; any thread."""

    def receive_until(self, event: LazyEvent, deadline: float, get: Any = None) -> None:
        """Receive in the calling thread until `event` is set, unless another thread receives.

        It returns at the `deadline` (`time.monotonic`) at the latest, or early, and leaves the
        connection to the loop. The hooks are called with `get`.
        """
        if event.is_set() or self._loop.is_own_thread:
            return
        try:
            if not self._receiving.acquire(blocking=False):
                return
            self._leader = threading.get_ident()
            fd, wake = self._begin_leading(get), self._wake
            if fd < 0 or wake is None:
                return
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(wake.fd, select.POLLIN)
            while not event.is_set():
                seconds = deadline - time.monotonic()
                if seconds <= 0 or not (ready := poll.poll(min(1e3 * seconds + 1, _MAX_POLL))):
                    return
                if ready[0][0] == wake.fd:  # and no message is there
                    wake.clear()
                if not self._receive_next(get):
                    return
        finally:
            try:
                self._stop_leading()
            except BaseException:  # an interrupt: without this nobody would receive
                self._stop_leading()
                self._watch_channel()
                raise

    def _wake_leader(self) -> None:
        """Have the leader look whether its get was ended; any thread, also its own."""
        wake = self._wake
        if self._leader and wake is not None:
            wake.set()

    def _stop_leading(self) -> None:
        if self._leader == threading.get_ident():
            self._leader = 0
        is_released = False
        try:
            self._receiving.release()
            is_released = True
        except RuntimeError:  # another thread receives
            pass
        if is_released:  # only now: what is here wakes the loop once
            self._watch_channel()
