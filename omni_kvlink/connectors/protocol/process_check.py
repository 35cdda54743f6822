"""`check_process`: refuses, in a forked child, an object that its parent opened."""

from __future__ import annotations

import os

from omni_kvlink.errors import ClosedError


def check_process(pid: int, what: str) -> None:
    """Raise ClosedError if `what` was opened by another process: this one is a fork of it.

    Takes no lock: see docs/threads.md.
    """
    if os.getpid() != pid:
        raise ClosedError(
            f"{what} belongs to process {pid}; after fork the child must open its own link, and "
            "for UCX be started by spawn instead"
        )
