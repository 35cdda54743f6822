"""`ReceivedBatch`: payloads that were requested together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

from omni_kvlink.connectors.protocol.get_table import send_separately

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.get_table import Delivery
    from omni_kvlink.payload.bundle import Payload


class Releasable(Protocol):
    """A payload that arrived; see `Received`."""

    _delivery: Delivery

    @property
    def data(self) -> Payload:
        """Its tensors and metadata."""

    def release(self) -> None:
        """Release it as read."""

    def release_unread(self) -> None:
        """Release it so that another reader receives it."""


R = TypeVar("R", bound=Releasable)


class ReceivedBatch(Sequence[R]):
    """Payloads from `KVConsumer.get_many`, in the order of the request ids.

    `with` gives the list of their data, and releases all at the end. Each may also be released by
    itself.
    """

    def __init__(self, received: Sequence[R]):
        self._received = received

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[R]: ...
    def __getitem__(self, index: int | slice) -> R | Sequence[R]:
        return self._received[index]

    def __len__(self) -> int:
        return len(self._received)

    def release(self) -> None:
        """Release all payloads; tensors that are kept elsewhere keep their memory."""
        coalesce = self._received[0]._delivery.coalesce if self._received else send_separately
        coalesce(self._release)

    def release_unread(self) -> None:
        """Release payloads that were not used, so that other readers receive them."""
        for received in self._received:
            received.release_unread()

    def _release(self) -> None:
        for received in self._received:
            received.release()

    def __enter__(self) -> list[Payload]:
        return [received.data for received in self._received]

    def __exit__(self, *exception: object) -> None:
        self.release()
