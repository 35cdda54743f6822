"""CRC-32C without the compiled library: by google-crc32c if it is installed, else by numpy.

numpy's way hashes some 150 MB/s; `pip install 'omni-kvlink[crc]'` hashes at memory speed.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np

try:
    from google_crc32c import extend
except ImportError:
    extend = None

Bytes: TypeAlias = bytes | memoryview | np.ndarray[tuple[int], np.dtype[np.uint8]]
Registers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reflected; RFC 3720, section 12.1
_LANE = 1024
"""Bytes of a lane; all lanes advance together, four bytes at a time."""


def crc32c(data: Bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continued from that of the bytes before it."""
    return numpy_crc32c(data, crc) if extend is None else int(extend(crc, bytes(data)))


def numpy_crc32c(data: Bytes, crc: int = 0) -> int:
    """`crc32c` in numpy."""
    view, register = np.frombuffer(data, np.uint8), ~crc & 0xFFFFFFFF
    lanes = len(view) // _LANE
    if lanes:
        register = _join(_lanes(view[: lanes * _LANE].reshape(lanes, _LANE), register))
    table = _tables()[0].tolist()
    for byte in view[lanes * _LANE :].tolist():
        register = register >> 8 ^ table[(register ^ byte) & 255]
    return ~register & 0xFFFFFFFF


def combine(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32C of two pieces in a row, from the one of each; the second has `nbytes`."""
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            first = _apply(_shift(bit), first)
    return first ^ second


def _lanes(data: np.ndarray[tuple[int, int], np.dtype[np.uint8]], first: int) -> Registers:
    """The register after each lane: the first one begins with `first`, the others with 0."""
    t0, t1, t2, t3 = _tables()
    registers = np.zeros(len(data), np.uint32)
    registers[0] = first
    for column in np.ascontiguousarray(data.view("<u4").T):
        mixed = registers ^ column
        registers = t3[mixed & 255] ^ t2[mixed >> 8 & 255] ^ t1[mixed >> 16 & 255] ^ t0[mixed >> 24]
    return registers


def _join(registers: Registers) -> int:
    """The register after all lanes: pairs of neighbours are joined until one is left."""
    level = 0
    while len(registers) > 1:
        if len(registers) % 2:  # a lane of zeros in front changes nothing
            registers = np.concatenate((np.zeros(1, np.uint32), registers))
        left, right = registers[::2], registers[1::2]
        for bit, column in enumerate(_shift(_LANE.bit_length() - 1 + level)):
            right = right ^ (left >> np.uint32(bit) & np.uint32(1)) * np.uint32(column)
        registers, level = right, level + 1
    return int(registers[0])


@functools.cache
def _tables() -> list[Registers]:
    """Table k: the register after each byte and k zero bytes."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = table >> np.uint32(1) ^ (table & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    tables = [table]
    for _ in range(3):
        tables.append(tables[-1] >> np.uint32(8) ^ table[tables[-1] & 255])
    return tables


@functools.cache
def _shift(power: int) -> list[int]:
    """The register that each bit becomes after `1 << power` zero bytes."""
    if power:
        half = _shift(power - 1)
        return [_apply(half, column) for column in half]
    table = _tables()[0].tolist()
    return [1 << bit >> 8 ^ table[1 << bit & 255] for bit in range(32)]


def _apply(columns: list[int], register: int) -> int:
    product = 0
    for bit, column in enumerate(columns):
        if register >> bit & 1:
            product ^= column
    return product
