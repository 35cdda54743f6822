"""Accepts the lanes of a listener's peers: connections with a ticket of the control channel."""

from __future__ import annotations

import hmac
import logging
import os
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.connectors.control.lane import (
    GREETING,
    KEY,
    MAGIC,
    TICKET,
    TICKET_NAME,
    LaneThreads,
    host_of,
    set_lane_options,
)
from omni_kvlink.connectors.control.lane_sender import LaneSender
from omni_kvlink.connectors.protocol.messages import LaneTicket, shorten
from omni_kvlink.connectors.runtime.event_loop import READ
from omni_kvlink.errors import ConnectorError, KVLinkError, WireError
from omni_kvlink.system import process

if TYPE_CHECKING:
    from omni_kvlink.connectors.control.listener import ControlListener
    from omni_kvlink.connectors.control.peer import PeerConnection
    from omni_kvlink.connectors.protocol.messages import OpenLane

_log = logging.getLogger("omni_kvlink")
MAX_UNADMITTED = 128
"""Connections that may be without a ticket at a time; the oldest is closed for another."""
MAX_LANES = 256
"""Lanes of all peers together: each has a buffer."""


class LaneListener:
    """Accepts lanes at the addresses where peers have reached the control channel.

    No port is open before a peer has asked for a lane. A ticket opens one lane, for the peer that
    it was sent to. Methods are for the producer's loop, with the control listener's lock held.
    """

    def __init__(self, control: ControlListener, count: int, *, is_encrypted: bool):
        self.control, self._loop = control, control.loop
        self._count, self._is_encrypted = count, is_encrypted
        self._threads = LaneThreads(count)
        self._listening: dict[str, socket.socket] = {}  # by local address
        self._unadmitted: dict[int, tuple[socket.socket, bytearray]] = {}  # by descriptor
        self._tickets: dict[bytes, tuple[PeerConnection, LaneTicket]] = {}  # by name
        self._lanes: dict[tuple[PeerConnection, int], LaneSender] = {}
        self._refused, self._ended = control.refused, 0

    def ticket(self, peer: PeerConnection, message: OpenLane) -> LaneTicket:
        """Return what a peer needs to open a lane, or why it gets none.

        WireError if it has a lane or a ticket of this number.
        """
        self._end(peer, message.instead_of)  # that may not have come here yet
        self._forget_tickets(peer, message.instead_of)  # and this one was never used
        number = message.lane
        expected = {ticket.lane for one, ticket in self._tickets.values() if one is peer}
        if not number or number in expected or (peer, number) in self._lanes:
            raise WireError(f"a peer opens lane {number} once")
        open_lanes = [each for one, each in self._lanes if one is peer]
        if len(expected) + len(open_lanes) >= self._count:
            return LaneTicket(number, reason=f"the producer has lanes={self._count}")
        if len(self._lanes) + len(self._tickets) >= MAX_LANES:
            return LaneTicket(number, reason=f"the producer has {MAX_LANES} lanes already")
        try:
            port = self._listen(peer)
        except (OSError, KVLinkError) as error:
            return LaneTicket(number, reason=shorten(f"the producer cannot listen: {error}"))
        key = os.urandom(KEY) if self._is_encrypted else b""
        ticket = LaneTicket(number, port, os.urandom(TICKET), key)
        self._tickets[ticket.ticket[:TICKET_NAME]] = peer, ticket
        return ticket

    def find(self, peer: PeerConnection, number: int) -> LaneSender | None:
        """Return a lane of a peer; None if it has ended."""
        return self._lanes.get((peer, number))

    def on_peer_lost(self, peer: PeerConnection) -> None:
        """Close the lanes of a peer, and forget its tickets."""
        self._forget_tickets(peer)
        for key in [key for key in self._lanes if key[0] is peer]:
            self._lanes.pop(key).close()

    def stats(self) -> dict[str, Any]:
        """Return how many lanes are open and have ended, as JSON values."""
        return {"open": len(self._lanes), "ended": self._ended}

    def close(self) -> None:
        """Close everything; blocks until the threads have ended."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._tickets.clear()
        self._threads.close()
        for connection, _ in self._unadmitted.values():
            self._loop.unwatch(connection)
            connection.close()
        self._unadmitted.clear()
        self._stop_listening()

    def _forget_tickets(self, peer: PeerConnection, number: int | None = None) -> None:
        """Forget the tickets of a peer, or the one of a lane of this number."""
        for name, (one, ticket) in list(self._tickets.items()):
            if one is peer and number in (None, ticket.lane):
                del self._tickets[name]

    def _listen(self, peer: PeerConnection) -> int:
        """Return the port at the address where a peer has reached this side."""
        host = "" if peer.duplicate is None else host_of(peer.duplicate.fileno(), is_own=True)
        if not host:
            raise OSError("no descriptor is left: raise `ulimit -n`")
        listening = self._listening.get(host)
        if listening is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, 0), family=family, backlog=MAX_UNADMITTED)
            process.call_in_children(listening, socket.socket.close)  # it would outlive this one
            listening.setblocking(False)
            try:
                self._loop.watch(listening, READ, partial(self._on_connection_in_loop, listening))
            except ConnectorError:
                self._loop.unwatch(listening)
                listening.close()
                raise
            self._listening[host] = listening
        return int(listening.getsockname()[1])

    def _stop_listening(self) -> None:
        listening, self._listening = self._listening, {}
        for each in listening.values():
            self._loop.unwatch(each)
            each.close()

    def _on_connection_in_loop(self, listening: socket.socket, events: int) -> None:
        with self.control.lock:
            self._accept(listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection; without a descriptor for it listen no more, until asked again."""
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._refused["no descriptors"] += 1
            self._stop_listening()
            return
        process.call_in_children(connection, socket.socket.close)
        connection.setblocking(False)
        if len(self._unadmitted) >= MAX_UNADMITTED:
            self._refuse(next(iter(self._unadmitted)), "no ticket")
        descriptor = connection.fileno()
        self._unadmitted[descriptor] = connection, bytearray()
        try:
            self._loop.watch(connection, READ, partial(self._on_greeting_in_loop, descriptor))
        except ConnectorError as error:
            _log.warning("a lane was closed at once: %s", error)
            self._refuse(descriptor, "failed")

    def _on_greeting_in_loop(self, descriptor: int, events: int) -> None:
        with self.control.lock:
            self._read_greeting(descriptor)

    def _read_greeting(self, descriptor: int) -> None:
        connection, greeting = self._unadmitted[descriptor]
        try:
            received = connection.recv(GREETING - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        greeting += received
        if not received or not MAGIC.startswith(greeting[: len(MAGIC)]):
            self._refuse(descriptor, "no ticket")
        elif len(greeting) == GREETING:
            self._admit(descriptor, bytes(greeting[len(MAGIC) :]))

    def _admit(self, descriptor: int, ticket: bytes) -> None:
        """Open a lane, if its ticket is a valid one, which is used up by this."""
        peer, expected = self._tickets.get(ticket[:TICKET_NAME], (None, LaneTicket(0)))
        if peer is None or not hmac.compare_digest(expected.ticket, ticket):
            self._refuse(descriptor, "wrong ticket")
            return
        del self._tickets[ticket[:TICKET_NAME]]
        connection, _ = self._unadmitted.pop(descriptor)
        self._loop.unwatch(connection)
        try:
            set_lane_options(connection)
            on_lost = partial(self._on_lost, peer, expected.lane)
            thread = self._threads.take_loop()
            lane = LaneSender(connection, thread, expected.key, on_lost)
        except (OSError, KVLinkError) as error:
            self._refused["failed"] += 1
            _log.warning("a lane was closed at once: %s", error)
            connection.close()
            return
        self._lanes[peer, expected.lane] = lane
        self._count_open(peer)

    def _refuse(self, descriptor: int, reason: str) -> None:
        self._refused[reason] += 1
        connection, _ = self._unadmitted.pop(descriptor)
        self._loop.unwatch(connection)
        connection.close()

    def _on_lost(
        self, peer: PeerConnection, number: int, lane: LaneSender, error: Exception
    ) -> None:
        self._loop.call(partial(self._on_lost_in_loop, peer, number))

    def _on_lost_in_loop(self, peer: PeerConnection, number: int) -> None:
        with self.control.lock:
            self._end(peer, number)

    def _end(self, peer: PeerConnection, number: int) -> None:
        lane = self._lanes.pop((peer, number), None)
        if lane is not None:
            lane.close()
            self._ended += 1
            self._count_open(peer)

    def _count_open(self, peer: PeerConnection) -> None:
        """Have the peer's path say how many lanes are open."""
        if peer.path is not None:
            lanes = sum(one is peer for one, _ in self._lanes)
            peer.set_path(msgspec.structs.replace(peer.path, lanes=lanes))
