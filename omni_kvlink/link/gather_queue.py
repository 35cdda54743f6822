"""`GatherQueue`: waits for the copies of a stream's layers from a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from omni_kvlink.system.waits import MAX_TIMEOUT, Answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.copier import GatherHandle


class GatherQueue:
    """Waits in one thread for copies, in their order; there calls `on_gathered` for each."""

    def __init__(self, on_gathered: Callable[[range, list[str]], None]):
        self._on_gathered = on_gathered
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Answer[None]] = []

    def add(self, tensors: range, handle: GatherHandle) -> None:
        """Add a copy that was begun. Raises what an earlier one raised."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvlink-gather")
        while self._pending and self._pending[0].is_set():
            self._pending.pop(0).result()
        copied: Answer[None] = Answer()
        self._thread.submit(self._wait_for, tensors, handle, copied)
        self._pending.append(copied)

    def _wait_for(self, tensors: range, handle: GatherHandle, copied: Answer[None]) -> None:
        try:
            self._on_gathered(tensors, handle.wait())
        except Exception as error:
            copied.set_error(error)
        else:
            copied.set_result(None)

    def join(self) -> None:
        """Wait until all copies have ended and were reported. Raises what one of them raised."""
        pending = self._pending
        self.drain()
        for copied in pending:
            copied.result()

    def call_when_drained(self, function: Callable[[], None]) -> None:
        """Call this once no copy writes to the payload any more, in any thread; for finalizers.

        It takes no lock.
        """
        if self._pending:  # one thread does them in order
            self._pending[-1].add_done_callback(lambda _: function())
        else:
            function()

    def drain(self) -> None:
        """Wait until no copy writes to the payload any more; ignore errors."""
        for copied in self._pending:
            copied.wait(MAX_TIMEOUT)
        self._pending = []

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()  # raises nothing: the stream's end has an error of its own
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
