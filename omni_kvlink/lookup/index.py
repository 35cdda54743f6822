"""`PrefixIndex`: finds the token sequence with the longest common prefix."""

from __future__ import annotations

from bisect import bisect_left

from omni_kvlink.lookup.tokens import common


class PrefixIndex:
    """Encoded token sequences in sorted order.

    The sequence with the longest common prefix is a neighbour of the insertion point.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []

    def add(self, key: bytes) -> None:
        """Add a sequence that is not in the index."""
        self._keys.insert(bisect_left(self._keys, key), key)

    def remove(self, key: bytes) -> None:
        """Remove a sequence that is in the index."""
        del self._keys[bisect_left(self._keys, key)]

    def longest(self, key: bytes) -> tuple[int, bytes]:
        """The length of the longest common prefix, and a sequence that has it.

        A sequence equal to `key` comes before a longer one. (0, b"") if none has the first token.
        """
        at = bisect_left(self._keys, key)
        best = (0, b"")
        for other in self._keys[at : at + 1] + self._keys[max(0, at - 1) : at]:
            shared = common(key, other)
            if shared > best[0]:
                best = (shared, other)
        return best

    def __len__(self) -> int:
        return len(self._keys)
