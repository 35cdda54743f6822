"""Copying the tensors of a delivery out, each byte checked in the same pass."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from omni_kvlink.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Region

T = TypeVar("T")


def scatter_delivery(
    copier: Copier, delivery: Delivery, ledger: Ledger, copy: Callable[[Region], T]
) -> T:
    """Copy tensors of a delivery out; a wrong byte is reported to the producer, too."""
    started = time.perf_counter()
    try:
        result = copy(delivery.open_region())
    except WireError as error:
        delivery.reject(str(error))
        # Its frames, and those of its traceback, keep the payload's memory.
        error.__context__ = None
        raise error.with_traceback(None) from None
    ledger.copies = delivery.copies + 1
    ledger.copier, ledger.instructions = copier.name, copier.features
    spent = ledger.seconds.get("scatter", 0.0)
    ledger.seconds["scatter"] = spent + time.perf_counter() - started
    return result
