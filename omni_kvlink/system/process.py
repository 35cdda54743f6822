"""`OwnerProcess`: the process that opened an object; a fork of it must leave that object alone.

A forked child has none of its parent's threads, and any lock may be held in it for ever. One hook
runs in each child, before any other code: it marks the parent's `OwnerProcess` as another one, the
ends that are open as closed, and closes what may not be inherited. So an object that keeps
`current` asks with one attribute, and an end with the flag that it tests anyway. Neither takes a
lock: see docs/threads.md.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


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


current = OwnerProcess()
"""This process. Read it as `process.current`: a forked child replaces it."""
_inherited: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def call_in_children(owner: T, function: Callable[[T], object]) -> None:
    """Have `function(owner)` called in each child that this process forks while `owner` exists."""
    _inherited[owner] = function


def close_in_children(end: object) -> None:
    """Have `end._closed` set in each child that this process forks while `end` exists."""
    call_in_children(end, _mark_closed)


def _mark_closed(end: Any) -> None:
    end._closed = True


def _leave_parent() -> None:
    global current
    current.is_current = False
    current = OwnerProcess()
    with contextlib.ExitStack() as calls:  # makes all, also if one of them raises
        for owner, function in _inherited.items():
            calls.callback(function, owner)
    _inherited.clear()


os.register_at_fork(after_in_child=_leave_parent)
