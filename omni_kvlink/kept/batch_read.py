"""`BatchRead`: payloads that are looked for in one source after the other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from omni_kvlink.kept.source import REASONS
from omni_kvlink.link import Received

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.kept.local_source import LocalSource
    from omni_kvlink.kept.source import KeptSource, Reason

HERE = "here"
"""The kind of the source that is this process's own link."""


class BatchRead:
    """The payloads of some keys that were found so far, and why the others were not.

    Attributes:
        received: for each key the payload, or None.
        hits: numbers of payloads, by the kind of the source.
    """

    def __init__(self, keys: Sequence[str]):
        self._keys = keys
        self.received: list[Received | None] = [None] * len(keys)
        self.hits = Counter[str]()
        self._reasons: list[Reason] = ["absent"] * len(keys)

    def read_from(self, kind: str, source: LocalSource | KeptSource, *, timeout: float) -> None:
        """Read what is still missing from a source, in one message; blocks `timeout` s at most."""
        numbers = self._missing()
        keys = [self._keys[number] for number in numbers]
        for number, result in zip(numbers, source.read(keys, timeout=timeout), strict=True):
            if isinstance(result, Received):
                self.received[number] = result
                self.hits[kind] += 1
            else:
                self._reasons[number] = max(self._reasons[number], result, key=REASONS.index)

    def misses(self) -> Counter[str]:
        """Numbers of keys that were found nowhere, by the reason that says most."""
        return Counter(self._reasons[number] for number in self._missing())

    def release_unread(self) -> None:
        """Release what was received: the caller will not have it."""
        for payload in self.received:
            if payload is not None:
                payload.release_unread()

    def _missing(self) -> list[int]:
        return [number for number, payload in enumerate(self.received) if payload is None]
