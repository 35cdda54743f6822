"""What every public call checks first: its timeout, and that the process opened the object."""

from __future__ import annotations

import os

from omni_kvlink.errors import ClosedError

MAX_TIMEOUT = 1e9
"""Seconds that every clock of the system accepts; a longer timeout is shortened to this one."""


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return a timeout that every clock accepts; infinity means no limit.

    Raises ValueError for a negative number, and for NaN, which no comparison would ever end.
    """
    if not seconds >= 0:
        raise ValueError(f"{name}={seconds}: seconds from 0 on; float('inf') for no limit")
    return min(seconds, MAX_TIMEOUT)


def check_process(pid: int, what: str) -> None:
    """Raise ClosedError if `what` was opened by another process: this one is a fork of it.

    Takes no lock: a thread of the parent may have held any lock at the fork.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"{what} belongs to process {pid}; after fork the child must open its own link, and "
            "for UCX be started by spawn instead"
        )
