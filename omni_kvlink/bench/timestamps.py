"""When a put passed the named points of the library's code."""

from __future__ import annotations

import time

from omni_kvlink.connectors.runtime import fault_points


class Timestamps:
    """Within the `with` block, `at[name]` is the monotonic nanosecond a point was last passed.

    The library has these points for its fault tests. They tell the moment of the commit, which
    lies inside `put` and therefore cannot be timed around a call.
    """

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self._before = fault_points.point

    def __enter__(self) -> Timestamps:
        self._before = fault_points.point
        fault_points.point = self._pass
        return self

    def __exit__(self, *exception: object) -> None:
        fault_points.point = self._before

    def _pass(self, name: str) -> None:
        self.at[name] = time.monotonic_ns()
        self._before(name)
