"""`ReceivedBatch`: payloads that were requested together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

from omni_kvlink.connectors.protocol.delivery import send_separately
from omni_kvlink.link.read_block import ReadBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.payload.bundle import Payload


class Releasable(Protocol):
    """A payload that arrived; see `Received`."""

    _delivery: Delivery

    @property
    def _data(self) -> Payload:
        """Its tensors and metadata, without counting it as read."""

    def release(self) -> None:
        """Release it as read."""

    def release_unread(self) -> None:
        """Release it so that another reader receives it."""


R = TypeVar("R", bound=Releasable)


class ReceivedBatch(ReadBlock, Sequence[R]):
    """Payloads from `KVConsumer.get_many`, in the order of the request ids.

    `with` gives the list of their data, and releases all at the end; after an exception unread, so
    that other readers receive them. Each may also be released by itself before.
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

    def __repr__(self) -> str:
        return f"<ReceivedBatch of {len(self)} payloads>"

    def release(self) -> None:
        """Release all payloads as read; tensors that are kept elsewhere keep their memory."""
        self._coalesce(self._release)

    def release_unread(self) -> None:
        """Release payloads that were not used, so that other readers receive them."""
        self._coalesce(self._release_unread)

    def _coalesce(self, act: Callable[[], None]) -> None:
        coalesce = self._received[0]._delivery.coalesce if self._received else send_separately
        coalesce(act)

    def _release_unread(self) -> None:
        for received in self._received:
            received.release_unread()

    def _release(self) -> None:
        for received in self._received:
            received.release()

    def __enter__(self) -> list[Payload]:
        return [received._data for received in self._received]
