"""`DPRouter`: which data-parallel group runs a request."""

from __future__ import annotations

import threading


class DPRouter:
    """Assigns requests to as many data-parallel groups as `count`; thread-safe."""

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._loads = [0] * count
        self._groups: dict[str, int] = {}

    def assign(self, request_id: str) -> int:
        """The request's group; a new request is assigned to the least loaded one."""
        with self._lock:
            if request_id not in self._groups:
                group = self._loads.index(min(self._loads))
                self._loads[group] += 1
                self._groups[request_id] = group
            return self._groups[request_id]

    def find(self, request_id: str) -> int | None:
        """The request's group, or None if it has not been assigned."""
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended; unknown ones are ignored."""
        with self._lock:
            group = self._groups.pop(request_id, None)
            if group is not None:
                self._loads[group] -= 1
