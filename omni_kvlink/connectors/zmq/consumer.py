"""The connecting end: a DEALER to one life of a producer, and the memory that it fetches to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import zmq

from omni_kvlink.connectors.base import Options
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.monitored_socket import MonitoredSocket, is_broken
from omni_kvlink.connectors.control.security import check_exposure, protect_client
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK
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
from omni_kvlink.connectors.runtime.consumer import Session, check_greeting, closed_here
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.connectors.runtime.receive_pool import ReceivePool
from omni_kvlink.connectors.runtime.remote_consumer import RemoteConsumer, RemoteSession
from omni_kvlink.errors import ConnectorError, KVLinkError, PeerLostError, TransferTimeout

_LARGEST_LESSON = 31 << 20
"""Bytes; glibc learns from no block above 32 MiB."""


class ZmqConsumer(RemoteConsumer):
    """The reading end of `zmq+tcp://host:port` and `zmq+ipc:///path`."""

    def __init__(self, endpoint: ControlAddress, options: Options):
        self._endpoint = endpoint
        if endpoint.transport == "tcp" and endpoint.address.endswith(":0"):
            raise ValueError(f"{endpoint.url}: nobody serves port 0; the producer's url names it")
        check_exposure(self._endpoint, options)
        self._options = options
        self._dialled: list[ZmqSession] = []
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            super().__init__(self._endpoint.url, options)
            _teach_malloc()
        except BaseException:
            self._context.term()
            raise

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        return self._dial(self._make_session(), timeout, no_wait=no_wait)

    def _dial(self, session: ZmqSession, timeout: float, *, no_wait: bool = False) -> ZmqSession:
        """Wait until hands were shaken."""
        self._dialled = [*(one for one in self._dialled if not one.is_over), session]
        session.no_wait = no_wait
        if self._closed:
            raise closed_here(self._url)
        self._loop.call(session.dial)
        try:
            session.ready.result(max(0.0, timeout))
        except BaseException as error:
            self._loop.call(session.hang_up)
            if isinstance(error, FutureTimeout) and not isinstance(error, TransferTimeout):
                raise session.unanswered(timeout) from None
            raise
        return session

    def _make_session(self) -> ZmqSession:
        return ZmqSession(
            self._endpoint, self._options, self._context, self._loop, self._receive_pool
        )

    def _interrupt(self) -> None:
        for session in self._dialled:
            session.answer(closed_here(self._url))

    def _shut(self) -> None:
        for session in self._dialled:
            session.hang_up()  # who dialled may be too late: the context waits for every socket
        self._context.term()


class ZmqSession(RemoteSession):
    """One connection; it knocks until somebody serves, and ends when that one is gone.

    Attributes:
        ready: ends when hands were shaken, or with the error.
        hasty: give up when nobody serves, instead of knocking on.
        ways: by which its producer can be read.
    """

    def __init__(
        self,
        endpoint: ControlAddress,
        options: Options,
        context: zmq.Context[Any],
        loop: EventLoop,
        receive_pool: ReceivePool,
    ):
        super().__init__(endpoint.url, loop, receive_pool)
        self._endpoint, self._options, self._context = endpoint, options, context
        self.ready: Future[None] = Future()
        self._socket: MonitoredSocket | None = None
        self._hello = own_hello()
        self.no_wait, self.transports = False, tuple[str, ...]()
        self._greeted = self._was_there = self._is_known = self._is_gone = False
        self._problem = ""

    def answer(self, error: KVLinkError | None = None) -> None:
        """End the waiting for a producer; what comes second changes nothing."""
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self.ready.set_result(None)
            else:
                self.ready.set_exception(error)

    def unanswered(self, waited: float) -> TransferTimeout:
        if self._problem:
            why = f"handshakes fail ({self._problem}): check keys= and peers= of both sides"
        elif self._was_there:
            why = "the producer does not answer"
        else:
            why = "nobody serves it; start the producer, or give a longer timeout"
        phase = "shaking hands" if self._was_there else "connecting"
        return TransferTimeout(f"{self._url} after {waited:g} s: {why}", waited=waited, phase=phase)

    # In the loop's thread

    def dial(self) -> None:
        if self.ready.done() or self._over:
            return
        try:
            self._socket = MonitoredSocket(
                self._context,
                zmq.DEALER,
                self._loop,
                self._on_frames,
                self._on_event,
                self._on_quiet,
                longest=max(CHUNK, MAX_MESSAGE),
            )
            protect_client(self._socket.socket, self._options)
            self._socket.socket.setsockopt(zmq.IPV6, int(self._endpoint.is_ipv6))
            self._socket.socket.connect(self._endpoint.text)
            self._socket.watch()
        except KVLinkError as error:
            self.answer(error)
        except zmq.ZMQError as error:
            self.answer(ConnectorError(f"{self._url}: {error}"))

    def hang_up(self) -> None:
        self.end(closed_here(self._url))

    def flush(self) -> None:
        super().flush()
        if self._socket is not None:
            self._socket.drain()

    def _carry(self, message: Message) -> None:
        assert self._socket is not None
        try:
            self._socket.send([encode(message)])
        except zmq.ZMQError:
            self._outbox.clear()
            self.end(PeerLostError(f"{self._url}: the producer takes no more messages"))

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._was_there, self._is_known = True, False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._socket is not None:
            self._problem, self._is_known = "", True
            _ = self._socket.socket.EVENTS  # makes ZMQ notice that it may send now
            self._carry(self._hello)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.answer(
                ConnectorError(
                    f"{self._url} refused this side's key: its public key must lie in the "
                    "producer's peers= directory"
                )
            )
        elif event == zmq.EVENT_CONNECT_RETRIED and self.no_wait:
            self.answer(PeerLostError(f"{self._url}: nobody serves it"))
        elif is_broken(event) or (event == zmq.EVENT_DISCONNECTED and not self._is_known):
            self._problem = "of another kind, or with the wrong key"
        elif event == zmq.EVENT_DISCONNECTED and self._greeted:
            self._is_gone = True

    def _on_quiet(self) -> None:
        """Last words were heard."""
        if self._is_gone:
            self.end(PeerLostError(f"{self._url}: the producer is gone"))

    def _on_frames(self, frames: Sequence[zmq.Frame]) -> None:
        try:
            message = decode(frames[0].bytes)
            if not self._greeted:
                self._shake_hands(message)
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
            self.answer(error)
            self.end(error)

    def _shake_hands(self, message: Message) -> None:
        hello = check_greeting(self._url, message)
        if hello.nonce == self._hello.nonce:
            self._redial()
            return
        self._greeted, self.nonce, self.transports = True, hello.nonce, hello.transports
        self._welcomed()

    def _welcomed(self) -> None:
        """Hands were shaken."""
        self.answer()

    def _redial(self) -> None:
        """The kernel joined our knocking with itself: it chose the port knocked at as our own."""
        assert self._socket is not None
        self._socket.close()
        self.dial()


def _teach_malloc() -> None:
    """Make malloc keep what is freed: ZMQ receives every chunk in memory from there.

    glibc returns freed memory to the system beyond a limit that the largest block freed so far has
    set; fresh memory costs more than the whole transfer. The block is never touched.
    """
    del_me = bytearray(_LARGEST_LESSON)
    del del_me
