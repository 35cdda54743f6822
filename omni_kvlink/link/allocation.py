"""`Allocation`: memory of the link that an engine writes its tensors to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from omni_kvlink.errors import ClosedError, TransferFailed
from omni_kvlink.payload.bundle import open_payload

if TYPE_CHECKING:
    from omni_kvlink.memory.region import Lease, Region
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.manifest import Manifest


class AbortedAllocation:
    """The abort of a payload that memory was allocated for; it lives for as long as that memory."""

    def __init__(self, request_id: str, reason: str):
        self.request_id, self.reason = request_id, reason

    def error(self) -> TransferFailed:
        """Return the error that `put` of the payload raises."""
        message = f"payload {self.request_id!r} was aborted: {self.reason}; allocate it anew"
        return TransferFailed(message, key=self.request_id, reason=self.reason)


class Allocation:
    """Memory of the link for one payload, as tensors that the engine writes to.

    `data` has writable tensors in the shapes of the plan, `capacity`. Write to them until `put` and
    not after; the memory is not reused while one of them lives.
    """

    def __init__(
        self, capacity: Manifest, lease: Lease, region: Region, table: dict[str, Allocation]
    ):
        self.capacity, self._table = capacity, table
        self.data: Payload = open_payload(capacity, region)
        self._lease: Lease | None = lease
        self._span = weakref.ref(region.span)
        table[self.request_id] = self

    @property
    def request_id(self) -> str:
        """The request id that `put` must use."""
        return self.capacity.request_id

    @property
    def is_spent(self) -> bool:
        """Whether it was put or released."""
        return self._lease is None

    def take(self) -> Lease:
        """Hand the memory to `put`, once, else ClosedError. The caller closes `data`."""
        lease, self._lease = self._lease, None
        if lease is None:
            raise ClosedError(f"the memory of {self.request_id!r} was put or released already")
        if self._table.get(self.request_id) is self:
            del self._table[self.request_id]
        return lease

    def release(self) -> None:
        """Release the memory without sending it; after `put` this does nothing."""
        if self._lease is not None:
            self.take().release()
            self.data.close()

    def abort(self, reason: str) -> AbortedAllocation:
        """Spend the memory of a payload that was aborted, and return the mark of that."""
        mark, span = AbortedAllocation(self.request_id, reason), self._span()
        if span is not None:
            span.abort = mark  # type: ignore[attr-defined]
        self._table.pop(self.request_id, None)
        self._lease = None  # the abort released it
        return mark

    def __repr__(self) -> str:
        return f"<Allocation {self.request_id!r}: {self.capacity.nbytes} bytes>"
