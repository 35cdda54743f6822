"""The consumer's end of a lane: what arrives is received where the payload is to lie."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.control.lane import (
    FRAME,
    HEADER,
    MAGIC,
    OPENED,
    TAG,
    FrameCipher,
    FrameHeader,
    guarded,
    set_lane_options,
)
from omni_kvlink.connectors.runtime.event_loop import READ, WRITE
from omni_kvlink.errors import PeerLostError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.system import process

if TYPE_CHECKING:
    from typing import Protocol

    from omni_kvlink.connectors.runtime.event_loop import EventLoop

    class LaneOwner(Protocol):
        """The owner of a lane; these are called in the lane's thread, and never block."""

        def on_lane_open(self, lane: LaneReader) -> None:
            """The producer has accepted the lane."""

        def on_lane_received(self, lane: LaneReader, piece: LaneRange) -> None:
            """All bytes of a range have arrived."""

        def on_lane_lost(self, lane: LaneReader, error: Exception) -> None:
            """The lane has ended, and writes to no memory any more; see `take_ranges`."""


_TURN = 8
"""Reads of one lane before the others of its thread come next."""
_WAKE = 256 << 10
"""Bytes of a large frame that wake a lane."""


@dataclasses.dataclass(slots=True, eq=False)
class LaneRange:
    """A range that was requested by a lane, its memory, and how many of its bytes have arrived.

    Without memory it was released: what comes of it all the same is dropped.
    """

    get_id: int
    epoch: int
    start: int
    stop: int
    memory: Region | None
    received: int = 0
    is_released: bool = False

    def expects(self, header: FrameHeader) -> bool:
        """Return whether a frame's bytes are the next ones of this range."""
        at = self.start + self.received
        is_next = (header.get_id, header.epoch, header.start) == (self.get_id, self.epoch, at)
        return is_next and 0 < header.nbytes <= self.stop - at


