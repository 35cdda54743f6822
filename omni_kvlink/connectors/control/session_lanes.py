"""The lanes of a consumer's connection: which are open, and which range is requested by which."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control.lane import KEY, TICKET, LaneThreads, why_no_lanes
from omni_kvlink.connectors.control.lane_reader import Landing, LaneReader
from omni_kvlink.connectors.protocol.messages import LaneTicket, OpenLane
from omni_kvlink.errors import KVLinkError, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.control.session import ControlSession
    from omni_kvlink.connectors.runtime.event_loop import EventLoop

LANE_MIN = 256 << 10
"""Bytes of the shortest range that is requested by a lane: others gain nothing by it."""
_MAX_FAILURES = 3
"""Lanes of one connection that may end in a row without having brought a range."""
_log = logging.getLogger("omni_kvlink")


class LinkLanes:
    """What the lanes of all connections of a consumer share: threads, counters, and the reason.

    `why` says why the last one could not be opened, or was lost; "" if none was.
    """

    def __init__(self, url: str, count: int, *, is_encrypted: bool):
        self._url, self.count, self.is_encrypted = url, count, is_encrypted
        self.why = why_no_lanes(count, is_encrypted=is_encrypted)
        self.is_possible = not self.why
        self.threads, self.counters = LaneThreads(count), Counter[str]()
        self._logged = {"", "lanes=0"}
        self.tell(self.why)

    def tell(self, why: str) -> None:
        """Keep why bytes go over ZMQ, and log it once."""
        self.why = why
        if why not in self._logged:
            self._logged.add(why)
            _log.warning("%s: bytes go over ZMQ, and by no lane: %s", self._url, why)

    def stats(self) -> dict[str, Any]:
        """Return counts of lanes and of bytes, and the reason, as JSON values; any thread."""
        names = ("opened", "lost", "received_nbytes", "again_nbytes")
        return {**{name: self.counters[name] for name in names}, "why": self.why}


class SessionLanes:
    """The lanes of one connection; all methods but those of a lane's owner are for its loop.

    The first range that is long enough has them opened; until they are, and when they have ended,
    ranges are requested over the control channel. Of a lane that ends, what has not arrived is
    requested again; another lane takes its place.
    """

    def __init__(self, link: LinkLanes, session: ControlSession, loop: EventLoop):
        self._link, self._session, self._loop = link, session, loop
        self._host = ""
        self._asked, self._number, self._failures = set[int](), 0, 0
        self._lanes: dict[int, LaneReader] = {}  # that are being opened, or open
        self._open: list[LaneReader] = []

    def begin(self, host: str, transports: Sequence[str]) -> None:
        """Use lanes from now on, if a producer at this address has such."""
        if self._link.is_possible and "lanes" in transports:
            self._host = host
        elif self._link.is_possible:
            self._link.tell("the producer opens none: its stats() or its log say why")

    def pick(self, nbytes: int) -> LaneReader | None:
        """Return the lane that is to bring a range of so many bytes; None for the control channel.

        Its caller has it expect the range, and then sends the request.
        """
        if nbytes < LANE_MIN or not self._host:
            return None
        if not self._lanes and not self._asked:
            for _ in range(self._link.count):
                self._ask()
        return min(self._open, key=lambda each: each.load, default=None)

    def on_ticket(self, ticket: LaneTicket) -> None:
        """Open a lane; WireError if none was asked for, or it would not be as safe as the link."""
        if ticket.lane not in self._asked:
            raise WireError(f"lane {ticket.lane} was offered, and not asked for")
        self._asked.discard(ticket.lane)
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
        """Close all lanes; what arrives meanwhile counts no more."""
        self._host = ""
        self._asked.clear()
        self._open.clear()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    # Of a lane's owner: in the lane's thread

    def on_lane_open(self, lane: LaneReader) -> None:
        """Use a lane that the producer has accepted."""
        self._loop.call(partial(self._on_open_in_loop, lane))

    def on_lane_landed(self, lane: LaneReader, landing: Landing) -> None:
        """Take a range that has arrived."""
        self._loop.call(partial(self._on_landed_in_loop, lane, landing))

    def on_lane_lost(self, lane: LaneReader, landings: Sequence[Landing], error: Exception) -> None:
        """Have what has not arrived requested again."""
        self._loop.call(partial(self._on_lost_in_loop, lane, landings, error))

    # In the session's loop

    def _on_open_in_loop(self, lane: LaneReader) -> None:
        if lane.number in self._lanes:
            self._open.append(lane)
            self._link.counters["opened"] += 1

    def _on_landed_in_loop(self, lane: LaneReader, landing: Landing) -> None:
        if lane.number in self._lanes:
            self._failures = 0
            self._link.counters["received_nbytes"] += landing.landed
            self._session.on_landed_in_loop(landing)

    def _on_lost_in_loop(
        self, lane: LaneReader, landings: Sequence[Landing], error: Exception
    ) -> None:
        if self._lanes.pop(lane.number, None) is None:
            return
        if lane in self._open:
            self._open.remove(lane)
            self._link.counters["lost"] += 1
        self._failures += 1
        if self._failures < _MAX_FAILURES:
            self._link.why = str(error)
            self._ask()
        else:
            self._give_up(str(error))
        for landing in landings:
            self._link.counters["received_nbytes"] += landing.landed
            self._link.counters["again_nbytes"] += self._session.on_cut_in_loop(landing)

    def _ask(self) -> None:
        self._number += 1
        self._asked.add(self._number)
        self._session.send(OpenLane(self._number))

    def _give_up(self, why: str) -> None:
        """Ask for no other lane; without one, the control channel brings all from now on."""
        if not self._lanes and not self._asked:
            self._link.tell(why)
            self._host = ""
