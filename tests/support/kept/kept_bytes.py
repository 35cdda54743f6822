"""Kept bytes in shared memory of this process, harmed as a faulty machine would."""

from __future__ import annotations

import ctypes


def flip_kept(pattern: bytes) -> int:
    """Flip one bit in each place of the links' memory that begins with `pattern`; their number.

    In the producer's own mapping: the file is sealed against others.
    """
    flipped = 0
    with open("/proc/self/maps") as lines:
        mappings = [line.split(maxsplit=2)[:2] for line in lines if "memfd:kvlink" in line]
    for span, rights in mappings:
        if not rights.startswith("rw"):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        memory = (ctypes.c_ubyte * (end - start)).from_address(start)
        content = bytes(memory)
        at = content.find(pattern)
        while at >= 0:
            memory[at] ^= 1
            flipped += 1
            at = content.find(pattern, at + 1)
    return flipped
