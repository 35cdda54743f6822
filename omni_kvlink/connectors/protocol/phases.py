"""Texts that tell a get which waits, or fails, about its payload."""

from __future__ import annotations

from omni_kvlink.connectors.protocol.transfer import TransferState

PHASES = {
    TransferState.RESERVED: "announced, the producer is still writing it",
    TransferState.STREAMING: "announced, the producer is still writing it",
    TransferState.COMMITTED: "announced, not fetched",
    TransferState.LEASED: (
        "announced, but every declared reader has it already: raise readers= of its put"
    ),
    TransferState.RELEASED: (
        "it was delivered to every declared reader and released: "
        "raise readers= of its put, or put it again"
    ),
    TransferState.WITHDRAWN: "it was kept, and its producer withdrew it",
    TransferState.EVICTED: (
        "it was kept, and evicted because memory was wanted: "
        "raise quota= of its producer, or put it again"
    ),
}
MISSING = "the producer has no such payload now"
LOADING = "not in memory, the producer loads it"
IS_APPEND_STREAM = "it is an append stream: use read_stream"
IS_PAYLOAD = "it is no append stream: use get"
