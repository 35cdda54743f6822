"""The policy for peers that send faster than their messages are handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.turns import TURN, RecentNames

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.peer import PeerConnection

MAX_INBOX, MAX_INBOX_NBYTES = 1 << 14, 64 << 20
"""Messages of one peer, and their bytes, that may be read and not handled; then it is disconnected.

The socket itself has no limit: ZMQ would stop reading from a peer, see `MonitoredSocket`.
"""
MAX_INBOX_AGAIN = 256
"""The same, in the minute after a peer of the same process or host had too many."""
ROUND, SHARE = 2 * TURN, 8
"""Messages that one round of reads handles; and those of each peer that it handles nevertheless."""


class Inboxes:
    """Decides how many messages of a peer one round of reads handles, and how many are kept."""

    def __init__(self) -> None:
        self._floods = RecentNames()  # hosts
        self._round, self._handled = -1, 0  # the last round; messages that were handled in it

    def has_turn(self, peer: PeerConnection, round_number: int) -> bool:
        """Count a message of a peer; return whether this round of reads handles it."""
        if self._round != round_number:
            self._round, self._handled = round_number, 0
        if peer.round != self._round:
            peer.round, peer.handled = self._round, 0
        if peer.handled >= (TURN if self._handled < ROUND else SHARE):
            return False
        peer.handled += 1
        self._handled += 1
        return True

    def keep(self, peer: PeerConnection, data: bytes) -> bool:
        """Keep a message until a turn of its peer; False if it is to be disconnected."""
        peer.inbox.append(data)
        peer.inbox_nbytes += len(data)
        count = len(peer.inbox)
        if count > MAX_INBOX_AGAIN and peer.host in self._floods:
            count += MAX_INBOX
        if count > MAX_INBOX or peer.inbox_nbytes > MAX_INBOX_NBYTES:
            self._floods.add(peer.host)
            return False
        return True
