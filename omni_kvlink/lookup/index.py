"""`PrefixIndex`: which of many token sequences begins most like another."""

from __future__ import annotations

from bisect import bisect_left

from omni_kvlink.lookup.tokens import common


class PrefixIndex:
    """Encoded token sequences in their order.

    What has most in common with a sequence is a neighbour of the place where it would stand.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, key: bytes) -> None:
        """A sequence that is not there yet."""
        self._keys.insert(bisect_left(self._keys, key), key)

    def remove(self, key: bytes) -> None:
        """A sequence that is there."""
        del self._keys[bisect_left(self._keys, key)]

    def longest(self, key: bytes) -> tuple[int, bytes]:
        """How many first tokens are alike, and in which sequence; of several the exact one first.

        Returns (0, b"") if none begins with the same token.
        """
        at = bisect_left(self._keys, key)
        best = (0, b"")
        for other in self._keys[at : at + 1] + self._keys[max(0, at - 1) : at]:
            alike = common(key, other)
            if alike > best[0]:
                best = (alike, other)
        return best

    def __len__(self) -> int:
        return len(self._keys)
