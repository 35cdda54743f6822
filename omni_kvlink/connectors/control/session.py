"""The consumer's end of the control channel: a DEALER that connects to one producer."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket, is_broken
from omni_kvlink.connectors.control.security import secure_client
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
from omni_kvlink.connectors.runtime.consumer import check_hello
from omni_kvlink.connectors.runtime.remote_consumer import RemoteSession
from omni_kvlink.errors import ConnectorError, KVLinkError, PeerLostError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress
    from omni_kvlink.connectors.runtime.event_loop import EventLoop
    from omni_kvlink.connectors.runtime.receive_pool import ReceivePool


class ControlSession(RemoteSession):
    """One connection to a producer; subclasses say how bytes are fetched.

    It connects again and again until a producer serves, and ends when that producer disconnects.

    Attributes:
        ready: Completes when the handshake is done, or with the error.
        no_wait: Fail if no producer serves, instead of trying again.
        transports: By which the producer can send bytes.
        max_frame_nbytes: The longest frame that the producer may send.
    """

    max_frame_nbytes = MAX_MESSAGE

    def __init__(
        self,
        address: ControlAddress,
        options: Options,
        context: zmq.Context[Any],
        loop: EventLoop,
        receive_pool: ReceivePool,
    ):
        super().__init__(address.url, loop, receive_pool)
        self._address, self._options, self._context = address, options, context
        self.ready: Future[None] = Future()
        self._socket: MonitoredSocket | None = None
        self._hello = own_hello()
        self.no_wait, self.transports = False, tuple[str, ...]()
        self._is_greeted = self._was_connected = self._is_handshaken = self._is_lost = False
        self._handshake_error = ""

    def set_ready(self, error: KVLinkError | None = None) -> None:
        """Complete `ready`; later calls change nothing."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.ready.set_result(None)
            else:
                self.ready.set_exception(error)

    def connect_timeout(self, waited: float) -> TransferTimeout:
        """Return the error of a `connect` that waited so many seconds, with the likely reason."""
        if self._handshake_error:
            reason = (
                f"handshakes fail ({self._handshake_error}): check keys= and peers= of both sides"
            )
        elif self._was_connected:
            reason = "the producer does not answer"
        else:
            reason = "nobody serves it; start the producer, or give a longer timeout"
        phase = "handshake" if self._was_connected else "connecting"
        return TransferTimeout(
            f"{self._url} after {waited:g} s: {reason}", waited=waited, phase=phase
        )

    # In the loop's thread

    def connect(self) -> None:
        """Start connecting; `ready` tells the outcome."""
        if self.ready.done() or self.is_closed:
            return
        try:
            self._socket = MonitoredSocket(
                self._context,
                zmq.DEALER,
                self._loop,
                self._on_frames,
                self._on_event,
                self._on_idle,
                max_frame_nbytes=self.max_frame_nbytes,
            )
            secure_client(self._socket.socket, self._options)
            self._socket.socket.setsockopt(zmq.IPV6, int(self._address.is_ipv6))
            self._socket.socket.connect(self._address.zmq_endpoint)
            self._socket.watch()
        except KVLinkError as error:
            self.set_ready(error)
        except zmq.ZMQError as error:
            self.set_ready(ConnectorError(f"{self._url}: {error}"))

    def flush(self) -> None:
        """Send queued messages, and read what the send may have hidden."""
        super().flush()
        if self._socket is not None:
            self._socket.drain()

    def _transmit(self, message: Message) -> None:
        assert self._socket is not None
        try:
            self._socket.send([encode(message)])
        except zmq.ZMQError:
            self._outbox.clear()
            self.disconnect(PeerLostError(f"{self._url}: the producer takes no more messages"))

    def _close_connection(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._was_connected, self._is_handshaken = True, False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._socket is not None:
            self._handshake_error, self._is_handshaken = "", True
            _ = self._socket.socket.EVENTS  # lets ZMQ notice that it can send now
            self._transmit(self._hello)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.set_ready(
                ConnectorError(
                    f"{self._url} refused this side's key: its public key must be in the "
                    "producer's peers= directory"
                )
            )
        elif event == zmq.EVENT_CONNECT_RETRIED and self.no_wait:
            self.set_ready(PeerLostError(f"{self._url}: nobody serves it"))
        elif is_broken(event) or (event == zmq.EVENT_DISCONNECTED and not self._is_handshaken):
            self._handshake_error = "another protocol, or the wrong key"
        elif event == zmq.EVENT_DISCONNECTED and self._is_greeted:
            self._is_lost = True

    def _on_idle(self) -> None:
        """Handle a disconnect after the producer's last messages were read."""
        if self._is_lost:
            self.disconnect(PeerLostError(f"{self._url}: the producer is gone"))

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = decode(frames[0].bytes)
            if not self._is_greeted:
                self._on_hello(message)
            elif isinstance(message, Chunk) and len(frames) == 2:
                self.on_chunk(message, frames[1].buffer)
            elif isinstance(message, Refused):
                raise PeerLostError(f"{self._url} ended the connection: {message.reason}")
            elif isinstance(message, Offer) and len(frames) == 2:
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
        self._is_greeted, self.incarnation, self.transports = (
            True,
            hello.incarnation,
            hello.transports,
        )
        self._on_greeted()

    def _on_greeted(self) -> None:
        """Continue after the exchange of `Hello`."""
        self.set_ready()
