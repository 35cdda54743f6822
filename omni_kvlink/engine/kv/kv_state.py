"""`KVState`: the states of a request's KV, and which may follow which. `KVEntry`: one request's."""

from __future__ import annotations

import dataclasses
import enum
import math


class KVState(enum.Enum):
    """The state of a request's KV.

    ABSENT ── allocate ──► ALLOCATED ── prefetch ──► RECEIVING ──┬──► READY
       ▲                       │                         │       └──► FAILED
       └───────── free ────────┴─────────────────────────┴──────────────┘
    """

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


NEXT_STATES = {
    KVState.ABSENT: (),
    KVState.ALLOCATED: (KVState.RECEIVING, KVState.ABSENT),
    KVState.RECEIVING: (KVState.READY, KVState.FAILED, KVState.ABSENT),
    KVState.READY: (KVState.ABSENT,),
    KVState.FAILED: (KVState.ABSENT,),
}
"""The states that may follow each."""
COUNTERS = {KVState.READY: "received", KVState.FAILED: "failed", KVState.ABSENT: "freed"}
"""The counter of the KVs that came into a state."""


@dataclasses.dataclass(eq=False)
class KVEntry:
    """One request's KV; the KV manager's lock guards it."""

    request_id: str
    timeout: float
    started: float = 0.0  # monotonic
    deadline: float = math.inf  # monotonic; infinite unless the KV is awaited
    state: KVState = KVState.ALLOCATED
    error: Exception | None = None  # while FAILED, and of a receive that was freed
