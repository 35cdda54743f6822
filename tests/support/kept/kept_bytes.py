"""Kept bytes in shared memory of this process, harmed as a faulty machine would."""

from __future__ import annotations

import mmap
import os


def flip_kept(pattern: bytes) -> int:
    """Flip one bit in each place of the links' memory that begins with `pattern`; their number."""
    places = 0
    for number in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{number}"
        try:
            if "memfd:kvlink" not in os.readlink(path):
                continue
            file = os.open(path, os.O_RDWR)
        except OSError:  # closed since, or of the listing itself
            continue
        try:
            with mmap.mmap(file, 0) as memory:
                at = memory.find(pattern)
                while at >= 0:
                    memory[at] ^= 1
                    places += 1
                    at = memory.find(pattern, at + 1)
        finally:
            os.close(file)
    return places
