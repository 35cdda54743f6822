"""`GatherQueue`: device copies of one stream that run while the engine computes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.copier import GatherHandle


class GatherQueue:
    """Waits in one thread for copies, in the order of `add`, and reports each there.

    `on_gathered` is called with the numbers of the tensors and their digests.
    """

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
        self._pending.append(self._thread.submit(self._wait_for, tensors, handle))

    def join(self) -> None:
        """Wait until all copies have ended and were reported. Raises what one of them raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def drain(self) -> None:
        """Wait until no copy writes to the payload any more; ignore errors. For finalizers, too."""
        wait(self._pending)  # raises nothing: the stream's end has an error of its own
        self._pending = []

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _wait_for(self, tensors: range, handle: GatherHandle) -> None:
        self._on_gathered(tensors, handle.wait())
