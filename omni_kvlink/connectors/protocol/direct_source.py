"""The parts of a direct put in the caller's memory, and the bytes that each reader was sent."""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from omni_kvlink.connectors.protocol.fetch_plan import RangeSet
from omni_kvlink.errors import WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.format import ALIGN
from omni_kvlink.system.waits import LazyEvent

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_ZEROS = np.zeros(ALIGN, np.uint8)
_PADDING = Region(_ZEROS.ctypes.data, ALIGN, _ZEROS)


@dataclasses.dataclass
class _Part:
    """Consecutive bytes in one region; None after the caller has its tensors back."""

    start: int
    stop: int
    region: Region | None
    is_tensor: bool = False


class DirectSource:
    """The parts of one payload that is sent from its caller's tensors.

    `head` is the memory of the header (`header` bytes) and, behind it, of its draft; `tensors` say
    where each begins in the payload of `nbytes`, and its memory, in the payload's order.
    `all_sent` is set when no reader may need the tensors any more, or the transfer has ended.
    """

    def __init__(
        self, head: Region, header: int, tensors: Sequence[tuple[int, Region]], nbytes: int
    ):
        self.all_sent = LazyEvent()
        self._parts = [_Part(0, header, head.slice(0, header))]
        for start, tensor in tensors:
            gap = start - self._parts[-1].stop
            if gap > 0:  # the format has no gaps: these bytes are padding
                self._parts.append(_Part(start - gap, start, _PADDING.slice(0, gap)))
            if tensor.nbytes:
                self._parts.append(_Part(start, start + tensor.nbytes, tensor, True))
        draft = head.nbytes - header
        self._parts.append(_Part(nbytes, nbytes + draft, head.slice(header, draft)))
        self._nbytes = sum(tensor.nbytes for _, tensor in tensors)
        self._sent: dict[Hashable, RangeSet] = {}
        self._unsent_nbytes: dict[Hashable, int] = {}

    def find(self, start: int, stop: int) -> Region:
        """Return the memory of these bytes.

        Raises WireError if they lie in two parts or in none, or the caller has the tensor back.
        """
        part = self._part_at(start)
        region = part.region  # read once: another thread may clear it
        if region is None or not part.start <= start <= stop <= part.stop:
            raise WireError(f"bytes {start}…{stop} are not in one part of this payload")
        return region.slice(start - part.start, stop - start)

    def mark_sent(self, claim: Hashable, start: int, stop: int) -> None:
        """Record that bytes, as given to `find`, have been sent for a get."""
        if self._part_at(start).is_tensor:
            sent = self._sent.setdefault(claim, RangeSet())
            new = sum(last - first for first, last in sent.gaps(start, stop))
            self._unsent_nbytes[claim] = self._unsent_nbytes.get(claim, self._nbytes) - new
            sent.add(start, stop)

    def has_sent_all(self, claim: Hashable) -> bool:
        """Return whether every byte of the tensors has been sent for a get."""
        return not self._unsent_nbytes.get(claim, self._nbytes)

    def release_tensors(self) -> None:
        """Drop the references to the caller's tensors; they may be modified again."""
        for part in self._parts:
            if part.is_tensor:
                part.region = None

    def _part_at(self, start: int) -> _Part:
        index = bisect.bisect_right(self._parts, start, key=lambda part: part.start)
        return self._parts[max(0, index - 1)]
