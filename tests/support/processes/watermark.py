"""Peak memory of a function, for scripts that run in a process of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def status(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def taken(work: Callable[[], object]) -> int:
    """Return the peak of bytes beyond those used before; the result of `work` counts, too."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    kept = work()
    peak = status("VmHWM") - before
    del kept
    return peak
