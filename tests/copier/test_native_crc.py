"""CRC-32C: compiled, in numpy, and bit by bit are the same; the library checks its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kvlink._native import crc32c as fallback
from omni_kvlink._native import host
from omni_kvlink._native.crc32c import numpy_crc32c
from support.devices.native_plans import (
    FEATURES,
    NEEDS_LIBRARY,
    Locked,
    noise,
    using,
    without_library,
)
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = NEEDS_LIBRARY
MIB = 1 << 20
NOISE = noise(3 * MIB)


def crc_digest(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    return b"".join(
        numpy_crc32c(data[at : at + MIB]).to_bytes(4, "big") for at in range(0, len(data), MIB)
    )


def bit_by_bit(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize("crc32c", [host.crc32c, numpy_crc32c, fallback.crc32c])
def test_the_vectors_of_rfc_3720(crc32c: Callable[[bytes], int]) -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@settings(max_examples=EXAMPLES * 60, deadline=None)
@given(nbytes=st.integers(0, 9000), cut=st.integers(0, 9000))
def test_all_ways_are_the_same(nbytes: int, cut: int) -> None:
    data = NOISE[:nbytes].tobytes()
    expected = bit_by_bit(data)
    for crc32c in (host.crc32c, numpy_crc32c, fallback.crc32c):
        assert crc32c(data) == expected
        assert crc32c(memoryview(data)[cut:], crc32c(data[:cut])) == expected


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    without_library(monkeypatch)
    assert host.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("features", FEATURES)
@settings(max_examples=EXAMPLES * 150, deadline=None)
@given(
    start=st.integers(0, 5000),
    nbytes=st.integers(0, 700) | st.integers(MIB - 300, MIB + 300) | st.integers(0, 2 * MIB),
)
def test_equals_the_crc_in_numpy(features: str, start: int, nbytes: int) -> None:
    with using(features):
        batch = host.CopyBatch(NOISE.ctypes.data, NOISE.nbytes)
        batch.add(start, nbytes, digest=True)
        found = batch.digest()
        assert found == crc_digest(NOISE[start : start + nbytes])
        batch.verify(found)


@pytest.mark.parametrize("features", FEATURES)
@settings(max_examples=EXAMPLES * 100, deadline=None)
@given(
    source=st.integers(0, 130),
    target=st.integers(0, 130),
    nbytes=st.integers(1, 900) | st.integers(MIB - 70, MIB + 70) | st.integers(9000, 40000),
    stores=st.integers(0, 2),
)
def test_while_copying(features: str, source: int, target: int, nbytes: int, stores: int) -> None:
    """Any alignment of both sides, into memory whose next page is locked."""
    locked = Locked(target + nbytes)
    with using(features):
        batch = host.CopyBatch(locked.address, target + nbytes, stores=stores)
        view = host.packed_view(NOISE.ctypes.data, NOISE.nbytes, nbytes, offset=source)
        batch.add(target, nbytes, view, digest=True)
        source_bytes = NOISE[source : source + nbytes]
        assert batch.gather() == crc_digest(source_bytes)
        assert np.array_equal(locked.bytes[target:], source_bytes)
        assert not locked.bytes[:target].any()


@pytest.mark.parametrize("features", FEATURES)
def test_reads_nothing_beyond_a_source(features: str) -> None:
    """Short and strided pieces that end at a locked page."""
    target = np.zeros(200_000, np.uint8)
    with using(features):
        for rows, run in ((1, 1), (3, 67), (40, 300), (9, 4096), (5, 16384), (16, 12288)):
            locked = Locked(2 * rows * run - run)
            locked.bytes[:] = noise(locked.region.nbytes)
            batch = host.CopyBatch(target.ctypes.data, target.nbytes)
            view = host.packed_view(
                locked.address, locked.region.nbytes, run, sizes=(rows,), strides=(2 * run,)
            )
            batch.add(0, rows * run, view, digest=True)
            source_bytes = np.concatenate([locked.bytes[2 * i * run :][:run] for i in range(rows)])
            assert batch.gather() == crc_digest(source_bytes)
            assert np.array_equal(target[: rows * run], source_bytes)


@pytest.mark.parametrize("features", FEATURES)
def test_writes_nothing_beyond_a_target(features: str) -> None:
    """Rows that end at a locked page, and gaps between them that stay as they were."""
    with using(features):
        for rows, run in ((1, 1), (3, 67), (40, 300), (9, 4096), (5, 16384), (16, 12288)):
            for stores in (1, 2):
                locked = Locked(2 * rows * run - run)
                batch = host.CopyBatch(NOISE.ctypes.data, NOISE.nbytes, stores=stores)
                view = host.packed_view(
                    locked.address, locked.region.nbytes, run, sizes=(rows,), strides=(2 * run,)
                )
                batch.add(64, rows * run, view, digest=True)
                batch.scatter(crc_digest(NOISE[64 : 64 + rows * run]))
                source_bytes = np.zeros((rows, 2 * run), np.uint8)
                source_bytes[:, :run] = NOISE[64 : 64 + rows * run].reshape(rows, run)
                assert np.array_equal(
                    locked.bytes, source_bytes.reshape(-1)[: locked.region.nbytes]
                )


def test_refusals_reach_python() -> None:
    """The library checks again: nothing is written; the error says which copy and why."""
    payload, outside = np.zeros(1000, np.uint8), noise(1000)
    good = host.packed_view(outside.ctypes.data, 1000, 100)
    for start, view, why in (
        (950, good, "copy 1: a span of 100 bytes at 950 in a payload of 1000"),
        (50, good, "copy 1: a span at 50 after one that ends at 100"),
        (300, host.packed_view(outside.ctypes.data, 99, 100), "in memory of 99"),
        (300, host.packed_view(outside.ctypes.data, 1000, 99), "99 bytes for a span of 100"),
        (300, host.packed_view(0, 1000, 100), "without memory"),
    ):
        batch = host.CopyBatch(payload.ctypes.data, 1000)
        batch.add(0, 100, good, digest=True)
        batch.add(start, 100, view, digest=True)
        with pytest.raises(host.CopyFailed, match=why) as caught:
            batch.gather()
        assert caught.value.copy == 1
        assert not payload.any()
