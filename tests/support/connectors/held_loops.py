"""Event loops of the package, held up by a test; which of them sleep, and who receives instead."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.runtime import event_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.connectors.runtime.event_loop import EventLoop

# Reaches into _calls, _leader, _loop, _loops, _sleeping, _thread: which thread receives, and which
# one sleeps, is not public: only a test that sets up the order of two events has to know.

PATIENCE = 60.0


@contextlib.contextmanager
def paused(loop: EventLoop) -> Iterator[None]:
    """Hold the loop within a call until the block ends."""
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(PATIENCE)

    loop.call(hold)
    assert began.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()


def loop_of(owner: Any) -> EventLoop:
    """Return the loop of a session, or of a consumer that has one for all its sessions."""
    loop: EventLoop = owner._loop
    return loop


def is_asleep(loop: EventLoop) -> bool:
    """Return whether the loop's thread has nothing to do, and waits in epoll or is about to."""
    return loop._sleeping != 0


def num_calls(loop: EventLoop) -> int:
    """Return how many calls wait for the loop's thread."""
    return len(loop._calls)


def live_loops() -> list[EventLoop]:
    """Return the loops of this process whose threads run."""
    return [loop for loop in event_loop._loops if loop._thread.is_alive()]


def leader_of(session: Any) -> int:
    """Return the thread that receives while it waits for an answer; 0: the loop receives."""
    leader: int = session._leader
    return leader
