"""Small payloads, put together as bytes: they travel inside the messages that offer them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime import fault_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.layouts import Layout
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


def pack_inline(plan: Manifest, copier: Copier, views: Sequence[TensorView]) -> bytes:
    """Copy a small payload's tensors; return all of it, header included."""
    if fault_points.enabled:
        fault_points.point("put.reserved")
    payload = copier.pack(views, plan)
    if fault_points.enabled:
        _pass_points()
    return payload


def pack_known(data: Payload, layout: Layout, copier: Copier, limit: int) -> bytes | None:
    """Pack a payload of an earlier one's layout, without a manifest: that takes longest to make.

    Its tensors have fewer than `limit` bytes. None if the whole payload has more, or only
    `pack_inline` can pack it.
    """
    if fault_points.enabled:
        fault_points.point("put.reserved")
    payload = copier.pack_known(data.tensors(), layout, data.request_id)
    if payload is None or len(payload) > limit:
        return None
    if fault_points.enabled:
        _pass_points()
    return payload


def record(
    ledger: Ledger, payload: bytes, data_nbytes: int, *, copy: float, publish: float = 0.0
) -> None:
    """Record what a payload with `data_nbytes` behind its header took; seconds of each phase."""
    ledger.nbytes, ledger.copies = len(payload), int(data_nbytes > 0)
    ledger.seconds |= {"reserve": 0.0, "copy": copy, "publish": publish}


def _pass_points() -> None:
    fault_points.point("put.copied")
    fault_points.point("put.encoded")
