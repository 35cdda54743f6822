"""The consumer of `zmq+tcp://` and `zmq+ipc://`: fetches chunks over the control channel."""

from __future__ import annotations

from omni_kvlink.connectors.control.consumer import ControlConsumer
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchLimits
from omni_kvlink.connectors.protocol.messages import MAX_MESSAGE

_MALLOC_KEEPS = 31 << 20
"""Bytes; glibc adapts its threshold to freed blocks of at most 32 MiB."""


class ZmqSession(ControlSession):
    """A connection over which the producer also sends the chunks that are fetched."""

    max_frame_nbytes = max(CHUNK, MAX_MESSAGE)
    fetch_limits = FetchLimits(CHUNK, WINDOW)


class ZmqConsumer(ControlConsumer):
    """The consumer of `zmq+tcp://host:port` and `zmq+ipc:///path`."""

    _make_session = ZmqSession


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks of up to 31 MiB, in which ZMQ receives chunks.

    glibc returns freed memory to the system above a threshold that grows with the largest freed
    block; mapping fresh memory for each chunk would cost more than the transfer. The block that is
    allocated here is never touched.
    """
    block = bytearray(_MALLOC_KEEPS)
    del block
