"""A peer whose connections are ready when a lane is open, and request all bytes by them.

`python -m support.connectors.lane_peer` serves the commands of a link's end, as a process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.control import session_lanes
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.control.session_lanes import SessionLanes
from omni_kvlink.testing.link_commands import LinkCommands
from omni_kvlink.testing.peer_harness import serve

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.lane_reader import LaneReader
    from omni_kvlink.errors import KVLinkError


def force_lanes(patch: Any = None) -> None:
    """Have each connection of this process wait for a lane, and use lanes for every range.

    `patch` is a pytest.MonkeyPatch; without it this is for the rest of the process's life.
    """
    replace = setattr if patch is None else patch.setattr
    set_ready = ControlSession.set_ready_in_loop
    pick = SessionLanes.pick
    on_open = SessionLanes._on_open_in_loop  # private: the moment has no other name

    def set_ready_later(session: ControlSession, error: KVLinkError | None = None) -> None:
        lanes: Any = session._lanes  # private: nothing else has them
        if error is None and lanes is not None and not lanes.is_ready:
            lanes.pick(session_lanes.LANE_MIN)
        else:
            set_ready(session, error)

    def on_open_then_ready(lanes: Any, lane: LaneReader) -> None:
        on_open(lanes, lane)
        lanes._session.set_ready_in_loop()  # private: whose lanes they are

    def pick_one(lanes: Any, nbytes: int) -> LaneReader | None:
        lane = pick(lanes, nbytes)
        assert lane is not None or not lanes.is_ready
        return lane

    replace(session_lanes, "LANE_MIN", 1)
    if patch is None:  # no test cuts the lanes of such a process
        replace(SessionLanes, "pick", pick_one)
    replace(ControlSession, "set_ready_in_loop", set_ready_later)
    replace(SessionLanes, "_on_open_in_loop", on_open_then_ready)


if __name__ == "__main__":
    force_lanes()
    serve(LinkCommands(), concurrent=True)
    os._exit(0)  # closes nothing: that a process ends without it is part of the tests
