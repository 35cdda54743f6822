"""Memory of the link that an engine writes its K and V to, so that `put` copies nothing."""

from __future__ import annotations

from omni_kvlink.errors import ClosedError
from omni_kvlink.link.received import Payload
from omni_kvlink.memory.region import Lease, Region
from omni_kvlink.payload.files import open_payload
from omni_kvlink.payload.manifest import Manifest


class Allocation:
    """Memory of the link for one payload, as tensors that the engine writes its K and V to.

    Attributes:
        data: writable tensors in the shape of the plan. Write to them until `put` and not after;
            the memory is not reused while one of them lives.
        room: the places of the tensors.
    """

    def __init__(
        self, capacity: Manifest, lease: Lease, region: Region, table: dict[str, Allocation]
    ):
        self.capacity, self._table = capacity, table
        self.data: Payload = open_payload(capacity, region)
        self._lease: Lease | None = lease
        table[self.request_id] = self

    @property
    def request_id(self) -> str:
        return self.capacity.request_id

    @property
    def is_spent(self) -> bool:
        """Whether it was put or released."""
        return self._lease is None

    def take(self) -> Lease:
        """The memory, for `put`; once. Whoever takes it closes `data` in the end.

        Raises:
            ClosedError: it was put or released before.
        """
        lease, self._lease = self._lease, None
        if lease is None:
            raise ClosedError(f"the memory of {self.request_id!r} was put or released already")
        if self._table.get(self.request_id) is self:
            del self._table[self.request_id]
        return lease

    def release(self) -> None:
        """Give the memory back unsent; after `put` this does nothing."""
        if self._lease is not None:
            self.take().release()
            self.data.close()

    def __repr__(self) -> str:
        return f"<Allocation {self.request_id!r}: {self.capacity.nbytes} bytes>"
