"""The machine that a result was measured on, and torch's threads on it."""

from __future__ import annotations

import contextlib
import os
import platform
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omni_kvlink._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator


def describe() -> dict[str, Any]:
    """CPU, cores, memory, kernel, versions and date, as JSON values."""
    return {
        "cpu_model": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages_shmem": _choice("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "omni_kvlink": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def one_line(machine: dict[str, Any]) -> str:
    """The machine in one line, for people."""
    gib = machine["memory_bytes"] / (1 << 30)
    return (
        f"{machine['cpu_model']}, {machine['cores']} cores, {gib:.0f} GiB, {machine['kernel']}, "
        f"torch {machine['torch']}"
    )


def load_line() -> tuple[str, str]:
    """The load of the machine, for people, and its label."""
    averages = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    return "load", f"of the machine, 1, 5, 15 min: {averages}"


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads within the `with` block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _field(path: str, name: str) -> str:
    """The value of the first line `name: value`; empty if there is none."""
    with contextlib.suppress(OSError), open(path) as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _choice(path: str) -> str:
    """The chosen value of a sysfs setting, which is the one in brackets."""
    try:
        with open(path) as file:
            return file.read().partition("[")[2].partition("]")[0] or "unknown"
    except OSError:
        return "unknown"
