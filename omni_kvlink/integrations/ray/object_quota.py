"""`ObjectQuota`: the bytes of the objects that a process keeps, within its quota."""

from __future__ import annotations

import threading

from omni_kvlink.errors import CapacityError, format_seconds

OVERHEAD = 64 << 10
"""Bytes of an object beside its tensors: its header, and what alignment adds."""


class ObjectQuota:
    """The bytes of each object that is kept; thread-safe.

    A link evicts what it keeps when a put finds no memory. An object whose references are alive
    must not be evicted, so a put waits here until others are collected.
    """

    def __init__(self, quota: int):
        self._quota = quota
        self._sizes: dict[str, int] = {}
        self._freed = threading.Condition()

    def take(self, key: str, nbytes: int, *, timeout: float) -> None:
        """Count an object, when there is room for it; blocks for that, for `timeout` seconds.

        CapacityError if there is none. An object that is counted already is not counted again.
        """
        with self._freed:
            if key in self._sizes:
                return
            nbytes += OVERHEAD
            if self._freed.wait_for(lambda: nbytes <= self._free, timeout):
                self._sizes[key] = nbytes
                return
            free, count = self._free, len(self._sizes)
        raise CapacityError(
            f"object {key} of {nbytes} bytes: {count} objects with references leave {free} bytes "
            f"of quota={self._quota} after {format_seconds(timeout)}; drop references, or raise "
            "quota= of register()",
            requested=nbytes,
            free=free,
        )

    def free(self, key: str) -> None:
        """Count an object no more; does nothing if it is not counted."""
        with self._freed:
            if self._sizes.pop(key, None) is not None:
                self._freed.notify_all()

    @property
    def _free(self) -> int:
        return self._quota - sum(self._sizes.values())
