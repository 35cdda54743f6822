"""The producer's end of `shm://name`: accepts readers, and passes memory files to them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.messages import (
    PROTOCOL,
    Hello,
    Memory,
    Message,
    Offer,
    Refused,
    Release,
    Retire,
    common_version,
)
from omni_kvlink.connectors.protocol.path import SHM_PATH, path_refusal
from omni_kvlink.connectors.runtime.event_loop import READ, WRITE, readable_pidfd
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.runtime.owner import owner_refusal, peer_identity
from omni_kvlink.connectors.runtime.turns import MANY_TURNS, TURN, TurnCounts
from omni_kvlink.connectors.shm import rendezvous
from omni_kvlink.connectors.shm.channel import Inbox, ShmChannel
from omni_kvlink.errors import ClosedError, ConnectorError, WireError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.runtime.producer import PooledProducer

MAX_PEERS = 1024
MAX_GREETING = 128
"""Connections that may be without a Hello; one more disconnects the oldest."""
_PASSED_FIRST = 1 << 30
"""Bytes of memory that a reader is passed when it connects, before it asks for a payload in it.

It maps them while nobody waits. More would be mapped by readers that need little of it.
"""
_ACCEPT_PAUSE = 1.0
"""Seconds without accepting, after it failed for want of a descriptor and none was closed here."""


class ShmPeerConnection(PeerHandle):
    """A connected consumer. `pidfd` is readable when its process ends; -1 if there is none.

    `turns`: how many of its turns in a row ended early; after each, the loop has deferred the next.
    """

    def __init__(
        self,
        listener: ShmListener,
        channel: ShmChannel,
        identity: tuple[int, int],
        pidfd: int,
        refusal: str,
    ):
        super().__init__(listener)
        pid, self._uid = identity
        self.channel, self.pidfd, self.name = channel, pidfd, f"pid {pid}"
        self.turns = 0
        self.refusal = refusal  # why it will be refused; "" if it may stay
        self.arenas: set[int] = set()  # whose descriptors it was passed
        self.hello: Hello | None = None  # its first message, once the handshake is complete

    def inspect_refusal(self) -> str:
        """Return why a user that may read payloads may not list them."""
        return owner_refusal(self._uid)


class ShmListener(Listener):
    """The producer's side; passes memory files, which have no names and so are never left over.

    A peer that is disconnected while it may still read leased memory is `_detached`: until it has
    released everything, or its process ends.
    """

    transports, paths = ("shm",), (SHM_PATH,)

    def __init__(self, name: str, options: Options, producer: PooledProducer):
        self._producer, self._loop = producer, producer.loop
        self._allow_uids = options.allow_uids
        self._path = rendezvous.socket_path(name, options.directory, self._allow_uids)
        self._peers: set[ShmPeerConnection] = set()
        self._greeting: dict[ShmPeerConnection, None] = {}  # those without a Hello, oldest first
        self._detached: set[ShmPeerConnection] = set()
        self.refused: Counter[str] = Counter()
        self._throttled = TurnCounts()
        self._inbox = Inbox()
        self._accept_again = float("inf")  # when a pause ends (`time.monotonic`)
        self._listener = rendezvous.NamedListener(self._path, is_shared=bool(self._allow_uids))

    def open(self) -> None:
        """Accept connections from now on."""
        self._loop.watch(self._listener.sock, READ, self._accept_in_loop)

    def tick(self, now: float) -> float:
        """Accept again when a pause has ended."""
        if self._accept_again <= now:
            self._accept_again = float("inf")
            self.open()
        return self._accept_again

    def stats(self) -> dict[str, Any]:
        """Return the socket, readers, refusals by reason, floods, and bytes of detached readers."""
        detached, pinned = Counter[str](), self._producer.pinned()
        for peer in list(self._detached):
            detached[peer.name] += pinned[peer]
        return {
            "socket": self._path,
            "readers": len(self._peers),
            "refused": dict(self.refused),
            "throttled": self._throttled.stats(),
            "detached": dict(detached),
        }

    def readers(self) -> list[PeerHandle]:
        """Return the peers that have completed the handshake."""
        return [peer for peer in list(self._peers) if peer.hello is not None]

    def send(self, peer: ShmPeerConnection, message: Message) -> None:
        """Send a message; before an offer, the memory file that it refers to."""
        if isinstance(message, Offer) and not message.inline:
            self._pass(peer, message.location.arena)
        peer.channel.send(message)

    def send_all(self, peer: ShmPeerConnection, messages: Sequence[Message]) -> None:
        """Send messages in one; before it, the memory files that its offers refer to."""
        for message in messages:
            if isinstance(message, Offer) and not message.inline:
                self._pass(peer, message.location.arena)
        peer.channel.send_all(messages)

    def pass_arena(self, arena: int) -> None:
        """Have the connected peers map an arena before anything is offered in it."""
        for peer in self._peers:
            if peer.hello is not None:
                self._pass_ahead_in_loop(peer, arena)

    def retire_arena(self, arena: int) -> None:
        """Have the peers unmap an arena."""
        self._loop.call(partial(self._send_retire_in_loop, arena))

    def close(self) -> None:
        """Disconnect every peer and remove the socket."""
        for peer in list(self._peers):
            peer.channel.flush()
            self._disconnect_in_loop(peer)
        for peer in list(self._detached):
            self._reap_in_loop(peer)
        self._accept_again = float("inf")
        self._loop.unwatch(self._listener.sock)
        self._listener.close()

    def _pass(self, peer: ShmPeerConnection, arena: int) -> None:
        """Send a peer the memory file of an arena, once; the producer's lock is held."""
        if arena not in peer.arenas:
            mapping = self._producer.pool.mapping(arena)
            peer.channel.send(Memory(arena, mapping.nbytes), mapping)
            peer.arenas.add(arena)  # last: after an interrupt it is sent again

    def _pass_ahead_in_loop(self, peer: ShmPeerConnection, arena: int) -> None:
        # With the lock: no offer in this arena overtakes it.
        with self._producer.lock, contextlib.suppress(ClosedError):
            self._pass(peer, arena)

    def _send_retire_in_loop(self, arena: int) -> None:
        for peer in self._peers:
            if arena in peer.arenas:
                peer.arenas.discard(arena)
                peer.channel.send(Retire(arena))

    def _accept_in_loop(self, events: int) -> None:
        """Accept one connection: without a descriptor, a try when there is none fails, too."""
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._pause_in_loop()  # the connection stays in the kernel's queue
            return
        try:
            self._add_peer_in_loop(sock)
        except OSError:
            self._pause_in_loop()
            sock.close()  # it will try again

    def _pause_in_loop(self) -> None:
        """Accept nothing for a while: there is no free descriptor, and trying again would spin."""
        self.refused["accept failed"] += 1
        self._loop.unwatch(self._listener.sock)
        self._accept_again = time.monotonic() + _ACCEPT_PAUSE

    def _add_peer_in_loop(self, sock: socket.socket) -> None:
        """Add a connection; OSError if there is no descriptor for its process."""
        identity = peer_identity(sock)
        refusal = rendezvous.refusal(sock, self._allow_uids, "read from")
        if refusal:
            self.refused["other user"] += 1
            channel = ShmChannel(sock, lambda: None)
            channel.send(Refused(refusal, PROTOCOL))
            channel.close()
            return
        pidfd = readable_pidfd(identity[0])
        is_full = len(self._peers) >= MAX_PEERS
        refusal = f"{MAX_PEERS} readers are connected already" if is_full else ""
        channel = ShmChannel(sock, lambda: self._loop.call(partial(self._flush_in_loop, peer)))
        peer = ShmPeerConnection(self, channel, identity, pidfd, refusal)
        self._peers.add(peer)
        self._greeting[peer] = None
        self._watch_in_loop(peer)
        if peer in self._peers and peer.pidfd >= 0:
            try:
                self._loop.watch(peer.pidfd, READ, lambda events: self._on_exit_in_loop(peer))
            except ConnectorError:
                self.refused["accept failed"] += 1
                self._disconnect_in_loop(peer)
        if len(self._greeting) > MAX_GREETING:
            self.refused["no hello"] += 1
            self._disconnect_in_loop(next(iter(self._greeting)))

    def _flush_in_loop(self, peer: ShmPeerConnection) -> None:
        """Send queued messages when the socket has space; a peer that never reads is detached."""
        if peer not in self._peers:
            return
        if peer.channel.is_backlog_full:
            self.refused["too slow"] += 1
            self._finish_in_loop(peer)
            return
        peer.channel.flush()
        self._watch_in_loop(peer)

    def _watch_in_loop(self, peer: ShmPeerConnection) -> None:
        """Wait for what the peer sends, but for its next turn; and for space, if messages wait.

        A peer that the system has no memory to wait for is disconnected; it connects again.
        """
        reads = 0 if peer.turns else READ
        events = reads | (WRITE if peer.channel.has_backlog else 0)
        try:
            self._loop.watch(peer.channel.fd, events, partial(self._on_events_in_loop, peer))
        except ConnectorError:
            self.refused["accept failed"] += 1
            self._disconnect_in_loop(peer)

    def _on_events_in_loop(self, peer: ShmPeerConnection, events: int) -> None:
        if events & WRITE:
            self._flush_in_loop(peer)
        if events & READ and not peer.turns:
            self._take_turn_in_loop(peer)

    def _take_turn_in_loop(self, peer: ShmPeerConnection) -> None:
        """Receive what one turn takes; the rest stays in the socket, which holds up its sender."""
        self._receive_in_loop(peer, TURN)
        has_more = not peer.channel.is_drained and peer.channel.has_unread
        former, peer.turns = peer.turns, peer.turns + 1 if has_more else 0
        if peer.turns:
            self._throttled.add(peer.name)
            self._loop.defer(partial(self._take_turn_in_loop, peer), paused=peer.turns > MANY_TURNS)
        if bool(peer.turns) is not bool(former):
            self._watch_in_loop(peer)

    def _receive_in_loop(self, peer: ShmPeerConnection, turn: float) -> None:
        try:
            if peer in self._peers and peer.hello is None:
                for messages in peer.channel.receive_many(self._inbox, 1):
                    self._on_hello_in_loop(peer, messages)
            for messages in peer.channel.receive_many(self._inbox, turn):
                if peer not in self._peers:
                    messages = [m for m in messages if isinstance(m, Release)]
                self._producer.handle(peer, *messages)
        except ConnectionError:
            self._disconnect_in_loop(peer)
        except WireError:
            self.refused["bad message"] += 1
            self._disconnect_in_loop(peer)

    def _on_hello_in_loop(self, peer: ShmPeerConnection, messages: Sequence[Message]) -> None:
        message = messages[0] if len(messages) == 1 else None
        if not isinstance(message, Hello):
            raise WireError("the first message must be Hello")
        if refusal := path_refusal(SHM_PATH, message.require or ()):
            self.refuse_path(peer.name, refusal)
            peer.channel.send(Refused(refusal, PROTOCOL))
            raise ConnectionError("refused")
        if peer.refusal or common_version(message.versions) is None:
            # Not before its Hello was read: closing a socket with unread messages loses ours.
            self.refused["refused" if peer.refusal else "other version"] += 1
            peer.channel.send(Refused(peer.refusal or "no common version", PROTOCOL))
            raise ConnectionError("refused")
        peer.hello = message
        peer.set_path(SHM_PATH)
        self._greeting.pop(peer, None)
        peer.channel.send(self._producer.hello)
        for arena in self._producer.pool.find_first(_PASSED_FIRST):
            self._pass_ahead_in_loop(peer, arena)

    def _on_exit_in_loop(self, peer: ShmPeerConnection) -> None:
        """The peer's process ended. A child of it may hold the socket open: read what it sent."""
        if peer in self._peers:
            peer.channel.finish_receiving()
            self._receive_in_loop(peer, float("inf"))
        self._disconnect_in_loop(peer)
        self._reap_in_loop(peer)

    def _finish_in_loop(self, peer: ShmPeerConnection) -> None:
        """Send a peer nothing more. It learns that, and sends a Release of all that it holds."""
        if self._detach_in_loop(peer):
            peer.channel.finish()
            self._watch_in_loop(peer)
        else:
            self._disconnect_in_loop(peer)

    def _disconnect_in_loop(self, peer: ShmPeerConnection) -> None:
        """Close a connection; until its process ends, the peer may still read what it mapped."""
        may_read = self._detach_in_loop(peer)
        self._loop.unwatch(peer.channel.fd)
        peer.channel.close()
        if not may_read or peer.pidfd < 0:
            self._reap_in_loop(peer)

    def _detach_in_loop(self, peer: ShmPeerConnection) -> bool:
        """Lease a peer nothing more; return whether it may still read what it was leased."""
        if peer in self._peers:
            self._peers.discard(peer)
            self._greeting.pop(peer, None)
            self._detached.add(peer)
        return self._producer.on_disconnect(peer)

    def _reap_in_loop(self, peer: ShmPeerConnection) -> None:
        """A disconnected peer can read no more: the memory of its leases may be reused."""
        if peer in self._detached:
            self._detached.discard(peer)
            self._loop.unwatch(peer.channel.fd)
            peer.channel.close()
            if peer.pidfd >= 0:
                self._loop.unwatch(peer.pidfd)
                os.close(peer.pidfd)
            self._producer.on_peer_lost(peer)
            if self._accept_again < float("inf"):
                self._accept_again = 0.0  # descriptors were closed
