"""The producer's end of a lane: it sends the ranges that a consumer fetches by it."""

from __future__ import annotations

import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.lane import (
    FRAME,
    HEADER,
    OPENED,
    TAG,
    FrameCipher,
    FrameHeader,
    guarded,
)
from omni_kvlink.connectors.runtime.event_loop import READ, WRITE
from omni_kvlink.errors import PeerLostError, WireError
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.messages import FetchRange
    from omni_kvlink.connectors.runtime.event_loop import EventLoop
    from omni_kvlink.memory.region import Region

_TURN = 4
"""Frames that one lane sends before the others of its thread come next."""


class LaneSender:
    """Sends ranges on one lane, in the order in which they were given; in its own loop's thread.

    Without `key` they are sent from their memory; with it each frame is encrypted into a buffer.
    `on_lost` is called once, in that thread, with the reason: what was not sent is dropped.
    """

    def __init__(
        self,
        lane: socket.socket,
        loop: EventLoop,
        key: bytes,
        on_lost: Callable[[LaneSender, Exception], None],
    ):
        self._socket, self._loop, self._on_lost = lane, loop, on_lost
        process.call_in_children(lane, socket.socket.close)  # it would outlive this process
        self._cipher = FrameCipher(key) if key else None
        self._buffer = memoryview(bytearray(HEADER.size + (FRAME + TAG if key else 0)))
        self._ranges: deque[tuple[FetchRange, Region]] = deque()
        self._sent = 0  # bytes of the first range that are in frames
        self._frame: list[memoryview] = []  # what is left to send of the current one
        self._is_closed = False
        self._events = 0
        loop.call(self._begin_in_loop)

    def send(self, fetch: FetchRange, piece: Region) -> None:
        """Send a range, whose memory is kept until then; any thread, never blocks."""
        self._ranges.append((fetch, piece))
        self._loop.call(self._go_on_in_loop)

    def close(self) -> None:
        """Close the connection, and drop what was not sent; any thread, never blocks."""
        self._loop.call(partial(self._lose_in_loop, PeerLostError("closed here")))

    def _begin_in_loop(self) -> None:
        self._pack_in_loop(OPENED, memoryview(b""))
        self._go_on_in_loop()

    def _go_on_in_loop(self) -> None:
        """Send what was given, unless the socket was full when it was last tried."""
        if self._is_closed:
            self._ranges.clear()
        elif not self._events & WRITE:
            self._on_events_in_loop(WRITE)

    def _on_events_in_loop(self, events: int) -> None:
        guarded(self._lose_in_loop, partial(self._check_in_loop, events))
        if not self._is_closed:
            guarded(self._lose_in_loop, self._send_frames_in_loop)
        if not self._is_closed:
            guarded(self._lose_in_loop, self._watch_in_loop)

    def _watch_in_loop(self) -> None:
        """Wait for the lane's end; and for space, if there is more to send."""
        interest = READ | (WRITE if self._frame or self._ranges else 0)
        if interest != self._events:
            self._events = interest
            self._loop.watch(self._socket, interest, self._on_events_in_loop)

    def _check_in_loop(self, events: int) -> None:
        if events & READ:
            if self._socket.recv(1):
                raise WireError("a consumer sends nothing more on a lane")
            raise PeerLostError("its consumer closed it")

    def _send_frames_in_loop(self) -> None:
        for _ in range(_TURN):
            if not self._frame and not self._take_frame_in_loop():
                return
            sent = self._socket.sendmsg(self._frame)
            while self._frame and sent >= self._frame[0].nbytes:
                sent -= self._frame.pop(0).nbytes
            if self._frame:
                self._frame[0] = self._frame[0][sent:]

    def _take_frame_in_loop(self) -> bool:
        """Make the next frame; False if nothing is left to send."""
        if not self._ranges:
            return False
        fetch, piece = self._ranges[0]
        nbytes = piece.nbytes - self._sent
        if self._cipher is not None:
            nbytes = min(nbytes, FRAME)
        header = FrameHeader(fetch.get_id, fetch.epoch, fetch.start + self._sent, nbytes)
        self._pack_in_loop(header, piece.view(self._sent, self._sent + nbytes))
        self._sent += nbytes
        if self._sent == piece.nbytes:
            self._ranges.popleft()  # the frame has its memory
            self._sent = 0
        return True

    def _pack_in_loop(self, header: FrameHeader, data: memoryview) -> None:
        packed, end = self._buffer[: HEADER.size], HEADER.size + data.nbytes
        HEADER.pack_into(packed, 0, *header)
        if self._cipher is None:
            self._frame = [packed, data] if data.nbytes else [packed]
        else:
            sealed = self._buffer[HEADER.size : end + TAG]
            self._cipher.seal(packed, data, sealed)
            self._frame = [self._buffer[: end + TAG]]

    def _lose_in_loop(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.unwatch(self._socket)
        self._socket.close()
        self._ranges.clear()
        self._frame = []
        self._on_lost(self, error)