class LaneReader:
    """One lane, by its number in the connection; it is opened at once, in its loop's thread.

    `address` is where the producer accepts it (host, port); `ticket` authorises it, and `key`
    decrypts its frames, if there is one.
    """

    def __init__(
        self,
        number: int,
        address: tuple[str, int],
        ticket: bytes,
        key: bytes,
        loop: EventLoop,
        owner: LaneOwner,
    ):
        self.number, self._address, self._ticket = number, address, ticket
        self._loop, self._owner = loop, owner
        self._cipher = FrameCipher(key) if key else None
        self._ranges: deque[LaneRange] = deque()  # requested; the first may be arriving
        self._socket: socket.socket | None = None
        self._is_open = self._is_closed = False
        self._buffer = memoryview(bytearray(HEADER.size + (FRAME + TAG if key else 0)))
        self._header: FrameHeader | None = None  # of the frame that arrives
        self._space = self._buffer[: HEADER.size]  # for what is to arrive of header or frame
        self._wakes_at = 1
        loop.call(partial(guarded, self._lose_in_loop, self._connect_in_loop))

    def expect(self, piece: LaneRange) -> None:
        """Receive a range, which is requested after this call; any thread, never blocks."""
        self._ranges.append(piece)

    def take_ranges(self) -> list[LaneRange]:
        """Return the ranges that a lane which has ended has not brought, or not whole.

        For the thread that calls `expect`: it may have done so after the lane's end.
        """
        ranges = list(self._ranges)
        self._ranges.clear()
        return ranges

    @property
    def load(self) -> int:
        """Bytes that were requested by this lane and are still to arrive; any thread."""
        ranges = [each for each in list(self._ranges) if not each.is_released]
        return sum(each.stop - each.start - each.received for each in ranges)

    def release(self, get_id: int) -> None:
        """Free the memory of a released get's ranges, most of which never come.

        For the thread that calls `expect`.
        """
        if any(each.get_id == get_id for each in list(self._ranges)):  # else nobody is woken
            self._loop.call(partial(self._release_in_loop, get_id))

    def close(self) -> None:
        """Close the connection; any thread, never blocks."""
        self._loop.call(partial(self._lose_in_loop, PeerLostError("closed here")))

    def _release_in_loop(self, get_id: int) -> None:
        for number, piece in enumerate(list(self._ranges)):
            if piece.get_id == get_id:
                piece.is_released = True
                if number or self._header is None:  # else a frame is arriving in its memory
                    piece.memory = None

    def _connect_in_loop(self) -> None:
        if self._is_closed:
            return
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._socket = lane = socket.socket(family, socket.SOCK_STREAM)
        process.call_in_children(lane, socket.socket.close)  # it would outlive this process
        set_lane_options(lane)
        number = lane.connect_ex(self._address)
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
        self._loop.watch(lane, WRITE, self._on_connected_in_loop)

    def _on_connected_in_loop(self, events: int) -> None:
        guarded(self._lose_in_loop, self._greet_in_loop)

    def _greet_in_loop(self) -> None:
        lane = self._open_socket()
        number = lane.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        greeting = MAGIC + self._ticket
        if lane.send(greeting) != len(greeting):
            raise PeerLostError("it takes no greeting")
        self._loop.watch(lane, READ, self._on_readable_in_loop)

    def _on_readable_in_loop(self, events: int) -> None:
        guarded(self._lose_in_loop, self._read_in_loop)
        if not self._is_closed:
            guarded(self._lose_in_loop, self._set_wake_in_loop)

    def _read_in_loop(self) -> None:
        for _ in range(_TURN):
            nbytes = self._open_socket().recv_into(self._space)
            if not nbytes:
                raise PeerLostError("the producer closed it")
            self._space = self._space[nbytes:]
            if self._header is not None and self._cipher is None and self._is_open:
                self._ranges[0].received += nbytes
            while not self._space.nbytes:
                if self._header is None:
                    self._on_header_in_loop(FrameHeader(*HEADER.unpack_from(self._buffer)))
                else:
                    self._on_frame_in_loop(self._header)

    def _on_header_in_loop(self, header: FrameHeader) -> None:
        self._header = header
        if not self._is_open:
            if header != OPENED:
                raise WireError("what answers does not begin a lane")
        else:
            self._find_range_in_loop(header)
        if self._cipher is None:
            self._space = self._target_in_loop(header)
        elif header.nbytes > FRAME:
            raise WireError(f"a frame of {header.nbytes} bytes; the limit is {FRAME}")
        else:
            self._space = self._buffer[HEADER.size : HEADER.size + header.nbytes + TAG]

    def _find_range_in_loop(self, header: FrameHeader) -> None:
        """Make the range of a frame the first; those before it were released, and never come."""
        while self._ranges and not self._ranges[0].expects(header):
            if self._ranges[0].received:
                break
            self._ranges.popleft()
        if not self._ranges or not self._ranges[0].expects(header):
            raise WireError("bytes arrived that were not requested")

    def _target_in_loop(self, header: FrameHeader) -> memoryview:
        """Return the payload's memory for the bytes of a frame."""
        if not self._is_open:
            return self._buffer[:0]
        piece = self._ranges[0]
        if piece.memory is None:
            return memoryview(bytearray(header.nbytes))
        return piece.memory.view(piece.received, piece.received + header.nbytes)

    def _on_frame_in_loop(self, header: FrameHeader) -> None:
        """Take a frame whose bytes are all here."""
        if self._cipher is not None:
            end = HEADER.size + header.nbytes + TAG
            packed, sealed = self._buffer[: HEADER.size], self._buffer[HEADER.size : end]
            self._cipher.open(packed, sealed, self._target_in_loop(header))
        self._header, self._space = None, self._buffer[: HEADER.size]
        if not self._is_open:
            self._is_open = True
            self._owner.on_lane_open(self)
            return
        piece = self._ranges[0]
        if self._cipher is not None:
            piece.received += header.nbytes
        if piece.is_released:
            piece.memory = None
        if piece.start + piece.received == piece.stop:
            self._ranges.popleft()
            self._owner.on_lane_received(self, piece)

    def _set_wake_in_loop(self) -> None:
        """Sleep until a good part of a frame is here: to wake for each packet costs more."""
        wakes_at = min(_WAKE, max(1, self._space.nbytes))
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            self._open_socket().setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _lose_in_loop(self, error: Exception) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._socket is not None:
            self._loop.unwatch(self._socket)
            self._socket.close()
        self._space = self._buffer = memoryview(b"")
        self._owner.on_lane_lost(self, error)

    def _open_socket(self) -> socket.socket:
        assert self._socket is not None
        return self._socket
