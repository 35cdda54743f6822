"""`LentPayload`: a kept payload that its own producer reads."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.messages import Outcome
    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.connectors.protocol.transfer_table import TransferTable

T = TypeVar("T")


class LentPayload:
    """The lease of such a payload: until its end, the payload is in use, and is not evicted.

    A release in `coalesce` has its effect when that returns: the caller's next put may evict the
    payload. One by a finalizer has it later, in the loop that `call` runs functions in.

    Attributes:
        view: for `TransferTable.lend`.
    """

    def __init__(
        self,
        transfers: TransferTable,
        lock: threading.Lock,
        call: Callable[[Callable[[], None]], None],
        transfer: Transfer,
    ):
        self._transfers, self._lock, self._call = transfers, lock, call
        self._transfer, self._is_released = transfer, False
        self.view = object()  # not this object: after a close, that would be a reference cycle

    def path_name(self, *, is_copy: bool) -> str:
        """Return "inproc": producer and reader are one process."""
        return "inproc"

    def release(self, outcome: Outcome, reason: str) -> None:
        """End it; takes no lock."""
        if outcome == "rejected":
            self.reject(reason)
        self._is_released = True
        self._call(self._settle)

    def reject(self, reason: str) -> None:
        """Fail the payload for all; takes no lock."""
        self._call(partial(self._fail, reason))

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result; a release by it takes effect before this returns."""
        result = act()
        if self._is_released:
            self._settle()
        return result

    def _settle(self) -> None:
        with self._lock:
            if self.view in self._transfer.views:  # the first of the two calls ends it
                self._transfers.on_view_freed(self._transfer, self.view)

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._transfers.kept.find(self._transfer.key) is self._transfer:
                text = f"its producer found it damaged: {reason}"
                self._transfers.fail(self._transfer.key, text, "failed", time.monotonic())
