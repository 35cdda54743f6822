"""`DPRouter`: which data-parallel group paints a request."""

from __future__ import annotations

import threading


class DPRouter:
    """Requests by group; thread-safe.

    Args:
        count: of the groups.
    """

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._loads = [0] * count
        self._chosen: dict[str, int] = {}

    def choose(self, request_id: str) -> int:
        """The group of a request: the least loaded; asked again, the same."""
        with self._lock:
            if request_id not in self._chosen:
                group = self._loads.index(min(self._loads))
                self._loads[group] += 1
                self._chosen[request_id] = group
            return self._chosen[request_id]

    def find(self, request_id: str) -> int | None:
        """The group that was chosen for a request, if any was."""
        return self._chosen.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is done; unknown ones are left alone."""
        with self._lock:
            group = self._chosen.pop(request_id, None)
            if group is not None:
                self._loads[group] -= 1
