"""`freeze` stops another process, for tests of peers that do not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from omni_kvlink.testing.rig import until


def freeze(pid: int) -> None:
    """Stop a process; when this returns, each of its threads has stopped.

    SIGSTOP alone does not suffice: until the kernel has scheduled the thread that receives it,
    the other threads go on.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()), f"{pid} has stopped")


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return "T"
