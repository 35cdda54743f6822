"""Serves a link for `kvlink doctor URL`: one small payload and one large one, for all who ask."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec
import torch

from omni_kvlink import CapacityError, KVLink, TensorTransferData
from omni_kvlink.doctor.peer_identity import PeerIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL, BULK = "kvlink-doctor", "kvlink-doctor-bulk"
"""Names of the payloads."""
BULK_NBYTES = 64 << 20
_READERS, _TTL = 1 << 30, 1e9


def serve(url: str, announce: Callable[[str], None]) -> None:
    """Serve until KeyboardInterrupt; `announce` is called with the URL to connect to.

    The small payload's metadata are those of `PeerIdentity`. Where the quota has no room for the
    large one, a get of it fails with the reason. Raises as `KVLink.serve`.
    """
    metadata = msgspec.structs.asdict(PeerIdentity.of_process())
    small = TensorTransferData(SMALL, {"bytes": torch.zeros(1)}, metadata)
    with KVLink.serve(url) as producer:
        producer.put(small, readers=_READERS, ttl=_TTL)
        bulk = torch.arange(BULK_NBYTES, dtype=torch.uint8)
        try:
            data = TensorTransferData(BULK, {"bytes": bulk})
            producer.put(data, readers=_READERS, ttl=_TTL, timeout=0)
        except CapacityError as error:
            producer.fail(BULK, f"the quota is full: {error}; raise quota= of the producer")
        announce(producer.url)
        threading.Event().wait()
