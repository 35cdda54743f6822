"""The event loop sleeps until a call, a descriptor or a deadline is due."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import CapacityError
from omni_kvlink.connectors.runtime.event_loop import READ, EventLoop, readable_pidfd
from omni_kvlink.testing.rig import until
from support.connectors.held_loops import is_asleep, num_calls
from support.faults.harness import until_loops_sleep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Reaches into _sleeping, _sleeps, _sleeps_until, _wake_up: a loop that is woken for nothing, or
# told that it sleeps while it runs, does the same a little later; only its own state shows it.

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def wait(event: threading.Event) -> None:
    assert event.wait(60)


def in_order(*calls: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


other_pipe = pipe


@pytest.mark.parametrize("left", [0, 1])
def test_no_descriptor_for_a_loop(left: int) -> None:
    """An OSError, and no other one when the loop that was not started is freed at once."""
    before = count_descriptors()
    gc.disable()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plugs, highest = list[int](), max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                plugs.append(os.dup(2))
        for _ in range(left):
            os.close(plugs.pop())
        assert error_of_a_loop() == "[Errno 24] Too many open files"
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for plug in plugs:
            os.close(plug)
    assert count_descriptors() == before


def error_of_a_loop() -> str:
    """The text alone: the error keeps the loop, and so does pytest's record of it."""
    try:
        EventLoop("t")
    except (OSError, CapacityError) as error:
        return str(error)
    return ""


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_thread_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    before = count_descriptors()
    gc.disable()
    try:
        assert error_of_a_loop().startswith("thread t: can't start new thread; there are no more")
        assert count_descriptors() == before
    finally:
        gc.enable()


def test_the_last_call_that_meets_the_end_closes_the_descriptor() -> None:
    """Not the collector, which servers switch off: the loop may be part of a reference cycle."""
    loop = EventLoop("t")
    wake = loop._wake  # as a call of another thread has it, which is about to write
    assert wake is not None
    descriptor = f"/proc/self/fd/{wake.fd}"
    loop.close()
    assert "eventfd" in os.readlink(descriptor)
    del wake
    assert not os.path.exists(descriptor)


def test_call_runs_in_the_loop() -> None:
    loop, done, where = EventLoop("t"), threading.Event(), list[bool]()
    loop.call(in_order(lambda: where.append(loop.is_own_thread), done.set))
    assert done.wait(60)
    assert where == [True]
    assert not loop.is_own_thread
    loop.close()


def test_calls_run_in_order_and_before_the_close() -> None:
    loop, seen = EventLoop("t"), list[int]()
    for number in range(1000):
        loop.call(partial(seen.append, number))
    loop.close()
    assert seen == list(range(1000))


def test_close_from_inside_and_twice() -> None:
    loop, done = EventLoop("t"), threading.Event()
    loop.call(in_order(loop.close, done.set))
    assert done.wait(60)
    loop.close()
    loop.close()
    loop.call(done.clear)  # too late, and harmless
    assert done.is_set()


def test_watch_and_unwatch(pipe: tuple[int, int], other_pipe: tuple[int, int]) -> None:
    loop, seen = EventLoop("t"), threading.Event()

    def readable(events: int) -> None:
        os.read(pipe[0], 1)
        seen.set()

    loop.call(lambda: loop.watch(pipe[0], READ, readable))
    os.write(pipe[1], b"x")
    assert seen.wait(60)
    seen.clear()
    quiet = threading.Event()
    unwatch = partial(loop.unwatch, pipe[0])
    loop.call(in_order(unwatch, unwatch, quiet.set))
    assert quiet.wait(60)
    os.write(pipe[1], b"x")
    later = threading.Event()
    os.write(other_pipe[1], b"x")  # one `select` would report both
    loop.call(lambda: loop.watch(other_pipe[0], READ, lambda _: later.set()))
    assert later.wait(60)
    loop.close()
    assert not seen.is_set()


def test_tick_runs_when_it_is_due() -> None:
    due = [float("inf")]
    ran: list[float] = []
    done = threading.Event()

    def tick(now: float) -> float:
        if now >= due[0]:
            ran.append(now)
            due[0] = float("inf")
            done.set()
        return due[0]

    loop = EventLoop("t", tick)
    when = due[0] = time.monotonic() + 0.1
    loop.tick_by(when)
    assert done.wait(60)
    assert when <= ran[0]
    loop.close()


def test_tick_is_not_called_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EventLoop("t", lambda now: now + 3600)
    until_loops_sleep(monkeypatch)
    woken = list[object]()
    monkeypatch.setattr(loop, "_wake_up", lambda: woken.append(loop))
    loop.tick_by(time.monotonic() + 7200)
    assert not woken
    loop.tick_by(time.monotonic())
    assert woken
    monkeypatch.undo()
    loop.close()


