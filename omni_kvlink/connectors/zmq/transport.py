"""`zmq+tcp://` and `zmq+ipc://`: the consumer fetches chunks over the control channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.consumer import ControlConsumer
from omni_kvlink.connectors.control.listener import ControlListener, PeerConnection, RangeSender
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchLimits
from omni_kvlink.connectors.protocol.messages import MAX_MESSAGE, Chunk, FetchRange, encode

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.protocol.transfer import Transfer

_MALLOC_KEEPS = 31 << 20
"""Bytes; glibc adapts its threshold to freed blocks of at most 32 MiB."""


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


class ZmqSession(ControlSession):
    """A connection over which the producer also sends the chunks that are fetched."""

    max_frame_nbytes = max(CHUNK, MAX_MESSAGE)
    fetch_limits = FetchLimits(CHUNK, WINDOW)


class ZmqConsumer(ControlConsumer):
    """The consumer of `zmq+tcp://host:port` and `zmq+ipc:///path`."""

    def __init__(self, address: ControlAddress, options: Options):
        super().__init__(address, options)
        keep_freed_memory()

    def _make_session(self) -> ZmqSession:
        return ZmqSession(self._resources)


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks of up to 31 MiB, in which ZMQ receives chunks.

    glibc returns freed memory to the system above a threshold that grows with the largest freed
    block; mapping fresh memory for each chunk would cost more than the transfer. The block that is
    allocated here is never touched.
    """
    block = bytearray(_MALLOC_KEEPS)
    del block
