"""`ReadBlock`: how a reader copies out what it holds of a payload, and gives it back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.errors import WireError, without_frames
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.transfer import Ledger
    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.bundle import Payload

T = TypeVar("T")


class ReadBlock:
    """Base of what a reader holds of a payload, which the end of its `with` block releases.

    A block that ends normally releases it as read if the reader has taken it to its end. Else, and
    whenever an exception leaves the block, it is released unread: another reader receives it, or
    its receipt says that nobody did. `release` and `release_unread` decide before; the first call
    counts.
    """

    @property
    def _is_taken(self) -> bool:
        """Whether the reader has taken it to its end; one that came whole, it has."""
        return True

    def release(self) -> None:
        """Release it as read."""
        raise NotImplementedError

    def release_unread(self) -> None:
        """Release it so that another reader receives it."""
        raise NotImplementedError

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None and self._is_taken:
            self.release()
        else:
            self.release_unread()


class ReceivedPayload(ReadBlock):
    """Base of a payload that arrived, or a chunk of one; see `Received`."""

    _delivery: Delivery
    _data: Payload

    def scatter(self, into: Any) -> None:
        """Copy it out; see `Received.scatter`."""
        raise NotImplementedError


def scatter_delivery(
    copier: Copier,
    delivery: Delivery,
    ledger: Ledger,
    copy: Callable[[Region], T],
    first: str = "",
) -> T:
    """Copy tensors of a delivery out; a wrong byte is reported to the producer, too.

    `first` names the first tensor, if they are one layer; for observers.
    """
    started = time.perf_counter()
    try:
        result = copy(delivery.open_region())
    except WireError as error:
        delivery.reject(str(error))
        observers.copied(delivery, "scatter", started, error, first)
        raise without_frames(error) from None
    ledger.copies = delivery.copies + 1
    ledger.copier, ledger.instructions = copier.name, copier.features
    spent = ledger.seconds.get("scatter", 0.0)
    ledger.seconds["scatter"] = spent + time.perf_counter() - started
    if observers.registered:
        observers.copied(delivery, "scatter", started, None, first)
    return result