def test_a_sleeping_loop_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, done = EventLoop("t"), threading.Event()
    until_loops_sleep(monkeypatch)
    woken = list[object]()
    monkeypatch.setattr(loop, "_wake_up", lambda: woken.append(loop))
    for _ in range(10):
        loop.call(done.set)
    assert len(woken) == 1
    monkeypatch.undo()
    loop.tick_by(0.0)
    assert done.wait(60)
    loop.close()


def test_a_call_just_before_the_sleep_is_not_lost() -> None:
    loops, done = list[EventLoop](), threading.Event()

    def tick(now: float) -> float:
        if loops:
            loops.pop().call(done.set)
        return float("inf")

    loop = EventLoop("t", tick)
    loops.append(loop)
    loop.tick_by(0.0)
    assert done.wait(60)
    loop.close()


@pytest.mark.parametrize("far", [1e7, 1e10, 1e300, float("inf")])
def test_far_deadlines_do_not_break_it(far: float) -> None:
    crashes: list[BaseException] = []
    loop, done = EventLoop("t", lambda now: now + far, crashes.append), threading.Event()
    loop.call(lambda: None)
    until(lambda: bool(crashes) or loop._sleeps_until >= far, "it sleeps")
    loop.call(done.set)
    assert done.wait(60), crashes
    loop.close()


@pytest.mark.parametrize("woken", [False, True], ids=["runs", "woken"])
def test_give_way(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *, woken: bool) -> None:
    """A loop that runs, or has something to handle and waits for the interpreter, goes on first."""
    monkeypatch.setattr("omni_kvlink.connectors.runtime.event_loop._GIVE_WAY", 60.0)
    begun, handled = threading.Event(), list[int]()
    with contextlib.closing(EventLoop("test")) as loop:

        def handle(events: int) -> None:
            begun.set()
            until(lambda: num_calls(loop) > 0, "the other thread waits")
            handled.append(len(os.read(pipe[0], 1)))

        loop.watch(pipe[0], READ, handle)
        os.write(pipe[1], b"x")
        assert begun.wait(60)
        if woken:
            loop._sleeping = loop._sleeps  # as before it has got the interpreter's lock
        loop.give_way()
        assert handled == [1]


def test_nobody_gives_way_to_a_loop_that_sleeps() -> None:
    with contextlib.closing(EventLoop("test")) as loop:
        until(lambda: is_asleep(loop), "it sleeps")
        before = loop._sleeps
        loop.give_way()
        assert loop._sleeps == before
    loop.give_way()  # nor to one that has ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_crash_is_reported() -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def crashed(error: BaseException) -> None:
        errors.append(error)
        done.set()

    loop = EventLoop("t", crashed=crashed)
    loop.call(lambda: [][1])
    assert done.wait(60)
    assert isinstance(errors[0], IndexError)
    loop.close()


