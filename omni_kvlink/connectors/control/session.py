"""One connection over the control channel, by a DEALER; it fetches payloads into own memory.

One long file: the loop and a thread whose get waits take turns at one socket and one table of gets.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from omni_kvlink.connectors.control.lane import host_of
from omni_kvlink.connectors.control.lane_reader import LaneRange
from omni_kvlink.connectors.control.monitored_socket import BROKEN, MonitoredSocket
from omni_kvlink.connectors.control.remote_get import FetchingSession, InboundTransfer, RemoteGet
from omni_kvlink.connectors.control.session_lanes import SessionLanes
from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchLimits, FetchQueue
from omni_kvlink.connectors.protocol.get_table import GetLease, GetTable, get_error
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Cancel,
    Chunk,
    Committed,
    Failed,
    FetchRange,
    LaneTicket,
    Layer,
    Message,
    Offer,
    Refused,
    Release,
    Status,
    decode,
    encode,
    own_hello,
    shorten,
    unexpected,
)
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.consumer import check_hello, closed_here
from omni_kvlink.connectors.runtime.event_loop import LeadingReceiver, Wake
from omni_kvlink.errors import (
    ClosedError,
    ConnectorError,
    KVLinkError,
    PeerLostError,
    WireError,
)
from omni_kvlink.payload.format import MAX_HEADER
from omni_kvlink.system.failures import translate_errors
from omni_kvlink.system.waits import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.control.kept_bytes import KeptBytes
    from omni_kvlink.connectors.control.receive_pool import SessionResources


class ControlSession(LeadingReceiver, FetchingSession):
    """One connection to one incarnation of a producer, which also sends the chunks that it fetches.

    It connects again and again until a producer serves, and ends when that producer disconnects.
    Methods whose names end in `_in_loop` are for the loop's thread: see docs/threads.md.

    A thread whose get waits receives a payload that comes inside its offer itself, if it is as
    committed. Any other message stays in the socket for the loop, whose thread would otherwise
    receive all of them and wake the get. One thread at a time; a get that comes meanwhile waits for
    the loop. Such a payload is charged to the quota of the receive pool until its `Release`.
    """

    max_frame_nbytes = max(CHUNK, MAX_MESSAGE)
    """The longest frame that the producer may send."""
    fetch_limits = FetchLimits(CHUNK, WINDOW)
    """Bytes to request at a time, and bytes that may be requested and not yet received."""
    can_resume = True
    """Whether what has come of a payload when the connection breaks is kept for the next one."""
    incarnation = ""

    def __init__(self, resources: SessionResources):
        super().__init__()
        self._resources = resources
        self._address, self._credentials, self._context, self._loop = resources[:4]
        self._receive_pool, self._layouts, self._counters, link_lanes = resources[4:]
        self._lanes = None if link_lanes is None else SessionLanes(link_lanes, self, self._loop)
        self._url = self._address.url
        self._inbound_transfers: dict[int, InboundTransfer] = {}
        # Of this connection when it broke, by get.
        self._kept: weakref.WeakValueDictionary[int, KeptBytes] = weakref.WeakValueDictionary()
        self._fetching = FetchQueue[InboundTransfer]()
        self._outbox: deque[Message] = deque()
        sends = self.send, self._post_release, self.send_all
        make = partial(RemoteGet, self, self._receive_pool.kept)
        self.get_table = GetTable(make, *sends, fetches=True)
        self.ready: Answer[None] = Answer()  # set with the handshake, or with the error
        self._socket: MonitoredSocket | None = None
        self.hello = own_hello()
        keyed = self._credentials is not None
        self.path = self._address.path(is_encrypted=keyed)
        self.no_wait = False  # fail if no producer serves, instead of trying again
        self.transports = tuple[str, ...]()  # by which the producer can send bytes
        self._is_greeted = self.was_connected = self._is_handshaken = self._is_lost = False
        self.handshake_error = self._producer_host = ""

    def send(self, message: Message) -> None:
        """Queue a message for the producer; never blocks."""
        self._outbox.append(message)
        if not self._loop.is_own_thread or len(self._outbox) == 1:
            self._loop.call(self.flush_in_loop)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Queue several messages for the producer; never blocks."""
        self._outbox.extend(messages)
        self._loop.call(self.flush_in_loop)

    def fail(self, key: str, error: KVLinkError) -> None:
        """Fail all gets of a key, also those whose bytes are arriving."""
        super().fail(key, error)
        self._loop.call(partial(self._fail_inbound_in_loop, error, key))

    def refuse(self, reason: str) -> None:
        """Tell the producer why the path is not as required, and disconnect."""
        self.send(Refused(shorten(reason), PROTOCOL))
        self._loop.call(partial(self.disconnect_in_loop, closed_here(self._url)))

    def close(self) -> None:
        """Fail all gets; the connection stays until the last payload that is in use is released."""
        self._loop.call(partial(self._end_gets_in_loop, closed_here(self._url)))

    def stats(self) -> dict[str, Any]:
        """Return how often the producer was throttled."""
        return {"throttled": 0 if self._socket is None else self._socket.throttled}

    def set_ready_in_loop(self, error: KVLinkError | None = None) -> None:
        """Set `ready`; later calls change nothing."""
        if self.ready.is_set():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_error(error)

    def connect_in_loop(self) -> None:
        """Start connecting; `ready` tells the outcome."""
        if self.ready.is_set() or self.is_closed:
            return
        callbacks = self._on_frames_in_loop, self._on_event_in_loop, self._on_idle_in_loop
        size = self.max_frame_nbytes
        try:
            with translate_errors(self._url, self._address.other):
                self._socket = MonitoredSocket(
                    self._context, zmq.DEALER, self._loop, *callbacks, max_frame=size
                )
                if self._credentials is not None:
                    self._credentials.secure_client(self._socket.socket)
                self._socket.socket.setsockopt(zmq.IPV6, int(self._address.is_ipv6))
                self._socket.socket.connect(self._address.zmq_endpoint)
                self._socket.watch()
        except KVLinkError as error:
            self.set_ready_in_loop(error)

    def _transmit_in_loop(self, message: Message) -> None:
        assert self._socket is not None
        try:
            with self._socket.lock:  # a get may receive in its own thread
                self._socket.send([encode(message)])
        except zmq.ZMQError:
            if not self.ready.is_set():
                return  # the connection is lost, and ZMQ makes another: `Hello` is sent again
            self._outbox.clear()
            self.disconnect_in_loop(
                PeerLostError(f"{self._url}: the producer takes no more messages")
            )

    def _close_connection_in_loop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._lanes is not None:
            self._lanes.close()
        self._wake = None  # once no thread uses it

    def _on_event_in_loop(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self.was_connected, self._is_handshaken = True, False
            self._producer_host = host_of(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.handshake_error, self._is_handshaken = "", True
            self._send_hello_in_loop()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.set_ready_in_loop(
                ConnectorError(
                    f"{self._url} refused this side's key: its public key must be in the "
                    "producer's peers= directory"
                )
            )
        elif event == zmq.EVENT_CONNECT_RETRIED and self.no_wait:
            self.set_ready_in_loop(PeerLostError(f"{self._url}: nobody serves it"))
        elif event & BROKEN or (event == zmq.EVENT_DISCONNECTED and not self._is_handshaken):
            self.handshake_error = "another protocol, or the wrong key"
        elif event == zmq.EVENT_DISCONNECTED and self.ready.is_set():
            self._is_lost = True
        elif event == zmq.EVENT_DISCONNECTED:  # ZMQ connects again
            self._forget_connection_in_loop()

    def _send_hello_in_loop(self) -> None:
        if self._socket is not None and not self.ready.is_set():
            _ = self._socket.socket.EVENTS  # lets ZMQ notice that it can send now
            self._transmit_in_loop(self.hello)

    def _forget_connection_in_loop(self) -> None:
        """Undo what was done since the handshake, of a connection that was lost before `ready`."""
        self._is_greeted = self._is_handshaken = False

    def _on_idle_in_loop(self) -> None:
        """Handle a disconnect after the producer's last messages were read."""
        if self._is_lost:
            self.disconnect_in_loop(PeerLostError(f"{self._url}: the producer is gone"))

    def _on_frames_in_loop(self, frames: Sequence[zmq.Frame]) -> None:
        if not self._is_handshaken and not self.ready.is_set():
            return  # from a connection that was lost
        try:
            if not frames:
                raise PeerLostError(f"{self._url}: a signal handler's exception cut a message")
            if not len(frames[0]):
                return  # the producer was interrupted within it, and sends it again
            message = decode(frames[0].bytes)
            if not self._is_greeted:
                self._on_hello_in_loop(message)
            elif isinstance(message, Chunk) and len(frames) == 2:
                self.on_chunk_in_loop(message, frames[1].buffer)
            elif isinstance(message, Refused):
                raise PeerLostError(f"{self._url} ended the connection: {message.reason}")
            elif isinstance(message, Offer) and len(frames) == 2:
                if len(frames[1]):  # else the producer was interrupted, too
                    self.on_message_in_loop(message, frames[1].bytes)
            elif isinstance(message, Chunk) or len(frames) != 1:
                unexpected(message)
            else:
                self.on_message_in_loop(message)
        except KVLinkError as error:
            self.disconnect_in_loop(error)

    def _on_hello_in_loop(self, message: Message) -> None:
        hello = check_hello(self._url, message)
        if hello.incarnation == self.hello.incarnation:
            # The kernel chose the port that we connect to as our own port, so that TCP connected
            # the socket with itself.
            self._close_connection_in_loop()
            self.connect_in_loop()
            return
        self._is_greeted = True
        self.take_hello(hello)
        self.transports = hello.transports
        self._on_greeted_in_loop()

    def _on_greeted_in_loop(self) -> None:
        """Continue after the exchange of `Hello`."""
        if self._lanes is not None:
            self._lanes.begin(self._producer_host, self.transports)
        self.set_ready_in_loop()

    def _end_gets_in_loop(self, error: KVLinkError) -> None:
        for get_state in self.get_table.close(error):
            self.send(Cancel(get_state.get_id))
        self._fail_inbound_in_loop(error)

    def disconnect_in_loop(self, error: KVLinkError) -> None:
        """Close the connection, and fail all payloads that have not arrived completely."""
        if self.is_closed:
            return
        self.set_ready_in_loop(error)
        self.flush_in_loop()
        if self.is_closed:  # `flush` met the end of the connection
            return
        self.is_closed = True
        self._outbox.clear()
        self._close_connection_in_loop()
        self.get_table.close(error)
        is_lost = self.can_resume and isinstance(error, PeerLostError)
        self._fail_inbound_in_loop(error, lost=self.incarnation if is_lost else None)
        self._fetching.clear()

    def on_message_in_loop(self, message: Message, inline_bytes: bytes = b"") -> None:
        """Handle a message of the producer; WireError if a producer may not send it.

        `inline_bytes` are those of a small payload or stream's draft that travelled with its offer.
        """
        if isinstance(message, Offer):
            self._on_offer_in_loop(message, inline_bytes)
            return
        if isinstance(message, LaneTicket) and self._lanes is not None:
            self._lanes.on_ticket(message)
            return
        if isinstance(message, (Layer, Committed)):
            if message.get_id in self._inbound_transfers:
                self._inbound_transfers[message.get_id].on_message(message)
            return
        if isinstance(message, Failed) and message.get_id in self._inbound_transfers:
            inbound = self._inbound_transfers[message.get_id]
            if not inbound.fail(get_error(inbound.key, message)):
                self._fetching.drop(inbound)
        self.get_table.on_message(message)

    def on_chunk_in_loop(self, chunk: Chunk, payload: memoryview) -> None:
        """Store bytes that arrived, unless their payload was released; may raise WireError."""
        inbound = self._inbound_transfers.get(chunk.get_id)
        if inbound is not None:
            inbound.on_chunk(chunk, payload)

    def on_lanes_in_loop(self, lanes: int) -> None:
        """Take the number of lanes that are open into the path."""
        assert self.path is not None
        self.take_path(msgspec.structs.replace(self.path, lanes=lanes), self._url)

    def find_inbound_in_loop(self, get_id: int) -> InboundTransfer | None:
        """Return the payload that is being fetched for a get; None if it was released."""
        return None if self.is_closed else self._inbound_transfers.get(get_id)

    def find_kept_in_loop(self, get_id: int) -> KeptBytes | None:
        """Return what was kept of the payload of a get when this connection broke."""
        return self._kept.get(get_id)

    def _on_offer_in_loop(self, offer: Offer, inline_bytes: bytes) -> None:
        start, stop = offer.first
        if inline_bytes and len(inline_bytes) != stop - start:
            raise WireError(f"{self._url} sent another payload than it offered")
        if offer.draft > 8 + MAX_HEADER:
            raise WireError(f"a header of {offer.draft} bytes; the limit is {8 + MAX_HEADER}")
        get = self.get_table.find(offer.get_id)
        if get is None or offer.get_id in self._inbound_transfers:
            self.get_table.on_message(offer)  # cancelled, or a repeated offer
            return
        self.has_inline = bool(inline_bytes)
        get.inbound = inbound = InboundTransfer(
            self._resources,
            get,
            offer,
            GetLease(self.get_table, offer.get_id, offer.epoch),
            self.fetch_more_in_loop,
            inline_bytes,
            self.fetch_limits.chunk,
        )
        self._inbound_transfers[offer.get_id] = inbound
        if get.kept is not None:
            inbound.resume(get.kept, self.incarnation)
        fault_points.point("get.offered")
        # First, because `allocate` may complete `ready`: whoever it wakes finds the get answered.
        self.get_table.on_message(offer)
        self._receive_pool.allocate(inbound.plan.nbytes, inbound, inbound.kept)

    def fetch_more_in_loop(self, inbound: InboundTransfer) -> None:
        """Request what the window allows, of all payloads in turn: small ones overtake large."""
        if self.is_closed:
            return  # memory that was mapped meanwhile arrives behind the end; it will be released
        for one, start, stop in self._fetching.next_ranges(inbound, self.fetch_limits.window):
            self._fetch_range_in_loop(one, start, stop)

    def _fail_inbound_in_loop(
        self, error: KVLinkError, key: str | None = None, *, lost: str | None = None
    ) -> None:
        for inbound in [*self._inbound_transfers.values()]:
            if key in (None, inbound.key) and not inbound.fail(error, lost=lost):
                self._fetching.drop(inbound)  # delivered: it stays with its consumer
            elif lost is not None and inbound.kept is not None:
                self._kept[inbound.offer.get_id] = inbound.kept

    def _post_release(self, message: Message) -> None:
        """For finalizers: takes no lock."""
        handle = self._on_release_in_loop if isinstance(message, Release) else self.send
        self._loop.call(partial(handle, message))

    def _on_release_in_loop(self, message: Message) -> None:
        """Notify the producer, then free the memory: a closed link ends with its last block."""
        assert isinstance(message, Release)
        inbound = self._inbound_transfers.pop(message.get_id, None)
        self.send(message)
        if inbound is not None:
            self._fetching.drop(inbound)
        # Not `flush`: it also reads, and an offer would find the memory still in use.
        self._send_queued_in_loop()
        if inbound is not None:
            inbound.close()
            if self._lanes is not None:
                self._lanes.release(message.get_id)
        self._free_share_in_loop(message.get_id)

    def flush_in_loop(self) -> None:
        """Send queued messages in their order, and read what the send may have hidden."""
        self._send_queued_in_loop()
        if self._socket is not None:
            self._socket.drain()

    def _send_queued_in_loop(self) -> None:
        while self._outbox and not self.is_closed:
            self._transmit_in_loop(self._outbox.popleft())

    def _fetch_range_in_loop(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Request bytes of a payload, by a lane if one is open."""
        get_id, epoch = inbound.offer.get_id, inbound.offer.epoch
        lane = None if self._lanes is None else self._lanes.pick(stop - start)
        if lane is not None:
            lane.expect(LaneRange(get_id, epoch, start, stop, inbound.borrow(start, stop)))
        self.send(FetchRange(get_id, epoch, start, stop, 0 if lane is None else lane.number))

    def receive(self, get: RemoteGet, deadline: float) -> None:
        """Receive the payload in this thread, if no other payload is on its way."""
        if self.get_table.waiting == 1 and not self._fetching:
            self.receive_until(get.answer, deadline, get)
        # Else what comes is mostly for others, so that the loop would be woken, too.

    def _begin_leading(self, get: RemoteGet) -> int:
        with contextlib.suppress(OSError):  # no descriptor is left
            self._wake = self._wake or Wake()
        wake, socket = self._wake, self._socket
        if wake is None or socket is None or not socket.pause():
            self._wake = None
            return -1
        get.answer.add_done_callback(partial(self._on_answer, wake))
        if get.inline_target is not None and self.has_inline:
            get.inline_target.open()
        return socket.fd if self._receive_next(get) else -1

    def _watch_channel(self) -> None:
        if self._socket is not None:
            self._socket.resume()

    def _receive_next(self, get: RemoteGet) -> bool:
        """Take the payload if it has come; return whether to wait on, since no message has.

        An interrupt at any line loses nothing: a message is taken away at last, and to handle it
        twice changes nothing.
        """
        socket = self._socket
        assert socket is not None
        with socket.lock:
            frames = socket.peek()
            message = _decoded(frames)
            if isinstance(message, Status) and len(frames) == 1:
                self.get_table.on_message(message)
                socket.skip()
                frames = socket.peek()
                message = _decoded(frames)
            if isinstance(message, Offer) and _is_whole(message, frames, get):
                try:
                    self._take(message, frames[1].buffer, get)
                except BaseException:  # an interrupt: the loop takes it, or ends the connection
                    if get.offer is not message:
                        self._loop.call(partial(self._free_share_in_loop, message.get_id))
                    raise
            if get.delivery is not None:
                socket.skip()
        if get.delivery is not None:
            get.done.set_result(None)
            get.settle()
        return not frames

    def _take(self, offer: Offer, payload: memoryview, get: RemoteGet) -> None:
        """Answer the get with the payload, unless it is damaged or there is no room for it."""
        has_room = False
        fault_points.point("get.offered")
        with contextlib.suppress(ClosedError):
            has_room = self._receive_pool.share((self.get_table, offer.get_id), payload.nbytes)
        if not has_room:
            return  # the loop waits for room
        opened = get.open(payload, self._layouts)
        if opened is None:  # the loop fetches again what is wrong
            self._loop.call(partial(self._free_share_in_loop, offer.get_id))
            return
        fault_points.point("fetch.chunk")
        self.get_table.on_message(offer)
        if get.offer is not offer:  # it was ended meanwhile, and the payload released
            if get.inline_target is not None:
                get.inline_target.discard()
            return
        fault_points.point("get.mapped")
        region, manifest, is_verified = opened
        self.has_inline = True
        self._counters["verified" if is_verified else "unverified"] += 1
        lease = GetLease(self.get_table, offer.get_id, offer.epoch)
        get.delivery = Delivery(
            get.key,
            region,
            lease,
            manifest=manifest,
            copies=1,
            is_verified=is_verified,
            extra=offer.extra,
        )

    def _free_share_in_loop(self, get_id: int) -> None:
        self._receive_pool.free_share((self.get_table, get_id))

    def _on_answer(self, wake: Wake, answer: object) -> None:
        """Wake the leader: another thread has ended its get, if only by the end of the session."""
        if self._leader not in (0, threading.get_ident()):
            wake.set()


def _decoded(frames: Sequence[zmq.Frame]) -> Message | None:
    """Return the message of these frames; None if there is none, or it is damaged."""
    message: Message | None = None
    with contextlib.suppress(WireError, IndexError):
        message = decode(frames[0].bytes)
    return message


def _is_whole(offer: Offer, frames: Sequence[zmq.Frame], get: RemoteGet) -> bool:
    """Whether a whole payload for this get comes with its offer."""
    if offer.get_id != get.get_id or get.streamed or offer.draft or len(frames) != 2:
        return False
    return offer.location.nbytes == len(frames[1]) > 0
