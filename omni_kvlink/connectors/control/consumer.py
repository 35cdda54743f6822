"""The consumer's end of the control channel: each session is a DEALER."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from omni_kvlink.connectors.control.inline_receiver import InlineReceiver
from omni_kvlink.connectors.control.monitored_socket import BROKEN, MonitoredSocket
from omni_kvlink.connectors.control.security import find_credentials
from omni_kvlink.connectors.protocol.get_table import Answer
from omni_kvlink.connectors.protocol.messages import (
    MAX_MESSAGE,
    Chunk,
    Message,
    Offer,
    Refused,
    decode,
    encode,
    own_hello,
    unexpected,
)
from omni_kvlink.connectors.runtime.consumer import Session, check_hello, closed_here
from omni_kvlink.connectors.runtime.remote_consumer import RemoteConsumer, RemoteSession
from omni_kvlink.errors import (
    ConnectorError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.runtime.remote_consumer import RemoteGet

S = TypeVar("S", bound="ControlSession")


class ControlConsumer(RemoteConsumer):
    """Opens the sessions of one link; subclasses choose their type."""

    def __init__(self, address: ControlAddress, options: Options):
        self._address, self._options = address, options
        if address.protocol == "tcp" and address.address.endswith(":0"):
            raise SchemaError(
                f"{address.url}: port 0 cannot be connected to; use the producer's url"
            )
        address.check_directory()
        self._credentials = find_credentials(address, options)
        self._sessions_opened: list[ControlSession] = []
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            super().__init__(address.url, options)
        except BaseException:
            self._context.term()
            raise

    @abstractmethod
    def _make_session(self) -> ControlSession:
        """Return a new session, not yet connected."""

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        return self._connect_session(self._make_session(), timeout, no_wait=no_wait)

    def _connect_session(self, session: S, timeout: float, *, no_wait: bool = False) -> S:
        """Connect a session, and wait until its handshake is done."""
        live = (one for one in self._sessions_opened if not one.is_closed)
        self._sessions_opened = [*live, session]
        session.no_wait = no_wait
        if self._closed:
            raise closed_here(self._url)
        self._loop.call(session.connect)
        try:
            if not session.ready.wait(max(0.0, timeout)):
                raise session.connect_timeout(timeout)
            session.ready.result()
        except BaseException:
            self._disconnect(session)
            raise
        return session

    def _disconnect(self, session: ControlSession) -> None:
        """Close a session's connection at once; any thread."""
        self._loop.call(partial(session.disconnect, closed_here(self._url)))

    def _interrupt(self) -> None:
        for session in self._sessions_opened:
            session.set_ready(closed_here(self._url))

    def _close_resources(self) -> None:
        # Also a session that is connecting now: the context waits for all of its sockets.
        for session in self._sessions_opened:
            session.disconnect(closed_here(self._url))
        self._context.term()


