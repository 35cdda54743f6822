"""`OwnerProcess`: the process that opened an object; a fork of it must leave that object alone.

A forked child has none of its parent's threads, and any lock may be held in it for ever. One hook
runs in each child, before any other code: it marks the parent's `OwnerProcess` as another one, and
the ends that are open as closed. So an object that keeps `current` asks with one attribute, and an
end with the flag that it tests anyway. Neither takes a lock: see docs/threads.md.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from omni_kvlink.errors import ClosedError


class OwnerProcess:
    """A process. `is_current` becomes False in its forked children."""

    __slots__ = ("is_current", "pid")

    def __init__(self) -> None:
        self.pid, self.is_current = os.getpid(), True

    def check(self, subject: str) -> None:
        """Raise ClosedError if this process is not the one that opened `subject`, but its fork."""
        if not self.is_current:
            raise ClosedError(
                f"{subject} belongs to process {self.pid}; after fork the child must open its own "
                "link, and for UCX be started by spawn instead"
            )


class OpenEnd(Protocol):
    """An end of a link, or another object that a forked child must find closed."""

    _closed: bool


current = OwnerProcess()
"""This process. Read it as `process.current`: a forked child replaces it."""
_open_ends: weakref.WeakSet[OpenEnd] = weakref.WeakSet()


def close_in_children(end: OpenEnd) -> None:
    """Have `end._closed` set in each child that this process forks while `end` exists."""
    _open_ends.add(end)


def _leave_parent() -> None:
    global current
    current.is_current = False
    current = OwnerProcess()
    for end in list(_open_ends):
        end._closed = True
    _open_ends.clear()


os.register_at_fork(after_in_child=_leave_parent)
