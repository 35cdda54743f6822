"""A peer of the control channel: the sender of its bytes, and the limits of what it sends.

Before its `Hello` it is one of the `UngreetedConnections`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.monitored_socket import BROKEN, MonitoredSocket
from omni_kvlink.connectors.protocol.messages import (
    FetchRange,
    LaneTicket,
    OpenLane,
    TransportAddress,
    unexpected,
)
from omni_kvlink.connectors.protocol.path import path_refusal
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.runtime.owner import owner_refusal, peer_identity
from omni_kvlink.connectors.runtime.turns import TURN, RecentNames

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterable

    from omni_kvlink.connectors.protocol.path import LinkPath
    from omni_kvlink.connectors.protocol.transfer import Transfer

MAX_INBOX, MAX_INBOX_NBYTES = 1 << 14, 64 << 20
"""Messages of one peer, and their bytes, that may be read and not handled; then it is disconnected.

The socket itself has no limit: ZMQ would stop reading from a peer, see `MonitoredSocket`.
"""
MAX_INBOX_AGAIN = 256
"""The same, in the minute after a peer of the same process or host had too many."""
ROUND, SHARE = 2 * TURN, 8
"""Messages that one round of reads handles; and those of each peer that it handles nevertheless."""
MAX_UNGREETED = 128
"""Connections that may be without `Hello` at a time; the oldest is disconnected for another."""
_ACCEPT_SECONDS = 0.1
"""Seconds that ZMQ may take to accept a connection with a descriptor that was given up for it."""
_UCX_TELLS_NOBODY = (
    "UCX authenticates nobody: serve auto://NAME?tcp=HOST:PORT, and inspect it without "
    "trusted_network=True"
)
_NO_KEY = (
    "without keys nobody can show that he is its owner: serve it with keys= and peers=, on "
    "loopback without insecure=True, or by shm:// or zmq+ipc://"
)
_KEY_OF_A_READER = (
    "its key is a reader's: inspect it with the producer's own, keys=NAME.secret and "
    "peers=NAME.public, and put a copy of NAME.public into the producer's peers= directory"
)
_UNREAD_WAIT_MS = 10
"""Time for which a closed connection is checked for unread data; a frozen peer costs this once."""


class RangeSender(ABC):
    """Sends the bytes that the peers of a `ControlListener` fetch, by one transport.

    `connect`, `send_range` and `on_peer_lost` are called in the producer's loop, or with the
    listener's lock held.
    """

    transport: str  # "zmq" or "ucx"
    max_in_flight: int
    """Bytes that may be on their way to one peer; as many more may be queued."""
    needs_address = False
    """Whether a peer must send `TransportAddress` before it can use this sender."""

    @property
    @abstractmethod
    def path(self) -> LinkPath:
        """The path of the bytes that it sends, without lanes."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Names, for `Hello`, of the ways in which a consumer can have bytes."""
        return (self.transport,)

    @abstractmethod
    def direct_refusal(self, device: str) -> str:
        """Return why this sender cannot send tensors of a device; "" if it can."""

    @abstractmethod
    def send_range(self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        """Start sending the bytes of one request; never blocks. WireError if there are none."""

    def connect(self, peer: PeerConnection, address: TransportAddress) -> TransportAddress:
        """Connect to the address that a peer sent; return the address of this side."""
        unexpected(address)

    def open_lane(self, peer: PeerConnection, message: OpenLane) -> LaneTicket:
        """Return what a peer needs to open a lane, or why it gets none."""
        unexpected(message)

    def on_peer_lost(self, peer: PeerConnection) -> None:  # noqa: B027 (optional)
        """Disconnect from a peer whose control connection is gone."""

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the sender's own thread."""
        return False

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        return {}

    def close(self) -> None:  # noqa: B027 (optional)
        """Free the sender's resources; in the producer's loop, or before it has peers."""


class PeerConnection(PeerHandle):
    """A consumer that has completed the handshake, by its identity on the ROUTER socket.

    `duplicate`, a duplicate of its connection's descriptor, stays open after ZMQ has closed the
    connection, so that the reason can be determined; it is None if the process had no descriptor
    left. `sender` sends the consumer's bytes; it is None until the consumer has sent the address
    that the sender needs. `inbox` has its messages that are read and not handled. The path must be
    as in `require`: if that of `sender` is not, `refusal` says why. With `is_bare` no byte of a
    payload is sent beside its offer, over TCP. `has_owner_key`: it has the
    producer's own key, and not only one that the producer admits.
    """

    def __init__(
        self,
        listener: Listener,
        identity: bytes,
        descriptor: int,
        duplicate: socket.socket | None,
        sender: RangeSender | None,
        require: Collection[str] = (),
    ):
        super().__init__(listener)
        self.identity, self.descriptor, self.duplicate = identity, descriptor, duplicate
        self.name = _address_of(duplicate)
        self.inbox: deque[bytes] = deque()
        self.inbox_nbytes = 0
        self.round, self.handled = -1, 0  # of reads, the last; messages that were handled in it
        self.turns = 0  # in a row after which the inbox was not empty
        self.has_owner_key = False
        self.sender: RangeSender | None = None
        self._require = require
        self.is_bare = "rdma" in require
        self.refusal = "" if sender is None else self.use(sender)
        self.pending: deque[FetchRange] = deque()
        self.in_flight = 0  # bytes handed to the sender that have not left yet

    def use(self, sender: RangeSender) -> str:
        """Have this sender send its bytes from now on, or return why its path is not as required.

        A sender that carries lanes changes the path as they open and close.
        """
        reason = path_refusal(sender.path, self._require)
        if not reason:
            self.sender = sender
            self.set_path(sender.path)
        return reason

    def inspect_refusal(self) -> str:
        """Return why it may not list the payloads: it has neither the owner's uid nor key."""
        transport, is_keyed = (
            (self.path.transport, self.path.encrypted) if self.path else ("", False)
        )
        if transport == "ucx":
            return _UCX_TELLS_NOBODY
        if transport == "zmq+ipc" and self.duplicate is not None:
            return owner_refusal(peer_identity(self.duplicate)[1])
        if self.has_owner_key:
            return ""
        return _KEY_OF_A_READER if is_keyed else _NO_KEY

    @property
    def host(self) -> str:
        """The host of the peer, or its process over a Unix socket."""
        return self.name.rpartition(":")[0] or self.name

    def take_kept(self) -> bytes:
        """Return the oldest message that is read and not handled; it counts as handled."""
        data = self.inbox.popleft()
        self.inbox_nbytes -= len(data)
        return data

    def keep(self, data: bytes, floods: RecentNames) -> bool:
        """Keep a message until a turn of this peer; False if it is to be disconnected.

        `floods` are the hosts of peers that had too many; its own is added then.
        """
        self.inbox.append(data)
        self.inbox_nbytes += len(data)
        count = len(self.inbox)
        if count > MAX_INBOX_AGAIN and self.host in floods:
            count += MAX_INBOX
        if count > MAX_INBOX or self.inbox_nbytes > MAX_INBOX_NBYTES:
            floods.add(self.host)
            return False
        return True

    def has_unread_data(self) -> bool:
        """Return whether ZMQ closed the connection at a frame that is too long.

        The rest of such a frame is there to be read, or arrives within 10 ms; a peer that closed
        the connection itself has sent an end of file.
        """
        if self.duplicate is None:
            return False
        poll = select.poll()  # `select` is limited to descriptors below 1024
        poll.register(self.duplicate, select.POLLIN)
        poll.poll(_UNREAD_WAIT_MS)
        try:
            return bool(self.duplicate.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


def _address_of(connection: socket.socket | None) -> str:
    """Return the address of a connection's other end, or its process over a Unix socket."""
    try:
        if connection is None:
            return "unknown"
        if connection.family == socket.AF_UNIX:
            return f"pid {peer_identity(connection)[0]}"
        host, port = connection.getpeername()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    except OSError:  # it has ended
        return "unknown"


class UngreetedConnections(dict[int, None]):
    """Descriptors of connections without `Hello`, the oldest first; `refused` counts refusals.

    One descriptor is kept in reserve, for when the process has no other.
    """

    def __init__(self, refused: Counter[str]):
        super().__init__()
        self._refused = refused
        self.spare, self._given_up_at = -1, 0.0

    def on_event(
        self,
        event: int,
        descriptor: int,
        monitored: MonitoredSocket,
        peers: dict[int, PeerConnection],
    ) -> PeerConnection | None:
        """Handle an event of the socket; return the peer, by descriptor, whose connection ended."""
        peer: PeerConnection | None = None
        if event == zmq.EVENT_ACCEPTED:
            self.add(descriptor, monitored)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self.give_up(peers.values(), monitored)
        elif event == zmq.EVENT_DISCONNECTED:
            peer = peers.pop(descriptor, None)
            if peer is not None:
                if peer.has_unread_data():
                    self._refused["too long"] += 1
            elif descriptor in self:  # ZMQ does not report why each of these was refused
                del self[descriptor]
                self._refused["no greeting"] += 1
            self.take_spare()
        elif event & BROKEN:
            self._refused["handshake"] += 1
        return peer

    def add(self, descriptor: int, monitored: MonitoredSocket) -> None:
        """Keep a connection until its `Hello`, unless there are too many, or no descriptors."""
        if not self.take_spare():
            self._refused["no descriptors"] += 1
            monitored.disconnect(descriptor)
            return
        self[descriptor] = None
        if len(self) > MAX_UNGREETED:
            oldest = next(iter(self))
            del self[oldest]
            self._refused["no greeting"] += 1
            monitored.disconnect(oldest)

    def take_spare(self) -> bool:
        """Keep one descriptor in reserve; return whether there is one."""
        if self.spare < 0:
            with contextlib.suppress(OSError):
                self.spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return self.spare >= 0

    def give_up(self, peers: Iterable[PeerConnection], monitored: MonitoredSocket) -> None:
        """Let ZMQ accept a connection for which there was no descriptor, to disconnect it.

        ZMQ would try again without a pause for as long as the connection is in the queue. If
        another thread took the spare descriptor, a peer's `duplicate` is given up.
        """
        now = time.monotonic()
        if self.spare >= 0:
            self.close()
        elif now < self._given_up_at + _ACCEPT_SECONDS:
            return  # an event from before ZMQ could use what was given up last
        else:
            for peer in peers:
                if peer.duplicate is not None:
                    monitored.close_duplicate(peer.duplicate)
                    peer.duplicate = None
                    break
        self._given_up_at = now

    def close(self) -> None:
        """Close the spare descriptor."""
        spare, self.spare = self.spare, -1
        if spare >= 0:
            os.close(spare)
