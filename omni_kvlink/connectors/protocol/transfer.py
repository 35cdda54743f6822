"""One payload on its way: its state, and who has it."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Hashable

from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.messages import Location
from omni_kvlink.errors import TransferTimeout

Peer = Hashable
Claim = tuple[Peer, int]
"""Who has or wants a payload: a peer, and the number it gave its want."""


class TransferState(enum.Enum):
    """Where a transfer is; the last three are final."""

    RESERVED = "reserved"
    STREAMING = "streaming"
    COMMITTED = "committed"
    LEASED = "leased"
    RELEASED = "released"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self in (TransferState.RELEASED, TransferState.FAILED, TransferState.EXPIRED)


class Transfer:
    """One payload on its way; `(key, epoch)` never comes twice."""

    def __init__(self, key: str, epoch: int):
        self.key, self.epoch = key, epoch
        self.state = TransferState.RESERVED
        self.reason = ""
        self.location: Location | None = None
        self.draft = 0
        self.layers: list[tuple[int, tuple[bytes, ...]]] = []
        self.expires = float("inf")
        self.unclaimed = 0
        self.is_whole = False
        self.leases: set[Claim] = set()
        self.pins: set[Peer] = set()
        self.has_writer = True
        self.is_lent = False
        self.settled = threading.Event()
        self.direct: DirectSource | None = None
        self.taken = threading.Event()
        self.block: object = None

    @property
    def is_taken(self) -> bool:
        """Whether nobody needs the caller's own memory any more."""
        if self.direct is None:
            return True
        return not self.unclaimed and all(map(self.direct.has_all, self.leases))

    def settle(self) -> None:
        """It has ended: nobody waits for it, and what was its caller's is his again."""
        if self.direct is not None:
            self.direct.give_back()
        self.settled.set()
        self.taken.set()

    def await_taken(self, until: float) -> None:
        """Sleep until it may be so, or the transfer has ended.

        Raises:
            TransferTimeout: neither happened until then (`time.monotonic`).
        """
        left = max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))
        if not self.taken.wait(left):
            phase = f"{self.unclaimed} readers missing, {len(self.leases)} reading"
            raise TransferTimeout(
                f"payload {self.key!r} was given up: it is sent from its caller's tensors, and "
                f"not every reader took it in time ({phase})",
                key=self.key,
                phase=phase,
            )

    @property
    def is_offerable(self) -> bool:
        return self.unclaimed > 0 and self.state in (TransferState.COMMITTED, TransferState.LEASED)

    def is_for(self, streamed: bool) -> bool:
        """Whether a reader of this kind may have it now."""
        return self.is_offerable or (
            streamed and self.unclaimed > 0 and self.state is TransferState.STREAMING
        )
