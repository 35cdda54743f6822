"""`PendingBatch` and `ReceivedBatch`: payloads that were requested together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from omni_kvlink.connectors.protocol.delivery import send_separately
from omni_kvlink.errors import ClosedError, KVLinkError, SchemaError
from omni_kvlink.link.batch_copies import BatchCopies
from omni_kvlink.link.read_block import ReadBlock, ReceivedPayload
from omni_kvlink.system.waits import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.connectors.protocol.get_table import GetRequest
    from omni_kvlink.link.copy_into import Targets
    from omni_kvlink.payload.bundle import Payload

R = TypeVar("R", bound=ReceivedPayload)


class PendingBatch(Generic[R]):
    """Payloads that were requested together, from `KVConsumer.begin_get_many`.

    One that is dropped is cancelled.
    """

    def __init__(
        self,
        await_one: Callable[[GetRequest, PendingGet, Deadline], tuple[PendingGet, Delivery]],
        open_one: Callable[[Delivery], R],
        requests: Sequence[GetRequest],
        pending: list[PendingGet],
    ):
        self._await_one, self._open_one, self._requests = await_one, open_one, requests
        self._pending: list[PendingGet] | None = pending

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not block; true after its call, and after `cancel`."""
        return all(get.is_done for get in self._pending or ())

    def wait(self, *, timeout: float) -> ReceivedBatch[R]:
        """Wait for the payloads, and return them; blocks until all are here, and works once.

        Raises what `KVConsumer.get_many` raises, which calls it; ClosedError if it has been called,
        or the batch was cancelled.
        """
        deadline = Deadline(timeout)
        pending, self._pending = self._pending, None  # of two calls, one has them
        if pending is None:
            raise ClosedError("this batch was waited for, or cancelled; request it again")
        received: list[R] = []
        try:
            await_one, open_one = self._await_one, self._open_one
            for request, get in zip(self._requests, pending, strict=True):
                received.append(open_one(await_one(request, get, deadline)[1]))
            return ReceivedBatch(received)
        except BaseException:
            for payload in received:
                payload.release_unread()
            for get in pending[len(received) + 1 :]:
                get.cancel()
            pending.clear()  # the finalizers cancel those that another interrupt has left
            raise

    def cancel(self) -> None:
        """Withdraw the requests: others may have the payloads. A second call does nothing."""
        self._pending = None  # dropped gets cancel themselves

    def __repr__(self) -> str:
        pending = self._pending
        came = "ended" if pending is None else f"{sum(get.is_done for get in pending)} came"
        return f"<PendingBatch of {len(self._requests)} payloads, {came}>"


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
        self._coalesce(lambda received: received.release())

    def release_unread(self) -> None:
        """Release payloads that were not used, so that other readers receive them."""
        self._coalesce(lambda received: received.release_unread())

    def scatter(self, into: Sequence[Targets]) -> None:
        """Copy each payload out, as `Received.scatter` does, into the targets at its place.

        Blocks until all are copied. A second thread shares a large batch; see `BatchCopies`.

        Raises:
            SchemaError: `into` has not as many targets as there are payloads; nothing was written.
            KVLinkError: what `Received.scatter` raises, of the first payload that could not be
                copied; all others have been copied.
        """
        for error in self.scatter_each(into):
            if error is not None:
                raise error

    def scatter_each(self, into: Sequence[Targets]) -> list[KVLinkError | None]:
        """Do what `scatter` does, and return the error of each payload; None if it is copied."""
        if len(into) != len(self):
            raise SchemaError(f"{len(into)} targets for a batch of {len(self)} payloads")
        return BatchCopies(self._received, into).run()

    def _coalesce(self, end: Callable[[R], None]) -> None:
        def end_all() -> None:
            for received in self._received:
                end(received)

        coalesce = self._received[0]._delivery.coalesce if self._received else send_separately
        coalesce(end_all)

    def __enter__(self) -> list[Payload]:
        return [received._data for received in self._received]
