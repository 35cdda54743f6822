"""Sends the ranges that peers fetch in chunks over the control channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.peer import PeerConnection, RangeSender
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW
from omni_kvlink.connectors.protocol.messages import Chunk, FetchRange, encode

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.listener import ControlListener
    from omni_kvlink.connectors.protocol.transfer import Transfer


class ZmqSender(RangeSender):
    """Sends each range as messages of at most 4 MiB, from the payload's memory without a copy."""

    transport = "zmq"
    max_in_flight = 2 * WINDOW

    def __init__(self, listener: ControlListener):
        self._listener = listener

    def direct_refusal(self, device: str) -> str:
        """Return why tensors of a device cannot be sent; "" for host memory."""
        return "" if device == "cpu" else "ZMQ sends from host memory only"

    def send_range(self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        """Send the bytes of one request; see `RangeSender`."""
        for start in range(fetch.start, fetch.stop, CHUNK):
            stop = min(fetch.stop, start + CHUNK)
            piece = self._listener.borrow(peer, fetch, transfer, start, stop)
            header = encode(Chunk(fetch.get_id, fetch.epoch, start))
            self._listener.send_frames(peer, [header, piece.view()], copy=False)
