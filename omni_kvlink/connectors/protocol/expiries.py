"""`Expiries`: the committed transfers of a producer that have a time to live, by its end."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Transfer

MAX_EXPIRED = 64
"""Transfers that may have ended and are still scheduled; and those that one
`TransferTable.tick` expires at most."""
NEVER = float("inf")


class Expiries:
    """A heap of transfers by `Transfer.expires`; under the owner's lock.

    One that ends before its time stays until then, or until `add` finds too many of them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Transfer]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, transfer: Transfer, num_live: int) -> None:
        """Schedule a transfer, unless it is or never expires; `num_live` transfers are live."""
        if transfer.is_scheduled or transfer.expires == NEVER:
            return
        if len(self._heap) > 2 * num_live + MAX_EXPIRED:
            # Most have ended long before their time; they must not be kept until then.
            self._heap = [entry for entry in self._heap if not entry[2].state.is_final]
            heapq.heapify(self._heap)
        # First: after an interrupt it is there twice at most.
        heapq.heappush(self._heap, (transfer.expires, transfer.epoch, transfer))
        transfer.is_scheduled = True

    def next_time(self) -> float:
        """When the first is due, also of one that has ended: else each commit wakes the owner."""
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> Transfer:
        """Remove the first."""
        _, _, transfer = heapq.heappop(self._heap)
        transfer.is_scheduled = False
        return transfer
