"""`PooledKeptPayloads`: what a `PooledProducer` keeps, for the process that it is in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.connectors.base import KeptPayloads
from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.runtime.lent_payload import LentPayload
from omni_kvlink.memory.region import Region

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.connectors.protocol.transfer_table import TransferTable


class PooledKeptPayloads(KeptPayloads):
    """The kept payloads of a producer's table of transfers, reached under the producer's lock.

    `piece` returns bytes of a transfer, and `call` calls a function in the loop.
    """

    def __init__(
        self,
        transfers: TransferTable,
        lock: threading.Lock,
        piece: Callable[[Transfer, int, int], Region],
        call: Callable[[Callable[[], None]], None],
    ):
        self._transfers, self._lock = transfers, lock
        self._piece, self._call = piece, call

    def withdraw(self, key: str) -> bool:
        """End a payload."""
        with self._lock:
            return self._transfers.kept.withdraw(key)

    def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return whether each key is kept."""
        with self._lock:
            return self._transfers.kept.contains(keys, time.monotonic())

    def lend(self, key: str) -> Delivery | None:
        """Return a payload as a reader in this process has it."""
        with self._lock:
            transfer = self._transfers.kept.find(key)
            if transfer is None:
                return None
            assert transfer.location is not None
            region = self._piece(transfer, 0, transfer.location.nbytes)
            if transfer.inline:
                region = Region.copy_of(region.view())
            lease = LentPayload(self._transfers, self._lock, self._call, transfer)
            delivery = Delivery(key, region, lease)
            self._transfers.lend(transfer, lease.view)  # last: after an interrupt nothing was lent
        return delivery

    def fail_missing(self, key: str, reason: str) -> None:
        """Fail the gets that wait for a key, unless it has a payload."""
        with self._lock:
            self._transfers.fail_missing(key, reason)
