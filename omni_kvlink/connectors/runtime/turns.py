"""Turns: how much of what one peer sends is handled before the other peers come next."""

from __future__ import annotations

from collections import OrderedDict

TURN = 64
"""Messages, those within a Batch counted singly, after which a peer's turn ends. The Batch that
reaches the number is handled to its end."""
_MAX_NAMES = 64


class TurnCounts:
    """How many turns of each peer ended though more of its messages were there.

    The 64 peers are kept to whom that happened last.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def add(self, name: str) -> None:
        """Count a turn of the peer `name`."""
        self._counts[name] = self._counts.get(name, 0) + 1
        self._counts.move_to_end(name)
        if len(self._counts) > _MAX_NAMES:
            self._counts.popitem(last=False)

    def stats(self) -> dict[str, int]:
        """Return the turns by the name of the peer; any thread."""
        return dict(self._counts)
