"""The flipped bit of a header whose own digest does not match."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from omni_kvlink._native.host import crc32c
from omni_kvlink.inspection.flipped_bit import flipped_bit
from omni_kvlink.payload.format import MAX_HEADER

if TYPE_CHECKING:
    import os

_DIGEST = re.compile(rb'header_crc32c\\":\\"([0-9a-f]{8})')


def header_fault(path: str | os.PathLike[str]) -> str:
    """The bit that makes the header of a file what its digest says, in words; "" if none does."""
    with open(path, "rb") as file:
        text = file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER))
    digest = _DIGEST.search(text)
    if digest is None:
        return ""
    start, stop = digest.span(1)
    actual = crc32c(text[:start] + b"0" * 8 + text[stop:])
    position = flipped_bit(actual, int(digest[1], 16), len(text))
    if position is None:
        return ""
    return (
        f"if one bit was flipped, it is bit {position % 8} of byte {8 + position // 8} of the file"
    )
