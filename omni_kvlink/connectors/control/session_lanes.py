"""The lanes of a consumer's connection: which are open, and which range is requested by which."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Protocol

from omni_kvlink.connectors.control.lane import KEY, TICKET
from omni_kvlink.connectors.control.lane_reader import LaneRange, LaneReader
from omni_kvlink.connectors.protocol.messages import LaneTicket, OpenLane
from omni_kvlink.errors import KVLinkError, PeerLostError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.control.kept_bytes import KeptBytes
    from omni_kvlink.connectors.control.link_lanes import LinkLanes
    from omni_kvlink.connectors.control.remote_get import InboundTransfer
    from omni_kvlink.connectors.protocol.messages import Message
    from omni_kvlink.connectors.runtime.event_loop import EventLoop

LANE_MIN = 256 << 10
"""Bytes of the shortest range that is requested by a lane: others gain nothing by it."""
_MAX_FAILURES = 3
"""Lanes of one connection that may end in a row without having brought a range."""


class LaneSession(Protocol):
    """The connection that lanes belong to; these are called in its loop."""

    def send(self, message: Message) -> None:
        """Queue a message for the producer."""

    def find_inbound_in_loop(self, get_id: int) -> InboundTransfer | None:
        """Return the payload that is being fetched for a get; None if it was released."""

    def find_kept_in_loop(self, get_id: int) -> KeptBytes | None:
        """Return what was kept of the payload of a get when the connection broke."""

    def fetch_more_in_loop(self, inbound: InboundTransfer) -> None:
        """Request what the window allows."""

    def on_lanes_in_loop(self, lanes: int) -> None:
        """Learn how many lanes are open now."""

    def disconnect_in_loop(self, error: KVLinkError) -> None:
        """End the connection: the producer has sent what it must not."""


class SessionLanes:
    """The lanes of one connection; all methods but those of a lane's owner are for its loop.

    The first range that is long enough has them opened; until they are, and when they have ended,
    ranges are requested over the control channel. Of a lane that ends, what has not arrived is
    requested again; another lane takes its place.
    """

    def __init__(self, link: LinkLanes, session: LaneSession, loop: EventLoop):
        self._link, self._session, self._loop = link, session, loop
        self._host = ""
        self._requested, self._number, self._failures = set[int](), 0, 0
        self._lanes: dict[int, LaneReader] = {}  # that are being opened, or open
        self._open: list[LaneReader] = []
        self._closing = weakref.WeakSet[LaneReader]()  # whose last bytes are still to come

    def begin(self, host: str, transports: Sequence[str]) -> None:
        """Use lanes from now on, if a producer at this address has such."""
        if self._link.is_possible and "lanes" in transports:
            self._host = host
        elif self._link.is_possible:
            self._link.report("the producer opens none: its stats() or its log say why")

    @property
    def is_ready(self) -> bool:
        """Whether a lane is open, or none will be."""
        return bool(self._open) or not self._host

    def pick(self, nbytes: int) -> LaneReader | None:
        """Return the lane that is to bring a range of so many bytes; None for the control channel.

        Its caller has it expect the range, and then sends the request.
        """
        if nbytes < LANE_MIN or not self._host:
            return None
        if not self._lanes and not self._requested:
            for _ in range(self._link.count):
                self._request()
        return min(self._open, key=lambda each: each.load, default=None)

    def release(self, get_id: int) -> None:
        """Free the memory that lanes hold for a released get."""
        for lane in self._open:
            lane.release(get_id)

    def on_ticket(self, ticket: LaneTicket) -> None:
        """Open a lane; WireError if none was asked for, or it would not be as safe as the link."""
        if ticket.lane not in self._requested:
            raise WireError(f"lane {ticket.lane} was offered, and not asked for")
        self._requested.discard(ticket.lane)
        if not ticket.ticket:
            self._give_up(ticket.reason)
            return
        has_key = len(ticket.key) == (KEY if self._link.is_encrypted else 0)
        if len(ticket.ticket) != TICKET or not has_key or not 0 < ticket.port < 1 << 16:
            raise WireError("a lane was offered that is not as safe as its control channel")
        try:
            loop = self._link.threads.take_loop()
        except (OSError, KVLinkError) as error:
            self._give_up(str(error))
            return
        address = self._host, ticket.port
        lane = LaneReader(ticket.lane, address, ticket.ticket, ticket.key, loop, self)
        self._lanes[ticket.lane] = lane

    def close(self) -> None:
        """Close all lanes; what arrives meanwhile counts only for payloads that are resumed."""
        self._host = ""
        self._requested.clear()
        self._open.clear()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            self._closing.add(lane)
            lane.close()

    # Of a lane's owner: in the lane's thread

    def on_lane_open(self, lane: LaneReader) -> None:
        """Use a lane that the producer has accepted."""
        self._loop.call(partial(self._on_open_in_loop, lane))

    def on_lane_received(self, lane: LaneReader, piece: LaneRange) -> None:
        """Take a range that has arrived."""
        self._loop.call(partial(self._on_received_in_loop, lane, piece))

    def on_lane_lost(self, lane: LaneReader, error: Exception) -> None:
        """Have what has not arrived requested again."""
        self._loop.call(partial(self._on_lost_in_loop, lane, error))

    # In the session's loop

    def _on_open_in_loop(self, lane: LaneReader) -> None:
        if lane.number in self._lanes:
            self._open.append(lane)
            self._session.on_lanes_in_loop(len(self._open))
            self._link.counters["opened"] += 1

    def _on_received_in_loop(self, lane: LaneReader, piece: LaneRange) -> None:
        if lane.number in self._lanes:
            self._failures = 0
            self._take_in_loop(piece)
        elif lane in self._closing:
            self._keep_in_loop(piece)

    def _on_lost_in_loop(self, lane: LaneReader, error: Exception) -> None:
        if self._lanes.pop(lane.number, None) is None:
            if lane in self._closing:
                for piece in lane.take_ranges():
                    self._keep_in_loop(piece)
            return
        if lane in self._open:
            self._open.remove(lane)
            self._session.on_lanes_in_loop(len(self._open))
            self._link.counters["lost"] += 1
        self._failures += 1
        if self._failures < _MAX_FAILURES:
            self._link.why = str(error)
            self._request(lane.number)
        else:
            self._give_up(str(error))
        for piece in lane.take_ranges():
            self._cut_in_loop(piece)

    def _cut_in_loop(self, piece: LaneRange) -> None:
        """Take what came of a range before its lane ended, and request the rest again.

        The tensors of a direct put may be its caller's again: its get fails.
        """
        inbound = self._session.find_inbound_in_loop(piece.get_id)
        if inbound is None:
            return
        if inbound.offer.direct:
            inbound.plan.cancel()
            text = "a lane was cut while it came from its caller's tensors: put it again"
            inbound.fail(PeerLostError(f"{inbound.key!r}: {text}"))
        start = piece.start + piece.received
        inbound.plan.give_back(start, piece.stop)
        self._link.counters["again_nbytes"] += piece.stop - start
        if piece.received:
            self._take_in_loop(piece)
        else:
            self._session.fetch_more_in_loop(inbound)

    def _keep_in_loop(self, piece: LaneRange) -> None:
        """Keep what came of a range while the connection ended."""
        kept = self._session.find_kept_in_loop(piece.get_id)
        if kept is not None and piece.received:
            self._link.counters["received_nbytes"] += piece.received
            kept.on_received(piece.start, piece.received)

    def _take_in_loop(self, piece: LaneRange) -> None:
        """Take the bytes of a range that are here, unless their payload was released meanwhile."""
        self._link.counters["received_nbytes"] += piece.received
        inbound = self._session.find_inbound_in_loop(piece.get_id)
        if inbound is not None:
            try:
                inbound.on_received(piece.start, piece.received)
            except KVLinkError as error:
                self._session.disconnect_in_loop(error)

    def _request(self, instead_of: int = 0) -> None:
        self._number += 1
        self._requested.add(self._number)
        self._session.send(OpenLane(self._number, instead_of))

    def _give_up(self, why: str) -> None:
        """Ask for no other lane; without one, the control channel brings all from now on."""
        if not self._lanes and not self._requested:
            self._link.report(why)
            self._host = ""
