"""`ChunkFault`: a chunk of a tensor whose bytes are not the committed ones, and which they are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink._native.host import crc32c
from omni_kvlink.inspection.flipped_bit import flipped_bit
from omni_kvlink.inspection.payload_file import PayloadFile
from omni_kvlink.inspection.tensor_byte import TensorByte, rows_of
from omni_kvlink.payload.digests import chunks_of
from omni_kvlink.payload.format import DIGEST_CHUNK
from omni_kvlink.payload.header import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_LISTED = 256
"""Bytes that a document lists of a chunk."""


@dataclasses.dataclass(frozen=True)
class ChunkFault:
    """Bytes `start` to `stop` of a tensor, whose CRC-32C is `actual` and not `committed`."""

    file: PayloadFile
    spec: TensorSpec
    start: int
    stop: int
    actual: int
    committed: int

    def bit(self) -> tuple[TensorByte, int] | None:
        """The byte, and the bit in it, which explain the fault if it is one bit; else None."""
        position = flipped_bit(self.actual, self.committed, self.stop - self.start)
        if position is None:
            return None
        return TensorByte(self.spec, self.start + position // 8), position % 8

    def against(self, other: PayloadFile) -> list[int] | None:
        """The offsets in the tensor of the bytes that differ from those in another file.

        None if it has no such tensor, or its chunk is not the one that was committed here.
        """
        theirs = other.tensor(self.spec.name)
        if theirs is None or (theirs.dtype, theirs.shape) != (self.spec.dtype, self.spec.shape):
            return None
        right = other.bytes_of(theirs)[self.start : self.stop]
        if crc32c(right) != self.committed:
            return None
        pairs = zip(self.file.bytes_of(self.spec)[self.start : self.stop], right, strict=True)
        return [self.start + number for number, (a, b) in enumerate(pairs) if a != b]

    def text(self) -> list[str]:
        """The fault in words, a line each."""
        rows = rows_of(self.spec, self.start, self.stop)
        lines = [
            f"{self.spec.where()}: {rows}, bytes {self.start} to {self.stop - 1} of the tensor: "
            f"CRC-32C {self.actual:08x}, committed {self.committed:08x}"
        ]
        bit = self.bit()
        if bit is None:
            lines.append("more than one bit was changed")
        else:
            byte, number = bit
            lines.append(
                f"if one bit was flipped, it is bit {number} of byte {byte.offset}: "
                f"{byte.element()}; byte {self.file.offset_of(byte)} of the file"
            )
        return lines

    def text_against(self, other: PayloadFile) -> str:
        """The difference from another file, in words."""
        differing = self.against(other)
        if differing is None:
            return f"{other.path} does not have the bytes that were committed here"
        first, count = TensorByte(self.spec, differing[0]), len(differing)
        ours, right = (file.bytes_of(self.spec)[first.offset] for file in (self.file, other))
        return (
            f"{count} byte{'s differ' if count > 1 else ' differs'} from {other.path}, the first "
            f"is byte {first.offset}: {first.element()}; byte {self.file.offset_of(first)} of the "
            f"file: {ours:#04x} here, {right:#04x} there"
        )

    def to_dict(self, other: PayloadFile | None) -> dict[str, Any]:
        """All of it as JSON values: of the bytes that differ the first `_MOST_LISTED`, and a count.

        Both are None without a file that has the right bytes.
        """
        bit, differing = self.bit(), None if other is None else self.against(other)
        return {
            "tensor": self.spec.name,
            "start": self.start,
            "stop": self.stop,
            "found": f"{self.actual:08x}",
            "committed": f"{self.committed:08x}",
            "one_bit": bit
            and {
                **bit[0].to_dict(),
                "bit": bit[1],
                "file_offset": self.file.offset_of(bit[0]),
            },
            "differing_bytes": differing and len(differing),
            "differing": differing
            and [TensorByte(self.spec, offset).to_dict() for offset in differing[:_MOST_LISTED]],
        }


def faults_of(file: PayloadFile, spec: TensorSpec) -> Iterator[ChunkFault]:
    """The faults of a tensor; none if it has no digests."""
    data = file.bytes_of(spec)
    for number, committed in enumerate(chunks_of(spec.digest)):
        start = number * DIGEST_CHUNK
        stop = min(start + DIGEST_CHUNK, len(data))
        actual = crc32c(data[start:stop])
        if actual != committed:
            yield ChunkFault(file, spec, start, stop, actual, committed)
