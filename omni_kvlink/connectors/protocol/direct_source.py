"""A payload that is sent from its caller's memory: where its bytes lie, and who has them."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from omni_kvlink.connectors.protocol.fetch_plan import Spans
from omni_kvlink.errors import WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.header import ALIGN

_ZEROS = np.zeros(ALIGN, np.uint8)
_PADDING = Region(_ZEROS.ctypes.data, ALIGN, _ZEROS)


@dataclasses.dataclass
class _Part:
    """Bytes of the payload that lie in one place; no place, once a tensor is the caller's again."""

    start: int
    stop: int
    place: Region | None
    is_tensor: bool = False


class DirectSource:
    """The parts of one payload, and which of the caller's bytes each reader was sent.

    Args:
        head: memory of the header and, behind it, of its draft.
        header: bytes of the header.
        tensors: where each begins in the payload, and its memory; in the payload's order.
        nbytes: of the payload.
    """

    def __init__(
        self, head: Region, header: int, tensors: Sequence[tuple[int, Region]], nbytes: int
    ):
        self._parts = [_Part(0, header, head.slice(0, header))]
        for start, tensor in tensors:
            self._pad(start)
            if tensor.nbytes:
                self._parts.append(_Part(start, start + tensor.nbytes, tensor, True))
        draft = head.nbytes - header
        self._parts.append(_Part(nbytes, nbytes + draft, head.slice(header, draft)))
        self._nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self._sent: dict[Hashable, Spans] = {}
        self._left: dict[Hashable, int] = {}

    def find(self, start: int, stop: int) -> Region:
        """Where these bytes lie.

        Raises:
            WireError: in two places, nowhere, or in a tensor that is the caller's again.
        """
        part = self._at(start)
        place = part.place  # read once: another thread may give it back
        if place is None or not part.start <= start <= stop <= part.stop:
            raise WireError(f"bytes {start}…{stop} lie in no one place of this payload")
        return place.slice(start - part.start, stop - start)

    def took(self, claim: Hashable, start: int, stop: int) -> None:
        """These bytes, as `find` was asked for them, have left for a reader."""
        if self._at(start).is_tensor:
            sent = self._sent.setdefault(claim, Spans())
            new = sum(last - first for first, last in sent.gaps(start, stop))
            self._left[claim] = self._left.get(claim, self._nbytes) - new
            sent.add(start, stop)

    def has_all(self, claim: Hashable) -> bool:
        """Whether a reader was sent every byte of the tensors."""
        return not self._left.get(claim, self._nbytes)

    def give_back(self) -> None:
        """The tensors are the caller's again."""
        for part in self._parts:
            if part.is_tensor:
                part.place = None

    def _pad(self, stop: int) -> None:
        """The format allows no holes."""
        start = self._parts[-1].stop
        if start < stop:
            self._parts.append(_Part(start, stop, _PADDING.slice(0, stop - start)))

    def _at(self, start: int) -> _Part:
        at = bisect.bisect_right(self._parts, start, key=lambda part: part.start)
        return self._parts[max(0, at - 1)]