class ControlSession(RemoteSession):
    """One connection to a producer; subclasses say how bytes are fetched.

    It connects again and again until a producer serves, and ends when that producer disconnects.
    """

    max_frame_nbytes = MAX_MESSAGE
    """The longest frame that the producer may send."""

    def __init__(self, consumer: ControlConsumer):
        resources = consumer._address.url, consumer._loop, consumer._receive_pool, consumer.layouts
        super().__init__(*resources, consumer.counters)
        self._address, self._credentials = consumer._address, consumer._credentials
        self._context = consumer._context
        self.ready: Answer[None] = Answer()  # set with the handshake, or with the error
        self._socket: MonitoredSocket | None = None
        self._hello = own_hello()
        self.no_wait = False  # fail if no producer serves, instead of trying again
        self.transports = tuple[str, ...]()  # by which the producer can send bytes
        self._is_greeted = self._was_connected = self._is_handshaken = self._is_lost = False
        self._handshake_error = ""
        self._inline_receiver = InlineReceiver(
            self._loop, self.get_table, self._receive_pool, self._layouts, self._counters
        )

    def receive_inline(self, get: RemoteGet, deadline: float) -> None:
        """Receive a small payload in the calling thread; see `RemoteSession`."""
        socket, is_alone = self._socket, self.get_table.waiting == 1 and not self._fetching
        if socket is None or not is_alone or not self.ready.is_set():
            return  # what comes is mostly for others, so that the loop would be woken, too
        if not self._loop.is_own_thread:
            self._inline_receiver.receive(socket, get, deadline)

    def set_ready(self, error: KVLinkError | None = None) -> None:
        """Set `ready`; later calls change nothing."""
        if self.ready.is_set():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_error(error)

    def connect_timeout(self, waited: float) -> TransferTimeout:
        """Return the error of a `connect` that waited so many seconds, with the likely reason."""
        phase = "handshake" if self._was_connected else "connecting"
        reason = "nobody serves it; start the producer, or give a longer timeout"
        if self._handshake_error:
            cure = "the producer may have keys, this side has none"
            if self._credentials is not None:
                cure = self._credentials.cure
            reason = f"handshakes fail ({self._handshake_error}): {cure}"
        elif self._was_connected:
            reason = "the producer does not answer"
        else:
            reason = self._address.unknown_host() or reason
        message = f"{self._url} after {format_seconds(waited)}: {reason}"
        return TransferTimeout(message, waited=waited, phase=phase)

    # In the loop's thread

    def connect(self) -> None:
        """Start connecting; `ready` tells the outcome."""
        if self.ready.is_set() or self.is_closed:
            return
        try:
            with translate_errors(self._url, self._address.other):
                self._connect()
        except KVLinkError as error:
            self.set_ready(error)

    def _connect(self) -> None:
        callbacks = self._on_frames, self._on_event, self._on_idle
        self._socket = MonitoredSocket(
            self._context, zmq.DEALER, self._loop, *callbacks, max_frame=self.max_frame_nbytes
        )
        if self._credentials is not None:
            self._credentials.secure_client(self._socket.socket)
        self._socket.socket.setsockopt(zmq.IPV6, int(self._address.is_ipv6))
        self._socket.socket.connect(self._address.zmq_endpoint)
        self._socket.watch()

    def flush(self) -> None:
        """Send queued messages, and read what the send may have hidden."""
        super().flush()
        if self._socket is not None:
            self._socket.drain()

    def _transmit(self, message: Message) -> None:
        assert self._socket is not None
        try:
            with self._socket.lock:  # a get may receive in its own thread
                self._socket.send([encode(message)])
        except zmq.ZMQError:
            if not self.ready.is_set():
                return  # the connection is lost, and ZMQ makes another: `Hello` is sent again
            self._outbox.clear()
            self.disconnect(PeerLostError(f"{self._url}: the producer takes no more messages"))

    def _close_connection(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._inline_receiver.close()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._was_connected, self._is_handshaken = True, False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshake_error, self._is_handshaken = "", True
            self._send_hello()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.set_ready(
                ConnectorError(
                    f"{self._url} refused this side's key: its public key must be in the "
                    "producer's peers= directory"
                )
            )
        elif event == zmq.EVENT_CONNECT_RETRIED and self.no_wait:
            self.set_ready(PeerLostError(f"{self._url}: nobody serves it"))
        elif event & BROKEN or (event == zmq.EVENT_DISCONNECTED and not self._is_handshaken):
            self._handshake_error = "another protocol, or the wrong key"
        elif event == zmq.EVENT_DISCONNECTED and self.ready.is_set():
            self._is_lost = True
        elif event == zmq.EVENT_DISCONNECTED:  # ZMQ connects again
            self._forget_connection()

    def _send_hello(self) -> None:
        if self._socket is not None and not self.ready.is_set():
            _ = self._socket.socket.EVENTS  # lets ZMQ notice that it can send now
            self._transmit(self._hello)

    def _forget_connection(self) -> None:
        """Undo what was done since the handshake, of a connection that was lost before `ready`."""
        self._is_greeted = self._is_handshaken = False

    def health(self) -> dict[str, Any]:
        """Return how often the producer was throttled."""
        return {"throttled": 0 if self._socket is None else self._socket.throttled}

    def _on_idle(self) -> None:
        """Handle a disconnect after the producer's last messages were read."""
        if self._is_lost:
            self.disconnect(PeerLostError(f"{self._url}: the producer is gone"))

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        if not self._is_handshaken and not self.ready.is_set():
            return  # from a connection that was lost
        try:
            if not frames:
                raise PeerLostError(f"{self._url}: a signal handler's exception cut a message")
            if not len(frames[0]):
                return  # the producer was interrupted within it, and sends it again
            message = decode(frames[0].bytes)
            if not self._is_greeted:
                self._on_hello(message)
            elif isinstance(message, Chunk) and len(frames) == 2:
                self.on_chunk(message, frames[1].buffer)
            elif isinstance(message, Refused):
                raise PeerLostError(f"{self._url} ended the connection: {message.reason}")
            elif isinstance(message, Offer) and len(frames) == 2:
                if len(frames[1]):  # else the producer was interrupted, too
                    self.on_message(message, frames[1].bytes)
            elif isinstance(message, Chunk) or len(frames) != 1:
                unexpected(message)
            else:
                self.on_message(message)
        except KVLinkError as error:
            self.set_ready(error)
            self.disconnect(error)

    def _on_hello(self, message: Message) -> None:
        hello = check_hello(self._url, message)
        if hello.incarnation == self._hello.incarnation:
            # The kernel chose the port that we connect to as our own port, so that TCP connected
            # the socket with itself.
            self._close_connection()
            self.connect()
            return
        self._is_greeted = True
        self.incarnation, self.transports = hello.incarnation, hello.transports
        self._on_greeted()

    def _on_greeted(self) -> None:
        """Continue after the exchange of `Hello`."""
        self.set_ready()
