"""One payload on its way: its state, and who has it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Hashable

from .messages import Location

Peer = Hashable
Claim = tuple[Peer, int]
"""Who has or wants a payload: a peer, and the number it gave its want."""


class State(enum.Enum):
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
        return self in (State.RELEASED, State.FAILED, State.EXPIRED)


class Transfer:
    """One payload on its way; `(key, epoch)` never comes twice."""

    def __init__(self, key: str, epoch: int):
        self.key, self.epoch = key, epoch
        self.state = State.RESERVED
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
        self.block: object = None

    @property
    def is_offerable(self) -> bool:
        return self.unclaimed > 0 and self.state in (State.COMMITTED, State.LEASED)

    def is_for(self, streamed: bool) -> bool:
        """Whether a reader of this kind may have it now."""
        return self.is_offerable or (
            streamed and self.unclaimed > 0 and self.state is State.STREAMING
        )
