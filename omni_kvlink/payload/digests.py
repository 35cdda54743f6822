"""CRC-32C digests of a payload's tensors, one for each started MiB."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink._native.crc32c import combine
from omni_kvlink._native.host import crc32c
from omni_kvlink.errors import IntegrityError, WireError
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.system.deadline import NEVER, check_deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest, TensorSpec


_MAX_PIECES = 64
"""Pieces of one MiB that do not touch each other; a sender that goes in order makes two."""


class ChunkDigest:
    """The digests of a tensor's bytes in the payload, computed while they are being written.

    `crcs` are the CRC-32C of each chunk so far.
    """

    def __init__(self, data: memoryview):
        self._data, self._done = data, 0
        self.crcs: list[int] = []

    def advance(self, upto: int, deadline: float = NEVER) -> None:
        """Hash the chunks that are complete, now that the first `upto` bytes are final.

        TransferTimeout if the deadline (`time.monotonic`) passes before.
        """
        while upto - self._done >= DIGEST_CHUNK or upto == len(self._data) > self._done:
            stop = min(self._done + DIGEST_CHUNK, upto)
            self.crcs.append(crc32c(self._data[self._done : stop]))
            self._done = stop
            check_deadline(deadline, "computing its digests")

    def text(self) -> str:
        """The digests as `TensorSpec.digest` holds them: eight hexadecimal digits a chunk."""
        return "".join(f"{crc:08x}" for crc in self.crcs)


class ArrivingChunk:
    """Bytes `start` to `stop` of a payload, which have a digest of their own, and arrive in pieces.

    They are chunk `number` of tensor `spec`. `is_again` is for the owner: they were fetched twice.
    """

    __slots__ = ("_committed", "_pieces", "is_again", "number", "spec", "start", "stop")

    def __init__(self, spec: TensorSpec, number: int, data: int, committed: int):
        self.spec, self.number, self._committed = spec, number, committed
        self.start = data + spec.start + number * DIGEST_CHUNK
        self.stop = min(self.start + DIGEST_CHUNK, data + spec.stop)
        self._pieces: list[tuple[int, int, int]] = []
        self.is_again = False

    def is_wrong(self, start: int, stop: int, crc: int) -> bool:
        """Record a piece and its CRC-32C; return whether the chunk is whole, and not as committed.

        No byte may be in two pieces; after a wrong chunk, all of it is expected again. WireError
        if it arrives in too many pieces.
        """
        at = bisect.bisect_left(self._pieces, (start, stop, crc))
        self._pieces.insert(at, (start, stop, crc))
        for left in (at, at - 1):  # join it with its neighbours
            pair = self._pieces[max(0, left) : left + 2]
            if len(pair) == 2 and pair[0][1] == pair[1][0]:
                (start, _, first), (middle, stop, second) = pair
                joined = start, stop, combine(first, second, stop - middle)
                self._pieces[left : left + 2] = [joined]
        if len(self._pieces) > _MAX_PIECES:
            raise WireError(f"{self.spec.where()} arrives in more than {_MAX_PIECES} pieces")
        if self._pieces[0][:2] != (self.start, self.stop):
            return False
        (_, _, found) = self._pieces.pop()
        return found != self._committed


Piece: TypeAlias = "tuple[int, int, ArrivingChunk | None]"
"""Bytes of a payload from a start to a stop, and the chunk that they are a part of, if any."""


class ArrivingDigests:
    """The chunks of a payload that arrives in pieces, in any order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._chunks: list[ArrivingChunk] = []

    def expect(self, spec: TensorSpec, digest: bytes, data: int) -> None:
        """Take the digest of a tensor, as messages carry it; `data` is where the tensors begin."""
        for number in range(len(digest) // 4):
            committed = int.from_bytes(digest[4 * number : 4 * number + 4], "big")
            chunk = ArrivingChunk(spec, number, data, committed)
            at = bisect.bisect_left(self._starts, chunk.start)
            self._starts.insert(at, chunk.start)
            self._chunks.insert(at, chunk)

    def split(self, start: int, stop: int) -> list[Piece]:
        """Divide bytes into pieces that lie in one chunk each, or in none."""
        pieces, at = list[Piece](), start
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for chunk in self._chunks[first : bisect.bisect_left(self._starts, stop)]:
            if chunk.stop <= at:
                continue
            if chunk.start > at:
                pieces.append((at, chunk.start, None))
                at = chunk.start
            pieces.append((at, min(stop, chunk.stop), chunk))
            at = min(stop, chunk.stop)
        return [*pieces, (at, stop, None)] if at < stop else pieces


def tensor_digest(
    manifest: Manifest, region: Region, spec: TensorSpec, deadline: float = NEVER
) -> ChunkDigest:
    """The digests of a tensor that is in the payload; none where the manifest has none for it.

    TransferTimeout if the deadline (`time.monotonic`) passes before.
    """
    start = manifest.header_nbytes + spec.start
    digest = ChunkDigest(region.view(start, start + spec.nbytes))
    if spec.digest:
        digest.advance(spec.nbytes, deadline)
    return digest


def verify(manifest: Manifest, region: Region) -> None:
    """Check every digest of a payload; IntegrityError names the tensor and the first MiB."""
    for spec in manifest.tensors:
        if spec.digest:
            compare(spec, tensor_digest(manifest, region, spec).crcs)


def chunks_of(text: str) -> list[int]:
    """The CRC-32C of each chunk, from digests as `TensorSpec.digest` holds them."""
    return [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]


def compare(spec: TensorSpec, found: Sequence[int]) -> None:
    """Raise `mismatch` for the first chunk whose digest is not the committed one."""
    for chunk, (committed, crc) in enumerate(zip(chunks_of(spec.digest), found, strict=True)):
        if committed != crc:
            raise mismatch(spec, chunk)


def mismatch(spec: TensorSpec, chunk: int) -> IntegrityError:
    """The error for a chunk whose digest is not the committed one; names tensor and MiB."""
    return IntegrityError(
        f"{spec.where()}: the bytes from {chunk * DIGEST_CHUNK} on are not those committed "
        f"(MiB {chunk} of {len(spec.digest) // 8})"
    )
