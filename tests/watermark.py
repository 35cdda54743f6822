"""How much memory a piece of work took at its peak; for scripts in processes of their own."""

from __future__ import annotations

from collections.abc import Callable


def status(field: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def taken(work: Callable[[], object]) -> int:
    """Bytes beyond those held before; what `work` returns counts, too."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts anew
    before = status("VmRSS")
    kept = work()
    peak = status("VmHWM") - before
    del kept
    return peak
