"""Lanes over wires of the simulation: each keeps its own order, and may be lost at any byte."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_kvlink import PeerLostError
from omni_kvlink.connectors.control.session_lanes import LANE_MIN, SessionLanes
from omni_kvlink.connectors.protocol.messages import FetchRange, LaneTicket, OpenLane
from support.simulation.world import Wire

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.lane_reader import LaneRange
    from support.simulation.far import FarConnection, FarConsumer, FarSession

COUNT = 3
_LOST, _REFUSED = 0.06, 0.1
"""How often a frame is the last of its lane, and a lane is not given."""
_FRAMES = 4
"""Frames of a range, at most."""


class SimLanes(SessionLanes):
    """The lanes of one connection, both ends of them; `send` is the producer's."""

    def __init__(self, connection: FarConnection, session: FarSession, reader: FarConsumer):
        link: Any = SimpleNamespace(
            count=COUNT if connection.clock.chance.random() < 0.6 else 0,
            counters=reader.lane_counters,
            why="",
            report=lambda why: None,
        )
        link.is_possible = link.count > 0
        self.maybe_break_off = connection.maybe_break_off
        self.clock, self.is_wild, loop = connection.clock, connection.is_wild, reader.loop
        super().__init__(link, session, loop)  # type: ignore[arg-type]  # no thread runs it

    def pick(self, nbytes: int) -> Any:
        """Use lanes for every range."""
        return super().pick(max(nbytes, LANE_MIN))

    def ticket(self, message: OpenLane) -> LaneTicket:
        """Answer the request of a lane, as a producer."""
        if self.clock.chance.random() < _REFUSED:
            return LaneTicket(message.lane, reason="no more")
        return LaneTicket(message.lane, 1, b"ticket")

    def on_ticket(self, ticket: LaneTicket) -> None:
        """Open the lane, as a consumer."""
        if ticket.lane not in self._requested:
            return  # the answer has come twice
        self._requested.discard(ticket.lane)
        if not ticket.ticket:
            self._give_up(ticket.reason)
            return
        lane: Any = SimLane(ticket.lane, self)
        self._lanes[ticket.lane] = lane
        self.clock.soon(partial(self.on_lane_open, lane), 0.1)

    def send(self, fetch: FetchRange, piece: bytes) -> None:
        """Send a range by a lane, in frames, unless the lane has ended."""
        lane: Any = self._lanes.get(fetch.lane)
        if lane is None:
            return
        cuts = sorted(self.clock.chance.sample(range(1, len(piece)), min(_FRAMES, len(piece)) - 1))
        for first, last in zip([0, *cuts], [*cuts, len(piece)], strict=True):
            start, stop = fetch.start + first, fetch.start + last
            frame = FetchRange(fetch.get_id, fetch.epoch, start, stop, fetch.lane)
            lane.wire.send(frame, piece[first:last])


class SimLane:
    """What `LaneReader` is to its owner; frames go straight into the payload's memory."""

    def __init__(self, number: int, owner: SimLanes):
        self.number, self._owner, self._clock = number, owner, owner.clock
        self._ranges: deque[LaneRange] = deque()
        self.wire = Wire(self._clock, self._on_frame, wild=False)
        self._is_closed = False

    def expect(self, piece: LaneRange) -> None:
        self._ranges.append(piece)

    def take_ranges(self) -> list[LaneRange]:
        ranges = list(self._ranges)
        self._ranges.clear()
        return ranges

    @property
    def load(self) -> int:
        return sum(each.stop - each.start - each.received for each in self._ranges)

    def release(self, get_id: int) -> None:
        for piece in self._ranges:
            if piece.get_id == get_id:
                piece.memory, piece.is_released = None, True

    def close(self) -> None:
        self._clock.soon(partial(self._lose, PeerLostError("closed here")), 0.1)

    def _lose(self, error: Exception) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.wire.cut()
            self._owner.on_lane_lost(self, error)  # type: ignore[arg-type]  # it has no socket

    def _on_frame(self, frame: Any, content: bytes) -> None:
        if self._is_closed:
            return
        at = frame.get_id, frame.epoch, frame.start
        while self._ranges and not _is_next(self._ranges[0], at):
            if self._ranges[0].received:
                break
            self._ranges.popleft()  # its lease has ended
        if not self._ranges or not _is_next(self._ranges[0], at):
            assert self._owner.is_wild, "bytes came that were not requested"
            self._lose(PeerLostError("a request was repeated"))
            return
        piece = self._ranges[0]
        if piece.memory is not None:
            piece.memory.view(piece.received, piece.received + len(content))[:] = content
        piece.received += len(content)
        if piece.start + piece.received == piece.stop:
            self._ranges.popleft()
            self._owner.on_lane_received(self, piece)  # type: ignore[arg-type]  # it has no socket
        self._owner.maybe_break_off(frame.get_id)
        if self._clock.chance.random() < _LOST:
            self._lose(PeerLostError("cut"))


def _is_next(piece: LaneRange, at: tuple[int, int, int]) -> bool:
    return (piece.get_id, piece.epoch, piece.start + piece.received) == at
