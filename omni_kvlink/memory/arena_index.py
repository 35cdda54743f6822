"""`ArenaIndex`: which arena of a pool has room for a block, without a look at each."""

from __future__ import annotations

from bisect import bisect_left

_NUMBER_BITS = 63
_NUMBERS = (1 << _NUMBER_BITS) - 1


class ArenaIndex:
    """The arenas of a pool by their largest hole, and those without a block.

    To set and to find is logarithmic in their number; a `set` that an interrupt cuts is repeated.
    """

    def __init__(self) -> None:
        self.empty: dict[int, int] = {}
        """The bytes of each arena that has no block, by its number."""
        self._holes: dict[int, int] = {}
        # Sorted by the largest hole, then by the arena's number, each as one number.
        self._by_hole: list[int] = []

    def set(self, number: int, hole: int, empty: int) -> None:
        """An arena's largest hole, and its bytes if it has no block; 0 for neither."""
        by_hole, former = self._by_hole, self._holes.get(number, 0)
        if former != hole:
            key = former << _NUMBER_BITS | number
            position = bisect_left(by_hole, key)
            if position < len(by_hole) and by_hole[position] == key:
                del by_hole[position]
            key = hole << _NUMBER_BITS | number
            position = bisect_left(by_hole, key)
            if hole and (position == len(by_hole) or by_hole[position] != key):
                by_hole.insert(position, key)
            self._holes[number] = hole  # last: after an interrupt, all is done again
        if not hole:
            self._holes.pop(number, None)
        if empty:
            self.empty[number] = empty
        else:
            self.empty.pop(number, None)

    def find(self, nbytes: int) -> int | None:
        """The number of the arena with the least hole that has `nbytes`, or None."""
        position = bisect_left(self._by_hole, nbytes << _NUMBER_BITS)
        return self._by_hole[position] & _NUMBERS if position < len(self._by_hole) else None

    @property
    def largest_hole(self) -> int:
        """The bytes of the largest hole of any arena; 0 if there is none."""
        return self._by_hole[-1] >> _NUMBER_BITS if self._by_hole else 0
