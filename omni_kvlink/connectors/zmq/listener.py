"""The serving end: payloads are sent from the producer's memory without a copy, on demand."""

from __future__ import annotations

import select
import socket
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket, is_broken
from omni_kvlink.connectors.control.security import ZapAuth, check_exposure, protect_server
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, EAGER, WINDOW
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    PROTOCOL,
    Chunk,
    FetchRange,
    Hello,
    Message,
    Offer,
    Refused,
    Release,
    agree,
    decode,
    encode,
)
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.errors import WireError
from omni_kvlink.memory.region import Region

if TYPE_CHECKING:
    from omni_kvlink.connectors.runtime.producer import PooledProducer

MAX_PEERS = 1024
_RETRY_SECONDS = 1.0
_MOMENT_MS = 10
"""Who froze, and is given up for that, costs them once."""


class ZmqPeerConnection(PeerHandle):
    """A greeted peer: its name on the socket, its connection, what it asked for and has not got.

    Attributes:
        line: the connection once more: it outlives ZMQ's, to tell how that ended.
    """

    def __init__(self, listener: ZmqListener, identity: bytes, line: socket.socket):
        super().__init__(listener)
        self.identity, self.line = identity, line
        self.asked: deque[FetchRange] = deque()
        self.flying = 0

    @property
    def waiting(self) -> int:
        return sum(fetch.stop - fetch.start for fetch in self.asked)

    def ended_unread(self) -> bool:
        """Whether its connection ended at what ZMQ would not read: a frame that is too long.

        Then there is more to read, or a moment later. Of who went himself there is an end to read.
        """
        more = select.poll()  # not `select`: descriptors may have any number
        more.register(self.line, select.POLLIN)
        more.poll(_MOMENT_MS)
        try:
            return bool(self.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


class ZmqListener(Listener):
    """A ROUTER that hands out payloads in chunks, as its readers ask for them."""

    transports: tuple[str, ...] = ("zmq",)
    most_ahead = 2 * WINDOW
    """Bytes of one reader that may be on their way, and again that may wait for that."""

    def __init__(self, endpoint: ControlAddress, options: Options, producer: PooledProducer):
        self._endpoint, self._producer, self._loop = endpoint, producer, producer.loop
        check_exposure(self._endpoint, options)
        self._readers: dict[bytes, ZmqPeerConnection] = {}
        self._connected: dict[int, ZmqPeerConnection | None] = {}
        self._leaving: list[ZmqPeerConnection] = []
        self._unwelcome: dict[bytes, str] = {}
        self._outbox: deque[tuple[ZmqPeerConnection, Message]] = deque()
        self._counts: Counter[str] = Counter()
        self._context: zmq.Context[Any] = zmq.Context()
        self._zap_auth: ZapAuth | None = None
        try:
            self._bind(options)
        except BaseException:
            self._context.destroy(0)
            raise

    def _bind(self, options: Options) -> None:
        if options.keys:
            refused = partial(self._count, "key")
            self._zap_auth = ZapAuth(self._context, options.peers, self._loop, refused)
        self._socket = MonitoredSocket(
            self._context,
            zmq.ROUTER,
            self._loop,
            self._on_frames,
            self._on_event,
            self._on_quiet,
            longest=MAX_MESSAGE,
        )
        socket = self._socket.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int(self._endpoint.is_ipv6))
        protect_server(socket, options)
        self._address = self._endpoint.bind(socket)
        self.bound_url = self._endpoint.address, self._address

    def open(self) -> None:
        if self._zap_auth is not None:
            self._zap_auth.watch()
        self._socket.watch()

    def health(self) -> dict[str, Any]:
        return {
            "address": f"{self._endpoint.transport}://{self._address}",
            "readers": len(self._readers),
            "refused": dict(self._counts),
        }

    def refuses(self, device: str) -> str:
        return "" if device == "cpu" else "ZMQ sends what lies in host memory"

    # Messages out

    def send(self, reader: ZmqPeerConnection, message: Message) -> None:
        self._outbox.append((reader, message))
        self._loop.call(self._flush)

    def flush(self) -> None:
        if self._outbox and self._socket.turn.acquire(blocking=False):
            try:
                self._speak()
            finally:
                self._socket.turn.release()
            self._loop.call(self._socket.drain)

    def _flush(self) -> None:
        if self._outbox:
            with self._socket.turn:
                self._speak()
            self._socket.drain()

    def _speak(self) -> None:
        """Messages leave in the order they were made, whichever thread made them."""
        while self._outbox:
            reader, message = self._outbox.popleft()
            if self._readers.get(reader.identity) is reader:
                beside = self._beside(reader, message)
                self._say(reader, [encode(message), *beside])

    def _beside(self, reader: ZmqPeerConnection, message: Message) -> list[bytes | memoryview]:
        """A small payload, or a stream's draft, travels with its offer."""
        if not isinstance(message, Offer):
            return []
        start, stop = message.first
        if stop - start > EAGER:
            return []
        transfer = self._producer.leased(reader, message.get_id, message.epoch)
        if transfer is None:
            return []
        return [bytes(self._producer.piece(transfer, start, stop).view())]

    def _say(
        self, reader: ZmqPeerConnection, frames: list[bytes | memoryview], *, copy: bool = True
    ) -> None:
        try:
            self._socket.send([reader.identity, *frames], copy=copy)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                self._count("too slow")
                self._turn_out(reader, "too slow")
            else:
                self._leaving.append(reader)
                self._loop.call(self._on_quiet)

    # What readers say, in the loop's thread

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        identity = frames[0].bytes
        reader = self._readers.get(identity)
        try:
            if len(frames) != 2:
                raise WireError("a message has one part")
            message = decode(frames[1].bytes)
            if reader is None:
                self._greet(identity, frames[1], message)
            else:
                self._handle(reader, message)
        except WireError:
            self._count("bad message")
            if reader is not None:
                self._turn_out(reader, "it sent what is no message of this protocol")

    def _handle(self, reader: ZmqPeerConnection, message: Message) -> None:
        if isinstance(message, FetchRange):
            self._on_fetch(reader, message)
            return
        if isinstance(message, Release):
            self._forget_fetches(reader, message.get_id)
        self._producer.handle(reader, message)

    def _greet(self, identity: bytes, frame: zmq.Frame, message: Message) -> None:
        if not isinstance(message, Hello):
            raise WireError("the first message must be Hello")
        refusal = ""
        if agree(message.versions) is None:
            self._count("other version")
            refusal = "no common version"
        elif len(self._readers) >= MAX_PEERS:
            self._count("too many")
            refusal = f"{MAX_PEERS} readers are connected already"
        if refusal:
            self._unwelcome[identity] = refusal
            self._see_off()
            return
        # The end of whoever had this descriptor before must be known before it gets a new owner.
        self._socket.hear_events()
        descriptor = int(frame.get(zmq.SRCFD))
        line = self._socket.keep(descriptor) if descriptor in self._connected else None
        if line is None:
            return  # it went already
        reader = ZmqPeerConnection(self, identity, line)
        self._connected[descriptor] = self._readers[identity] = reader
        self._say(reader, [encode(self._producer.hello)])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._connected[value] = None
        elif event == zmq.EVENT_DISCONNECTED:
            stranger = value in self._connected and self._connected[value] is None
            reader = self._connected.pop(value, None)
            if reader is not None:
                if reader.ended_unread():
                    self._count("too long")
                self._socket.let_go(reader.line)
                self._leaving.append(reader)
            elif stranger:  # ZMQ does not say of each why it was refused
                self._count("no greeting")
        elif is_broken(event):
            self._count("handshake")

    def _on_quiet(self) -> None:
        """Last words were heard: who is gone, is gone."""
        with self._socket.turn:
            while self._leaving:
                self._drop(self._leaving.pop())
        self._flush()

    def _drop(self, reader: ZmqPeerConnection) -> None:
        if self._readers.get(reader.identity) is reader:
            del self._readers[reader.identity]
            reader.asked.clear()
            self._producer.on_peer_lost(reader)

    def _turn_out(self, reader: ZmqPeerConnection, why: str) -> None:
        """ROUTER cannot end a connection: the reader is told to, as soon as it takes a message."""
        self._drop(reader)
        self._unwelcome[reader.identity] = why
        self._see_off()

    def _see_off(self) -> None:
        for identity, why in list(self._unwelcome.items()):
            try:
                self._socket.send([identity, encode(Refused(why, PROTOCOL))])
            except zmq.Again:
                continue
            except zmq.ZMQError:
                pass  # it went by itself
            del self._unwelcome[identity]

    def tick(self, now: float) -> float:
        if self._unwelcome:
            with self._socket.turn:
                self._see_off()
            self._socket.drain()
        return now + _RETRY_SECONDS if self._unwelcome else float("inf")

    # Bytes out, in the loop's thread

    def _on_fetch(self, reader: ZmqPeerConnection, fetch: FetchRange) -> None:
        nbytes = fetch.stop - fetch.start
        if nbytes <= 0 or nbytes + reader.waiting > self.most_ahead:
            raise WireError("a reader asks for no more than it takes")
        reader.asked.append(fetch)
        self._pour(reader)

    def _forget_fetches(self, reader: ZmqPeerConnection, get_id: int) -> None:
        reader.asked = deque(fetch for fetch in reader.asked if fetch.get_id != get_id)

    def _pour(self, reader: ZmqPeerConnection) -> None:
        """Send what was asked for, unless too much of it waits on its way already."""
        while reader.asked and reader.flying < self.most_ahead:
            fetch = reader.asked.popleft()
            transfer = self._producer.leased(reader, fetch.get_id, fetch.epoch)
            if transfer is None:
                self._producer.transfers.counters["stale"] += 1
                continue
            try:
                self._answer(reader, fetch, transfer)
            except WireError as error:
                if self._producer.leased(reader, fetch.get_id, fetch.epoch) is None:
                    continue  # it ended this very moment, and a caller's tensors with it
                self._count("bad message")
                self._turn_out(reader, f"it asked for {error}")
                return

    def _answer(self, reader: ZmqPeerConnection, fetch: FetchRange, transfer: Transfer) -> None:
        for start in range(fetch.start, fetch.stop, CHUNK):
            piece = self._borrow_piece(
                reader, fetch, transfer, start, min(fetch.stop, start + CHUNK)
            )
            header = encode(Chunk(fetch.get_id, fetch.epoch, start))
            self._say(reader, [header, piece.view()], copy=False)

    def _borrow_piece(
        self,
        reader: ZmqPeerConnection,
        fetch: FetchRange,
        transfer: Transfer,
        start: int,
        stop: int,
    ) -> Region:
        """A piece of a payload to send from."""
        landed, claim = partial(self._landed, reader), (reader, fetch.get_id)
        piece = self._producer.borrow_piece(transfer, claim, start, stop, landed)
        reader.flying += piece.nbytes
        return piece

    def _landed(self, reader: ZmqPeerConnection, nbytes: int) -> None:
        """A piece was let go of: more may follow."""
        with self._socket.turn:
            reader.flying -= nbytes
            if not reader.asked:
                return
            self._pour(reader)
        self._socket.drain()

    # The end

    def _count(self, what: str) -> None:
        self._counts[what] += 1

    def shut(self) -> None:
        if self._context.closed:
            return
        self._flush()
        for reader in filter(None, self._connected.values()):
            self._socket.let_go(reader.line)
        self._socket.close()
        if self._zap_auth is not None:
            self._zap_auth.close()
        for reader in self._readers.values():
            reader.asked.clear()  # what lands later asks for no more
        self._readers.clear()
        self._endpoint.leave(self._context)
