"""Digests of bytes that arrive in pieces, in any order."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_kvlink import WireError
from omni_kvlink._native.crc32c import combine, numpy_crc32c
from omni_kvlink._native.host import crc32c
from omni_kvlink.connectors.protocol.fetch_plan import ArrivingDigests
from omni_kvlink.payload.digests import mismatch
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.payload.manifest import TensorSpec

DATA = 256
SIZES = (700, 0, DIGEST_CHUNK, 2 * DIGEST_CHUNK + 513, 1)


def layout() -> tuple[list[TensorSpec], int]:
    specs, at = list[TensorSpec](), 0
    for number, nbytes in enumerate(SIZES):
        specs.append(TensorSpec(f"kv.{number}.latent", "U8", (nbytes,), at, at + nbytes))
        at = -(-(at + nbytes) // 256) * 256
    return specs, DATA + specs[-1].stop


def digest(data: bytes | bytearray) -> bytes:
    chunks = (data[at : at + DIGEST_CHUNK] for at in range(0, len(data), DIGEST_CHUNK))
    return b"".join(crc32c(bytes(chunk)).to_bytes(4, "big") for chunk in chunks)


def test_the_crc_of_two_pieces() -> None:
    chance = random.Random(1)
    for nbytes in (0, 1, 7, 256, 1023, 1024, 70_001, DIGEST_CHUNK):
        first, second = chance.randbytes(777), chance.randbytes(nbytes)
        assert combine(crc32c(first), crc32c(second), nbytes) == crc32c(first + second)
        assert numpy_crc32c(first + second) == crc32c(first + second)


@pytest.mark.parametrize("seed", range(6))
def test_any_pieces_in_any_order(seed: int) -> None:
    """A chunk that is complete is compared once; the one with a wrong byte is found."""
    chance, (specs, nbytes) = random.Random(seed), layout()
    payload = bytearray(chance.randbytes(nbytes))
    digests = ArrivingDigests()
    for spec in chance.sample(specs, len(specs)):
        digests.expect(spec, digest(payload[DATA + spec.start : DATA + spec.stop]), DATA)
    wrong = DATA + specs[3].start + DIGEST_CHUNK + chance.randrange(DIGEST_CHUNK)
    payload[wrong] ^= 1 << seed
    cuts = sorted({0, nbytes, *(chance.randrange(nbytes) for _ in range(20))})
    spans = list(itertools.pairwise(cuts))
    chance.shuffle(spans)
    found = []
    for start, stop in spans:
        pieces = digests.split(start, stop)
        assert [pieces[0][0], *(piece[1] for piece in pieces)] == [
            *(piece[0] for piece in pieces),
            stop,
        ], "they follow each other"
        for first, last, chunk in pieces:
            if chunk is not None and chunk.is_wrong(
                first, last, crc32c(bytes(payload[first:last]))
            ):
                found.append(chunk)
    assert [(chunk.spec, chunk.number) for chunk in found] == [(specs[3], 1)]
    assert str(mismatch(found[0].spec, found[0].number)).startswith("branch 'kv', layer 3, latent")
    (chunk,) = found
    payload[wrong] ^= 1 << seed
    assert not chunk.is_wrong(
        chunk.start, chunk.stop, crc32c(bytes(payload[chunk.start : chunk.stop]))
    )


@given(st.integers(0, DATA + 4 * DIGEST_CHUNK), st.integers(1, 2 * DIGEST_CHUNK))
def test_pieces_lie_in_one_chunk_each(start: int, length: int) -> None:
    specs, _ = layout()
    digests = ArrivingDigests()
    for spec in specs:
        digests.expect(spec, digest(bytes(spec.nbytes)), DATA)
    for first, last, chunk in digests.split(start, start + length):
        assert first < last
        assert chunk is None or chunk.start <= first < last <= chunk.stop


def test_pieces_are_bounded() -> None:
    """A sender of single bytes with gaps between them cannot fill the memory."""
    spec = TensorSpec("kv.0.latent", "U8", (1000,), 0, 1000)
    digests = ArrivingDigests()
    digests.expect(spec, bytes(4), 0)
    ((_, _, chunk),) = digests.split(0, 1)
    assert chunk is not None
    for start in range(0, 2 * 64, 2):
        assert not chunk.is_wrong(start, start + 1, 0)
    with pytest.raises(WireError, match="pieces"):
        chunk.is_wrong(500, 501, 0)
