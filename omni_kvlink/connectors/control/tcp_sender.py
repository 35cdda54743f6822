"""Sends what consumers fetch over TCP: by their lanes, or in chunks over the control channel."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.lane import count_lanes, lanes_refusal
from omni_kvlink.connectors.control.lane_listener import LaneListener
from omni_kvlink.connectors.control.listener import ChunkSender, ControlListener
from omni_kvlink.connectors.protocol.messages import unexpected

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.peer import PeerConnection
    from omni_kvlink.connectors.protocol.messages import FetchRange, LaneTicket, OpenLane
    from omni_kvlink.connectors.protocol.transfer import Transfer

_log = logging.getLogger("omni_kvlink")


class TcpSender(ChunkSender):
    """Sends a range by the lane that its request names, or over the control channel without one."""

    def __init__(self, listener: ControlListener):
        super().__init__(listener)
        is_encrypted = listener.is_encrypted
        count = count_lanes(listener.options.lanes, is_encrypted=is_encrypted)
        self._why = lanes_refusal(count, is_encrypted=is_encrypted)
        self._lanes: LaneListener | None = None
        if not self._why:
            self._lanes = LaneListener(listener, count, is_encrypted=is_encrypted)
        elif count:
            _log.warning("%s is served without lanes: %s", listener.address.url, self._why)

    @property
    def transports(self) -> tuple[str, ...]:
        """Names, for `Hello`, of the ways in which a consumer can have bytes."""
        return ("zmq",) if self._lanes is None else ("zmq", "lanes")

    def open_lane(self, peer: PeerConnection, message: OpenLane) -> LaneTicket:
        """Return what a peer needs to open a lane; see `RangeSender`."""
        if self._lanes is None:
            unexpected(message)
        return self._lanes.ticket(peer, message)

    def send_range(self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        """Send the bytes of one request; see `RangeSender`.

        Nothing is sent if its lane has ended: the consumer learns of that, and requests them again.
        """
        if not fetch.lane:
            super().send_range(peer, fetch, transfer)
            return
        lane = None if self._lanes is None else self._lanes.find(peer, fetch.lane)
        if lane is not None:
            piece = self._listener.borrow(peer, fetch, transfer, fetch.start, fetch.stop)
            lane.send(fetch, piece)

    def on_peer_lost(self, peer: PeerConnection) -> None:
        """Close the lanes of a peer."""
        if self._lanes is not None:
            self._lanes.on_peer_lost(peer)

    def stats(self) -> dict[str, Any]:
        """Return the state of the lanes, or why there are none, as JSON values."""
        return {"why": self._why} if self._lanes is None else self._lanes.stats()

    def close(self) -> None:
        """Close all lanes."""
        if self._lanes is not None:
            self._lanes.close()
