"""The connections of a listener that have not sent `Hello`, and the descriptors for them."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable

    from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket
    from omni_kvlink.connectors.control.peer import PeerConnection

MAX_UNGREETED = 128
"""Connections that may be without `Hello` at a time; the oldest is disconnected for another."""
_ACCEPT_SECONDS = 0.1
"""Seconds that ZMQ may take to accept a connection with a descriptor that was given up for it."""


class UngreetedConnections(dict[int, None]):
    """Descriptors of connections without `Hello`, the oldest first; `refused` counts refusals.

    One descriptor is kept in reserve, for when the process has no other.
    """

    def __init__(self, refused: Counter[str]):
        super().__init__()
        self._refused = refused
        self.spare, self._given_up_at = -1, 0.0

    def add(self, descriptor: int, socket: MonitoredSocket) -> None:
        """Keep a connection until its `Hello`, unless there are too many, or no descriptors."""
        if not self.take_spare():
            self._refused["no descriptors"] += 1
            socket.disconnect(descriptor)
            return
        self[descriptor] = None
        if len(self) > MAX_UNGREETED:
            oldest = next(iter(self))
            del self[oldest]
            self._refused["no greeting"] += 1
            socket.disconnect(oldest)

    def take_spare(self) -> bool:
        """Keep one descriptor in reserve; return whether there is one."""
        if self.spare < 0:
            with contextlib.suppress(OSError):
                self.spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self.spare >= 0

    def give_up(self, peers: Iterable[PeerConnection], socket: MonitoredSocket) -> None:
        """Let ZMQ accept a connection for which there was no descriptor, to disconnect it.

        ZMQ would try again without a pause for as long as the connection is in the queue. If
        another thread took the spare descriptor, a peer's `duplicate` is given up.
        """
        now = time.monotonic()
        if self.spare >= 0:
            self.close()
        elif now < self._given_up_at + _ACCEPT_SECONDS:
            return  # an event from before ZMQ could use what was given up last
        else:
            for peer in peers:
                if peer.duplicate is not None:
                    socket.close_duplicate(peer.duplicate)
                    peer.duplicate = None
                    break
        self._given_up_at = now

    def close(self) -> None:
        """Close the spare descriptor."""
        spare, self.spare = self.spare, -1
        if spare >= 0:
            os.close(spare)
