"""The position of a flipped bit, from the CRC-32C that was committed and the one that is there.

A CRC is linear over GF(2): the xor of two CRCs of equally many bytes depends on the bits alone in
which the bytes differ. For one bit it is POLYNOMIAL, shifted once for each bit behind it. Up to
2^31 - 1 bits no two positions have the same one, and a digest covers 2^23.
"""

from __future__ import annotations

import functools

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, the lowest bit first, as the CRC-32C has it."""
_STEP = 4096
_TOP = 1 << 31


def flipped_bit(actual: int, committed: int, nbytes: int) -> int | None:
    """The number of the bit that, flipped alone, makes one CRC of `nbytes` bytes the other.

    Bit 0 is the lowest one of byte 0. None if no single bit does.
    """
    syndrome, total = actual ^ committed, 8 * nbytes
    first, matrix = _first_shifts(), _back_shift()
    for shifted in range(0, total, _STEP):
        shifts = first.get(syndrome)
        if shifts is not None and shifted + shifts < total:
            return total - 1 - shifted - shifts
        syndrome = _apply(matrix, syndrome)
    return None


def _shift(crc: int) -> int:
    return crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)


def _shift_back(crc: int) -> int:
    return ((crc ^ _POLYNOMIAL) << 1 | 1) if crc & _TOP else crc << 1


@functools.cache
def _first_shifts() -> dict[int, int]:
    """The number of bits behind a flipped one, by its syndrome, for the first `_STEP`."""
    shifts, crc = dict[int, int](), _POLYNOMIAL
    for count in range(_STEP):
        shifts[crc] = count
        crc = _shift(crc)
    return shifts


@functools.cache
def _back_shift() -> tuple[int, ...]:
    """The matrix that takes `_STEP` shifts back: what becomes of each bit."""
    columns = [1 << bit for bit in range(32)]
    for _ in range(_STEP):
        columns = [_shift_back(column) for column in columns]
    return tuple(columns)


def _apply(columns: tuple[int, ...], crc: int) -> int:
    result = 0
    while crc:
        lowest = crc & -crc
        result ^= columns[lowest.bit_length() - 1]
        crc ^= lowest
    return result
