"""Layers on their way from a device: a thread announces each as it lands, in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from omni_kvlink.copier import GatherHandle


class GatherQueue:
    """What one stream has under way, so that its writer can go on computing.

    Args:
        landed: told the numbers of the tensors and their digests; in the thread.
    """

    def __init__(self, landed: Callable[[range, list[str]], None]):
        self._landed = landed
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []

    def add(self, tensors: range, landing: GatherHandle) -> None:
        """Raises what an earlier one raised."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvlink-landing")
        while self._under_way and self._under_way[0].done():
            self._under_way.pop(0).result()
        self._under_way.append(self._thread.submit(self._finish, tensors, landing))

    def join(self) -> None:
        """All have landed and were announced. Raises what one of them raised."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            future.result()

    def settle(self) -> None:
        """Nothing is written to the payload any more, however it ended. For finalizers too."""
        for future in self._under_way:
            with contextlib.suppress(Exception):  # who ends a stream has its own error
                future.result()
        self._under_way = []

    def close(self) -> None:
        """Settle, and end the thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _finish(self, tensors: range, landing: GatherHandle) -> None:
        self._landed(tensors, landing.wait())
