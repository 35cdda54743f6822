from __future__ import annotations

import random

import pytest

from omni_kvlink._native.host import crc32c
from omni_kvlink.inspection.flipped_bit import flipped_bit
from omni_kvlink.payload.format import DIGEST_CHUNK


def flipped(data: bytes, *positions: int) -> bytes:
    harmed = bytearray(data)
    for position in positions:
        harmed[position // 8] ^= 1 << position % 8
    return bytes(harmed)


@pytest.mark.parametrize("nbytes", [1, 2, 511, 512, 513, 4096])
def test_each_bit_of_a_short_chunk_is_found(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    committed = crc32c(data)
    positions = range(8 * nbytes) if nbytes < 600 else range(0, 8 * nbytes, 97)
    for position in positions:
        assert flipped_bit(crc32c(flipped(data, position)), committed, nbytes) == position


@pytest.mark.parametrize("position", [0, 7, 8, 4095, 4096, 4_194_303, 8_388_600, 8_388_607])
def test_a_bit_of_a_whole_chunk_is_found(position: int) -> None:
    data = random.Random(1).randbytes(DIGEST_CHUNK)
    found = crc32c(flipped(data, position))
    assert flipped_bit(found, crc32c(data), DIGEST_CHUNK) == position


def test_two_flipped_bits_are_not_taken_for_one() -> None:
    data = random.Random(2).randbytes(1000)
    for second in range(1, 8000, 61):
        assert flipped_bit(crc32c(flipped(data, 0, second)), crc32c(data), 1000) is None


def test_equal_digests_have_no_flipped_bit() -> None:
    assert flipped_bit(7, 7, 1000) is None
