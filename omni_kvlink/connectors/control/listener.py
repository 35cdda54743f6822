"""The producer's end of the control channel: a ROUTER, and the senders of the payloads' bytes."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq

from omni_kvlink.connectors.control.monitored_socket import Buffer, RouterSocket
from omni_kvlink.connectors.control.peer import (
    ROUND,
    SHARE,
    PeerConnection,
    RangeSender,
    UngreetedConnections,
)
from omni_kvlink.connectors.control.refusals import Refusals
from omni_kvlink.connectors.control.security import ZapAuth, find_credentials, random_routing_ids
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, EAGER, WINDOW
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Chunk,
    FetchRange,
    Hello,
    Message,
    Offer,
    OpenLane,
    Refused,
    Release,
    TransportAddress,
    decode,
    encode,
    unexpected,
)
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.connectors.runtime.turns import MANY_TURNS, TURN, RecentNames, TurnCounts
from omni_kvlink.errors import ClosedError, KVLinkError, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.control.security import Credentials
    from omni_kvlink.connectors.protocol.path import LinkPath
    from omni_kvlink.connectors.protocol.transfer import Transfer
    from omni_kvlink.connectors.runtime.producer import PooledProducer
    from omni_kvlink.memory.region import Region

MAX_PENDING = 4096
"""Ranges that one peer may have requested and not been sent."""
_REFUSAL_RETRY = 1.0
"""Seconds between attempts to tell a peer that it was refused."""
SenderOpener: TypeAlias = "Callable[[ControlListener], RangeSender]"


class ControlListener(Listener):
    """Accepts peers on a ROUTER socket, and lets its senders send what they fetch.

    `senders` open the senders, the preferred first. A peer gets the sender that needs no address,
    until it sends one.
    """

    has_queue = True

    def __init__(
        self,
        address: ControlAddress,
        options: Options,
        producer: PooledProducer,
        *,
        senders: Sequence[SenderOpener],
    ):
        self.address, self.options, self.producer = address, options, producer
        self.loop = producer.loop
        credentials = find_credentials(address, options)
        self.is_encrypted = credentials is not None
        self._peers: dict[bytes, PeerConnection] = {}
        self._by_descriptor: dict[int, PeerConnection] = {}
        self._disconnected: list[PeerConnection] = []
        self._outbox: deque[tuple[PeerConnection, Message]] = deque()
        self.refused: Counter[str] = Counter()
        self._ungreeted = UngreetedConnections(self.refused)
        self._throttled = TurnCounts()
        self._floods = RecentNames()  # hosts
        self._round, self._handled = -1, 0  # of reads, the last; messages that it has handled
        self._flooders: set[bytes] = set()  # disconnected, while messages of them may be here
        self._context: zmq.Context[Any] = zmq.Context()
        self._senders: list[RangeSender] = []
        try:
            for opener in senders:
                self._senders.append(opener(self))
            self._bind(credentials)
        except BaseException:
            for sender in self._senders:
                sender.close()
            self._context.destroy(0)
            raise
        self.transports = tuple(name for sender in self._senders for name in sender.transports)
        self.paths = tuple(sender.path for sender in self._senders)

    def _bind(self, credentials: Credentials | None) -> None:
        callbacks = (
            lambda identity: identity in self._peers or identity in self._flooders,
            self._on_parts_in_loop,
            self._on_event_in_loop,
            self._on_idle_in_loop,
        )
        with random_routing_ids():
            self._zap_auth = ZapAuth(self._context, credentials, self.loop, self.refused)
            self._socket = RouterSocket(self._context, self.loop, *callbacks, max_frame=MAX_MESSAGE)
        self._refusals = Refusals(
            self.refused, self._socket.send, self.address, self.options.require
        )
        socket = self._socket.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int(self.address.is_ipv6))
        self._zap_auth.protect(socket)
        self.bound_url = self.address.address, self.address.bind(socket)
        self.lock = self._socket.lock

    def readers(self) -> list[PeerHandle]:
        """Return the peers whose handshake is complete."""
        return [*self._peers.values()]

    def find_sender(self, *, needs_address: bool) -> RangeSender | None:
        """Return the first sender that needs a peer's address, or that needs none."""
        return next((s for s in self._senders if s.needs_address is needs_address), None)

    def open(self) -> None:
        """Start accepting peers; in the producer's loop."""
        self._ungreeted.take_spare()
        self._zap_auth.watch()
        self._socket.watch()

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        return {
            "address": f"{self.address.protocol}://{self.bound_url[1]}",
            "readers": len(self._peers),
            "refused": dict(self.refused),
            "throttled": self._throttled.stats(),
            **{s.transport: stats for s in self._senders if (stats := s.stats())},
        }

    def direct_refusal(self, device: str) -> str:
        """Return why tensors of a device cannot be sent to every peer; "" if they can."""
        return next(filter(None, (sender.direct_refusal(device) for sender in self._senders)), "")

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is a sender's own thread."""
        return any(sender.is_own_thread for sender in self._senders)

    def send(self, peer: PeerConnection, message: Message) -> None:
        """Queue a message for a peer; any thread, never blocks."""
        self._outbox.append((peer, message))
        self.loop.call(self._flush_in_loop)

    def send_all(self, peer: PeerConnection, messages: Sequence[Message]) -> None:
        """Queue several messages for a peer; any thread, never blocks."""
        self._outbox.extend((peer, message) for message in messages)
        self.loop.call(self._flush_in_loop)

    def flush(self) -> None:
        """Send queued messages in this thread, unless another thread is using the socket."""
        try:
            if self._outbox and self.lock.acquire(blocking=False):
                self._send_queued()
                self.lock.release()
                self.loop.call(self._socket.drain)
        except BaseException:  # an interrupt: the loop goes on
            with contextlib.suppress(RuntimeError):  # it was not acquired, or is released
                self.lock.release()
            self.loop.call(self._flush_in_loop)
            self.loop.call(self._socket.drain)
            raise

    def _flush_in_loop(self) -> None:
        if self._outbox:
            with self.lock:
                self._send_queued()
            self._socket.drain()

    def _send_queued(self) -> None:
        """Send in the order of the calls of `send`, whichever threads made them.

        With the lock held. After an interrupt a message may be sent twice, as readers allow.
        """
        while self._outbox:
            peer, message = self._outbox[0]
            try:
                if self._peers.get(peer.identity) is peer:
                    self.send_frames(peer, self._frames(peer, message))
            except KVLinkError:  # its payload has ended; those behind it are sent
                self._outbox.popleft()
                raise
            self._outbox.popleft()

    def _frames(self, peer: PeerConnection, message: Message) -> list[Buffer]:
        """Return a message as sent; beside an offer its small payload, or a stream's draft."""
        if not isinstance(message, Offer):
            return [encode(message)]
        if message.inline:
            offer = Offer(message.get_id, message.epoch, message.location)
            return [encode(offer)] if peer.is_bare else [encode(offer), message.inline]
        start, stop = message.first
        transfer = None
        if stop - start <= EAGER and not peer.is_bare:
            transfer = self.producer.find_leased(peer, message.get_id, message.epoch)
        if transfer is None:
            return [encode(message)]
        return [encode(message), self.producer.piece(transfer, start, stop).read()]

    def send_frames(
        self, peer: PeerConnection, frames: Sequence[Buffer], *, copy: bool = True
    ) -> None:
        """Send a message now, with the lock held; a peer that cannot take it is disconnected."""
        try:
            self._socket.send([peer.identity, *frames], copy=copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self.refuse(peer, "too slow", "too slow")
            else:
                self._disconnected.append(peer)
                self.loop.call(self._on_idle_in_loop)

    def _on_parts_in_loop(self, identity: bytes, parts: Sequence[Any]) -> None:
        """Handle a message, or keep it if its peer has used up its turn in this round of reads."""
        peer = self._peers.get(identity)
        if peer is None and identity in self._flooders:
            pass
        elif peer is None or len(parts) != 1:
            self._handle_in_loop(peer, identity, parts)
        elif peer.inbox or not self._has_turn_in_loop(peer):
            if not peer.inbox:
                peer.turns = 0
                self._throttle_in_loop(peer)
            if not peer.keep(parts[0], self._floods):
                self.refuse(peer, "it sent more than can be kept", "flood")
                self._flooders.add(peer.identity)
                self._socket.disconnect(peer.descriptor)  # it may not heed the refusal
        else:
            self._handle_in_loop(peer, identity, parts)
        if self._outbox:  # also of a `put`, which left it to the thread that has the lock
            self._send_queued()

    def _has_turn_in_loop(self, peer: PeerConnection) -> bool:
        """Count a message of a peer; return whether this round of reads handles it."""
        if self._round != self._socket.rounds:
            self._round, self._handled = self._socket.rounds, 0
        if peer.round != self._round:
            peer.round, peer.handled = self._round, 0
        if peer.handled >= (TURN if self._handled < ROUND else SHARE):
            return False
        peer.handled += 1
        self._handled += 1
        return True

    def _handle_in_loop(
        self, peer: PeerConnection | None, identity: bytes, parts: Sequence[Any]
    ) -> None:
        """Handle a message; one that its peer must not send removes that peer."""
        try:
            if len(parts) != 1:
                raise WireError("a message has one part")
            if peer is None:
                self._on_hello_in_loop(identity, parts[0], decode(parts[0].bytes))
            else:
                self._on_message_in_loop(peer, decode(parts[0]))
        except WireError:
            self.refused["bad message"] += 1
            if peer is not None:
                self.refuse(peer, "it sent what is no message of this protocol")

    def _throttle_in_loop(self, peer: PeerConnection) -> None:
        peer.turns += 1
        self._throttled.add(peer.name)
        self.loop.defer(partial(self._take_turn_in_loop, peer), paused=peer.turns > MANY_TURNS)

    def _take_turn_in_loop(self, peer: PeerConnection) -> None:
        """Handle messages that were kept."""
        with self.lock:
            for _ in range(min(TURN, len(peer.inbox))):
                self._handle_in_loop(peer, peer.identity, [peer.take_kept()])
                if not peer.inbox:
                    break  # also when it was refused
            if peer.inbox:
                self._throttle_in_loop(peer)
            self._send_queued()
        self._socket.drain()

    def _on_message_in_loop(self, peer: PeerConnection, message: Message) -> None:
        if isinstance(message, TransportAddress):
            self._on_address_in_loop(peer, message)
        elif isinstance(message, Refused):
            self.refuse_path(peer.name, message.reason)
        elif peer.sender is None and peer.refusal:
            self.refuse_path(peer.name, peer.refusal)
            self.refuse(peer, peer.refusal)
        elif peer.sender is None:
            scheme = self.address.url.partition(":")[0]
            self.refuse(peer, f"this link is {scheme}://, connect with that scheme", "bad message")
        elif isinstance(message, FetchRange):
            self._on_fetch_in_loop(peer, peer.sender, message)
        elif isinstance(message, OpenLane):
            self._outbox.append((peer, peer.sender.open_lane(peer, message)))
        else:
            if isinstance(message, Release) and peer.pending:
                pending = (fetch for fetch in peer.pending if fetch.get_id != message.get_id)
                peer.pending = deque(pending)
            self.producer.handle(peer, message)

    def _on_hello_in_loop(self, identity: bytes, frame: zmq.Frame, message: Message) -> None:
        if not isinstance(message, Hello):
            raise WireError("the first message must be Hello")
        if refusal := self._refusals.find(message, len(self._peers), self.paths):
            self._refusals.refuse(identity, refusal)
            return
        # Handle the end of the connection that had this descriptor before.
        self._socket.read_events()
        descriptor = int(frame.get(zmq.SRCFD))
        former = self._by_descriptor.get(descriptor)
        if former is None and descriptor not in self._ungreeted:
            return  # disconnected already
        if former is not None and former.identity == identity:
            return  # it was refused, and is to disconnect
        duplicate = self._socket.duplicate(descriptor)
        sender = self.find_sender(needs_address=False)
        require = {*self.options.require, *(message.require or ())}
        peer = PeerConnection(self, identity, descriptor, duplicate, sender, require)
        peer.has_owner_key = self._zap_auth.is_owner(frame)
        self._peers[identity] = peer
        try:
            self._socket.send([identity, encode(self.producer.hello)])
        except zmq.ZMQError:  # disconnected; the descriptor may be that of a later connection
            del self._peers[identity]
            self._socket.close_duplicate(peer.duplicate)
            return
        if former is not None:  # its `Hello` came after its end, and was taken for this one's
            self._drop_connection_in_loop(former)
        self._ungreeted.pop(descriptor, None)
        self._by_descriptor[descriptor] = peer

    def _drop_connection_in_loop(self, peer: PeerConnection) -> None:
        """Remove a peer whose connection has ended, as soon as its last messages are read."""
        self._socket.close_duplicate(peer.duplicate)
        self._disconnected.append(peer)

    def _on_address_in_loop(self, peer: PeerConnection, address: TransportAddress) -> None:
        sender = self.find_sender(needs_address=True)
        if sender is None:
            unexpected(address)
        if peer.sender is sender:
            raise WireError("a peer sends its address once")
        try:
            if reason := peer.use(sender):
                self.refuse_path(peer.name, reason)
                raise ClosedError(reason)
            answer = sender.connect(peer, address)
        except ClosedError as error:
            self.refuse(peer, str(error))
        else:
            self.send_frames(peer, [encode(answer)])

    def _on_event_in_loop(self, event: int, value: int) -> None:
        ended = self._ungreeted.on_event(event, value, self._socket, self._by_descriptor)
        if ended is not None:
            self._drop_connection_in_loop(ended)

    def _on_idle_in_loop(self) -> None:
        """Remove disconnected peers, when their last messages have been read and handled."""
        with self.lock:
            ended, self._disconnected = self._disconnected, []
            for peer in ended:
                if peer.inbox:
                    self._disconnected.append(peer)  # until its turns have come
                else:
                    self._flooders.discard(peer.identity)
                    self._remove(peer)
        self._flush_in_loop()

    def _remove(self, peer: PeerConnection) -> None:
        if self._peers.get(peer.identity) is peer:
            del self._peers[peer.identity]
            peer.pending.clear()
            peer.inbox.clear()
            self.producer.on_peer_lost(peer)
        if peer.sender is not None:
            peer.sender.on_peer_lost(peer)

    def refuse(self, peer: PeerConnection, reason: str, *counters: str) -> None:
        """Remove a peer and tell it to disconnect; `counters` count it. With the lock held."""
        self.refused.update(counters)
        self._remove(peer)
        self._refusals.refuse(peer.identity, reason)

    def tick(self, now: float) -> float:
        """Send refusals that wait; return when to be called again (monotonic seconds)."""
        if self._refusals:
            with self.lock:
                self._refusals.send()
            self._socket.drain()
        return now + _REFUSAL_RETRY if self._refusals else float("inf")

    def _on_fetch_in_loop(
        self, peer: PeerConnection, sender: RangeSender, fetch: FetchRange
    ) -> None:
        nbytes = fetch.stop - fetch.start
        if nbytes <= 0 or len(peer.pending) >= MAX_PENDING:
            raise WireError("a peer fetches bytes, and only so many ranges at once")
        pending = sum(each.stop - each.start for each in peer.pending)
        if nbytes + pending > sender.max_in_flight:
            raise WireError("a peer fetches no more than its window")
        peer.pending.append(fetch)
        self._send_pending_in_loop(peer, sender)

    def _send_pending_in_loop(self, peer: PeerConnection, sender: RangeSender) -> None:
        """Send requested ranges until enough bytes are on their way."""
        while peer.pending and peer.in_flight < sender.max_in_flight:
            fetch = peer.pending.popleft()
            transfer = self.producer.find_leased(peer, fetch.get_id, fetch.epoch)
            if transfer is None:
                with self.producer.lock:
                    self.producer.transfers.counters["stale"] += 1
                continue
            try:
                sender.send_range(peer, fetch, transfer)
            except WireError as error:
                if self.producer.find_leased(peer, fetch.get_id, fetch.epoch) is None:
                    continue  # the transfer ended meanwhile; a direct put's tensors are gone
                self.refuse(peer, f"it asked for {error}", "bad message")
                return

    def borrow(
        self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer, start: int, stop: int
    ) -> Region:
        """Return bytes of a payload to send; their memory is kept until the region is freed."""
        claim, on_sent = (peer, fetch.get_id), partial(self._on_sent_in_loop, peer)
        piece = self.producer.lend_piece(transfer, claim, start, stop, on_sent)
        peer.in_flight += piece.nbytes
        return piece

    def _on_sent_in_loop(self, peer: PeerConnection, nbytes: int) -> None:
        with self.lock:
            peer.in_flight -= nbytes
            if not peer.pending or peer.sender is None:
                return
            self._send_pending_in_loop(peer, peer.sender)
        self._socket.drain()

    def close(self) -> None:
        """Send the last messages, then close sockets and senders; in the producer's loop, once."""
        if self._context.closed:
            return
        self._flush_in_loop()
        for peer in self._by_descriptor.values():
            self._socket.close_duplicate(peer.duplicate)
        self._socket.close()
        self._ungreeted.close()
        self._zap_auth.close()
        for peer in self._peers.values():
            peer.pending.clear()
        self._peers.clear()
        self.address.close(self._context)
        # After the last messages: a peer that UCX lost first would not wait for them.
        for sender in self._senders:
            sender.close()


class ChunkSender(RangeSender):
    """Sends ranges over the control channel, without a copy, as messages of at most 4 MiB."""

    transport = "zmq"
    max_in_flight = 2 * WINDOW

    def __init__(self, listener: ControlListener):
        self._listener = listener

    @property
    def path(self) -> LinkPath:
        """The path of the control channel."""
        return self._listener.address.path(is_encrypted=self._listener.is_encrypted)

    def direct_refusal(self, device: str) -> str:
        """Return why tensors of a device cannot be sent; "" for host memory."""
        return "" if device == "cpu" else "ZMQ sends from host memory only"

    def send_range(self, peer: PeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        """Send the bytes of one request; see `RangeSender`."""
        for start in range(fetch.start, fetch.stop, CHUNK):
            stop = min(fetch.stop, start + CHUNK)
            piece = self._listener.borrow(peer, fetch, transfer, start, stop)
            header = encode(Chunk(fetch.get_id, fetch.epoch, start))
            self._listener.send_frames(peer, [header, piece.view()], copy=False)
