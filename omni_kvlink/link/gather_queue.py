"""`GatherQueue`: waits for the copies of a stream's layers from a device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.copier import GatherHandle


class GatherQueue:
    """Waits in one thread for copies, in their order; there calls `on_gathered` for each."""

    def __init__(self, on_gathered: Callable[[range, list[str]], None]):
        self._on_gathered = on_gathered
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def add(self, tensors: range, handle: GatherHandle) -> None:
        """Add a copy that was begun. Raises what an earlier one raised."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvlink-gather")
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        self._pending.append(self._thread.submit(lambda: self._on_gathered(tensors, handle.wait())))

    def join(self) -> None:
        """Wait until all copies have ended and were reported. Raises what one of them raised."""
        pending, self._pending = self._pending, []
        while pending:  # an error's traceback keeps this frame, which must not keep the error
            pending.pop(0).result()

    def call_when_drained(self, function: Callable[[], None]) -> None:
        """Call this once no copy writes to the payload any more, in any thread; for finalizers."""
        if self._pending:  # one thread does them in order
            self._pending[-1].add_done_callback(lambda _: function())
        else:
            function()

    def drain(self) -> None:
        """Wait until no copy writes to the payload any more; ignore errors."""
        wait(self._pending)  # raises nothing: the stream's end has an error of its own
        self._pending = []

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
