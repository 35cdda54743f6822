"""Small payloads, put together as bytes: they travel inside the messages that offer them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime import fault_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.manifest import Layout, Manifest
    from omni_kvlink.payload.views import TensorView


def pack_inline(
    plan: Manifest, copier: Copier, ledger: Ledger, views: Sequence[TensorView]
) -> bytes:
    """Copy a small payload's tensors; return all of it, header included."""
    started = time.perf_counter()
    if fault_points.enabled:
        fault_points.point("put.reserved")
    payload = copier.pack(views, plan)
    _record(ledger, payload, int(plan.nbytes > plan.header_nbytes), started)
    return payload


def pack_known(
    data: Payload, layout: Layout, copier: Copier, ledger: Ledger, limit: int
) -> bytes | None:
    """Pack a payload of an earlier one's layout, without a manifest: that takes longest to make.

    Its tensors have fewer than `limit` bytes. None if the whole payload has more, or only
    `pack_inline` can pack it.
    """
    started = time.perf_counter()
    if fault_points.enabled:
        fault_points.point("put.reserved")
    payload = copier.pack_known(data.tensors(), layout, data.request_id)
    if payload is None or len(payload) > limit:
        return None
    _record(ledger, payload, int(layout.data_nbytes > 0), started)
    return payload


def _record(ledger: Ledger, payload: bytes, copies: int, started: float) -> None:
    # Timed without `phase`, which costs a payload this small more than the copy.
    ledger.nbytes, ledger.copies, seconds = len(payload), copies, ledger.seconds
    seconds["reserve"] = 0.0
    seconds["copy"] = time.perf_counter() - started
    seconds["publish"] = 0.0
    if fault_points.enabled:
        fault_points.point("put.copied")
        fault_points.point("put.encoded")
