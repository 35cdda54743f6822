"""Small payloads, put together as bytes: they travel inside the messages that offer them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.memory.region import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


def pack_inline(
    plan: Manifest, copier: Copier, ledger: Ledger, views: Sequence[TensorView]
) -> tuple[bytes, bytes]:
    """Copy a small payload's tensors; return its header, and all of it."""
    # Timed without `phase`, which costs a payload this small more than the copy.
    seconds, clock = ledger.seconds, time.perf_counter
    started = clock()
    scratch = Scratch.take(plan.nbytes, INLINE)
    if fault_points.enabled:
        fault_points.point("put.reserved")
    reserved = clock()
    seconds["reserve"] = reserved - started
    digests = copier.gather(views, plan, scratch.region)
    ledger.copies = int(plan.nbytes > plan.header_nbytes)
    if fault_points.enabled:
        fault_points.point("put.copied")
    copied = clock()
    seconds["copy"] = copied - reserved
    header = plan.encode(digests)
    payload = scratch.give_back(header, plan.nbytes)
    if fault_points.enabled:
        fault_points.point("put.encoded")
    ledger.nbytes = plan.nbytes
    seconds["publish"] = clock() - copied
    return header, payload
