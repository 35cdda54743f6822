"""Small payloads, put together as bytes: they travel inside the messages that offer them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime import fault_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


def pack_inline(
    plan: Manifest, copier: Copier, ledger: Ledger, views: Sequence[TensorView]
) -> bytes:
    """Copy a small payload's tensors; return all of it, header included."""
    # Timed without `phase`, which costs a payload this small more than the copy.
    seconds, clock = ledger.seconds, time.perf_counter
    started = clock()
    if fault_points.enabled:
        fault_points.point("put.reserved")
    seconds["reserve"] = 0.0
    payload = copier.pack(views, plan)
    ledger.copies = int(plan.nbytes > plan.header_nbytes)
    if fault_points.enabled:
        fault_points.point("put.copied")
        fault_points.point("put.encoded")
    ledger.nbytes = plan.nbytes
    seconds["copy"] = clock() - started
    seconds["publish"] = 0.0
    return payload
