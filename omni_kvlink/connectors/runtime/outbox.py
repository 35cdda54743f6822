"""`Outbox`: the messages of a producer's state machine, each sent at once or with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.runtime.listener import PeerHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.connectors.protocol.transfer import Peer


class Outbox:
    """Sends messages to peers through their listeners; all calls are under the producer's lock."""

    def __init__(self) -> None:
        self._unsent: dict[PeerHandle, list[Message]] | None = None  # while several are collected

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message, or keep it for the end of `coalesce`."""
        assert isinstance(peer, PeerHandle)
        if self._unsent is not None:
            self._unsent.setdefault(peer, []).append(message)
        else:
            peer.listener.send(peer, message)

    def coalesce(self, act: Callable[[], object]) -> None:
        """Call `act`; what it sends a peer is sent together, also if it raises.

        After an interrupt at any line, call `flush`.
        """
        try:
            self._unsent = {}
            act()
        finally:
            self.flush()

    def flush(self) -> None:
        """Send what is collected."""
        unsent = self._unsent or {}
        for peer in list(unsent):  # an interrupt leaves the others; messages may come twice
            peer.listener.send_all(peer, unsent[peer])
            del unsent[peer]
        self._unsent = None
