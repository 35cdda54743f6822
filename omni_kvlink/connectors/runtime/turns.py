"""Turns: how much of what one peer sends is handled before the other peers come next."""

from __future__ import annotations

import time
from collections import OrderedDict

TURN = 64
"""Messages, those within a Batch counted singly, after which a peer's turn ends. The Batch that
reaches the number is handled to its end."""
MANY_TURNS = 256
"""Turns in a row after which the next ones of a peer are paused, until all it sent is handled."""
_MAX_NAMES, _KEPT_SECONDS = 64, 60.0


class TurnCounts:
    """The numbers of turns that ended though more of the peer's messages were there, by peer.

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


class RecentNames:
    """The 64 names that were added last, each for a minute."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, float] = OrderedDict()

    def add(self, name: str) -> None:
        """Keep `name`, from now on."""
        self._times[name] = time.monotonic()
        self._times.move_to_end(name)
        if len(self._times) > _MAX_NAMES:
            self._times.popitem(last=False)

    def __contains__(self, name: str) -> bool:
        return self._times.get(name, -_KEPT_SECONDS) > time.monotonic() - _KEPT_SECONDS
