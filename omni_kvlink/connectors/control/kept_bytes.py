"""The bytes that have come of a payload whose connection broke, for the get that repeats it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.memory.region import CallAtEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.fetch_plan import FetchPlan
    from omni_kvlink.memory.block import Block


class TransferIdentity(NamedTuple):
    """One transfer of one run of a producer: its committed bytes are always the same.

    A producer gives each transfer an epoch of its own, so that a payload which is put again under
    the same key has another one.
    """

    incarnation: str
    key: str
    epoch: int
    nbytes: int


class KeptBytes:
    """The block of a payload that was cut off, and which of its bytes are as they were sent.

    The get that failed owns it, then the get that requests the key again. If an offer to that one
    is of the same transfer, its `InboundTransfer` takes the block and fetches the rest. Else, or
    when the last of its owners is dropped, the block is freed. Bytes before `start`, the header,
    are fetched again: the digests in it judge those that were kept.

    Methods are for the loop's thread, `release` for any.
    """

    def __init__(
        self,
        identity: TransferIdentity,
        plan: FetchPlan[Any],
        start: int,
        block: Block,
        post_free: Callable[[list[Block]], None],
    ):
        self.identity, self.start = identity, start
        self._plan = plan
        self.blocks = [block]  # empty once it was taken or freed
        self.taken: Block | None = None
        self._finalizer = CallAtEnd.of(self, partial(post_free, self.blocks))

    def take(self) -> Block:
        """Return the block, which is the caller's from now on, and stays in `taken`."""
        self._finalizer.detach()
        self.taken = self.blocks.pop()
        return self.taken

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The ranges of the payload that are in the block."""
        return self._plan.parts(self.start, self.identity.nbytes)

    @property
    def requested_nbytes(self) -> int:
        """Bytes that were requested before the connection broke, and have come or were to come."""
        return self._plan.received_nbytes + self._plan.pending_nbytes

    def on_received(self, start: int, nbytes: int) -> None:
        """Record bytes that a transport has written to the block before it ended."""
        self._plan.on_received(start, nbytes)

    def release(self) -> None:
        """Free the block soon, unless it was taken; never blocks."""
        self._finalizer.run()