def test_call_from_many_threads() -> None:
    loop, seen = EventLoop("t"), list[int]()

    def call_often() -> None:
        for _ in range(500):
            loop.call(lambda: seen.append(1))

    threads = [threading.Thread(target=call_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.close()
    assert len(seen) == 4000


def test_pidfd(pipe: tuple[int, int]) -> None:
    child = os.fork()
    if child == 0:
        os.read(pipe[0], 1)
        os._exit(0)
    fd = readable_pidfd(child)
    loop, done = EventLoop("t"), threading.Event()

    def ended(events: int) -> None:
        loop.unwatch(fd)
        done.set()

    loop.call(lambda: loop.watch(fd, READ, ended))
    os.write(pipe[1], b"x")
    assert done.wait(60)
    os.waitpid(child, 0)
    assert readable_pidfd(child) == -1
    loop.close()
    os.close(fd)


def test_pending_calls_run_before_the_process_ends() -> None:
    """The loop is a daemon thread: without this the release of a view freed last would be lost."""
    program = (
        "import time\n"
        "from omni_kvlink.connectors.runtime import event_loop\n"
        "event_loop._AT_EXIT = 60\n"
        "loop = event_loop.EventLoop('t')\n"
        "loop.call(lambda: time.sleep(0.2))\n"
        "loop.call(lambda: print('done', flush=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_deferred_functions_take_turns_and_calls_come_before_them() -> None:
    loop, seen, done = EventLoop("t"), list[str](), threading.Event()

    def work(name: str, left: int) -> None:
        seen.append(name)
        loop.call(partial(seen.append, f"call of {name}"))
        if left:
            loop.defer(partial(work, name, left - 1))
        elif name == "b":
            done.set()

    first, second = (partial(loop.defer, partial(work, name, 1)) for name in "ab")
    loop.call(in_order(first, second))
    assert done.wait(60)
    loop.close()
    assert seen == ["a", "call of a", "b", "call of b"] * 2


def test_a_tick_and_descriptors_come_between_deferred_functions(pipe: tuple[int, int]) -> None:
    seen, done = list[str](), threading.Event()

    def tick(now: float) -> float:
        seen.append("tick")
        return float("inf")

    def work(left: int) -> None:
        seen.append("work")
        os.write(pipe[1], b"x")
        if left:
            loop.defer(partial(work, left - 1))
        else:
            done.set()

    def readable(events: int) -> None:
        os.read(pipe[0], 1)
        seen.append("read")

    loop = EventLoop("t", tick)
    loop.watch(pipe[0], READ, readable)
    loop.call(partial(loop.defer, partial(work, 2)))
    assert done.wait(60)
    loop.close()
    first = seen.index("work")
    assert seen[first : first + 7] == ["work", "tick", "read", "work", "tick", "read", "work"]


def test_paused_functions_wait_for_each_other_and_hold_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("omni_kvlink.connectors.runtime.event_loop._PAUSE", 3600.0)
    loop, seen, done = EventLoop("t"), list[str](), threading.Event()

    def work(left: int) -> None:
        loop.call(partial(seen.append, "call"))
        if left:
            loop.defer(partial(work, left - 1))
        else:
            done.set()

    for name in "ab":
        loop.call(partial(loop.defer, partial(seen.append, name), paused=True))
    loop.call(partial(work, 10))
    assert done.wait(60)
    loop.close()
    assert sorted(seen) == ["a", *["call"] * 11]


def test_a_sleeping_loop_wakes_for_a_paused_function() -> None:
    loop, done = EventLoop("t"), threading.Event()

    def work(left: int) -> None:
        if left:
            loop.defer(partial(work, left - 1), paused=True)
        else:
            done.set()

    loop.call(partial(work, 3))
    assert done.wait(60)
    loop.close()


def test_a_loop_rests_as_long_as_a_paused_function_took() -> None:
    """Others have the interpreter's lock meanwhile, however long such a function keeps it."""
    loop, times, done = EventLoop("t"), list[tuple[float, float]](), threading.Event()

    def work(left: int) -> None:
        began = time.monotonic()
        time.sleep(0.02)
        if left:
            loop.defer(partial(work, left - 1), paused=True)
        times.append((began, time.monotonic()))
        if not left:
            done.set()

    loop.call(partial(loop.defer, partial(work, 3), paused=True))
    assert done.wait(60)
    loop.close()
    for (began, ended), (next_began, _) in pairwise(times):
        assert next_began - ended >= ended - began


def test_a_rest_after_a_standstill_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped amid a paused function goes on soon."""
    monkeypatch.setattr("omni_kvlink.connectors.runtime.event_loop._LONGEST_REST", 0.0)
    loop, rests, done = EventLoop("t"), list[float](), threading.Event()

    def look() -> None:
        # Reaches into _paused_until: an upper bound of time would fail on a busy machine.
        rests.append(loop._paused_until - time.monotonic())
        done.set()

    def work() -> None:
        time.sleep(0.5)
        loop.call(look)  # in the next round

    loop.call(partial(loop.defer, work, paused=True))
    assert done.wait(60)
    loop.close()
    assert rests[0] <= 0.0


def test_the_end_comes_before_deferred_functions() -> None:
    """A loop with work that never ends does end, and leaves it."""
    loop, began = EventLoop("t"), threading.Event()

    def work() -> None:
        began.set()
        loop.defer(work)

    loop.call(work)
    assert began.wait(60)
    loop.close()
    # What is left would be a reference cycle: see `EventLoop._run`.
    assert not loop._deferred


def test_a_call_comes_before_the_rest_of_many_descriptors() -> None:
    """Of 200 descriptors that are ready at once, a round handles 64."""
    loop, held, go_on, seen = EventLoop("t"), threading.Event(), threading.Event(), list[str]()
    wakes = [os.eventfd(1) for _ in range(200)]
    done = threading.Event()

    def readable(wake: int, events: int) -> None:
        os.eventfd_read(wake)
        seen.append("read")
        if len(seen) == 1:
            loop.call(partial(seen.append, "call"))
        if len(seen) == 201:
            done.set()

    loop.call(in_order(held.set, partial(wait, go_on)))
    assert held.wait(60)
    for wake in wakes:
        loop.watch(wake, READ, partial(readable, wake))
    go_on.set()
    assert done.wait(60)
    loop.close()
    for wake in wakes:
        os.close(wake)
    assert seen.index("call") <= 64
