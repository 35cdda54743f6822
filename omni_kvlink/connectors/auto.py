"""`auto://name?tcp=host:port`: shared memory where both ends share a kernel, else UCX, else ZMQ."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.base import Backend, Consumer, Options, refuse_keys
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.runtime.consumer import Session
from omni_kvlink.connectors.runtime.producer import Opener, PooledProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer, ShmSession
from omni_kvlink.connectors.shm.listener import ShmListener
from omni_kvlink.connectors.shm.rendezvous import dial, socket_path
from omni_kvlink.connectors.ucx.access_policy import settings_of
from omni_kvlink.connectors.ucx.consumer import UcxSession
from omni_kvlink.connectors.ucx.listener import UcxListener
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.connectors.zmq.consumer import ZmqConsumer, ZmqSession
from omni_kvlink.connectors.zmq.listener import ZmqListener
from omni_kvlink.errors import ConnectorError, KVLinkError, TransferTimeout
from omni_kvlink.memory.region import Mapping

_log = logging.getLogger("omni_kvlink")


class Choice(NamedTuple):
    """How a reader has its payloads, and why."""

    transport: str
    why: str


class AutoConsumer(ZmqConsumer):
    """The reading end: it meets the producer over TCP, and then takes the nearest way to it.

    That both share a kernel is proved, not guessed: behind the Unix socket of that name answers
    the very producer that answered over TCP.
    """

    def __init__(self, name: str, options: Options):
        self._name = name
        self._ucx_transport: UcxTransport | None = None
        self._choice: Choice | None = None
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        super().__init__(_endpoint(options.tcp), options)
        self._url = f"auto://{name}?tcp={options.tcp}"

    def health(self) -> dict[str, Any]:
        transport, why = self._choice or Choice("", "not connected yet")
        ucx_transport = {} if self._ucx_transport is None else {"ucx": self._ucx_transport.stats()}
        return {**super().health(), **ucx_transport, "transport": transport, "why": why}

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        deadline = time.monotonic() + timeout
        met = self._dial(self._make_session(), timeout, no_wait=no_wait)
        try:
            session, choice = self._nearest(met, deadline)
        except BaseException:
            self._loop.call(met.hang_up)  # nobody else knows it; the context would wait for it
            raise
        if session is not met:
            self._loop.call(met.hang_up)
        if choice != self._choice:
            self._choice = choice
            _log.info("%s goes by %s: %s", self._url, *choice)
        return session

    def _nearest(self, met: ZmqSession, deadline: float) -> tuple[Session, Choice]:
        """The session that will be used; the one over TCP if no other is to be had."""
        reasons = []
        for transport, attempt in (("shm", self._by_memory), ("ucx", self._by_ucx)):
            try:
                if transport not in met.transports:
                    raise ConnectorError(f"the producer does not serve {transport}")
                session, why = attempt(met, deadline)
            except KVLinkError as error:
                self._check_open()
                reasons.append(f"no {transport}: {error}")
            else:
                return session, Choice(transport, "; ".join([why, *reasons]))
        return met, Choice("zmq", "; ".join(reasons))

    def _by_memory(self, met: ZmqSession, deadline: float) -> tuple[Session, str]:
        path = socket_path(self._name, self._options.directory)
        try:
            sock = dial(path, 0.0, self._stop)
            session = ShmSession(f"shm://{self._name}", sock, deadline, self._stop)
        except TransferTimeout:
            raise ConnectorError(f"nobody serves {path} here") from None
        except OSError as error:  # it went amid the handshake
            raise ConnectorError(f"{path}: {error}") from None
        if session.nonce != met.nonce:
            session.close()
            raise ConnectorError(f"behind {path} is another producer")
        return session, f"this producer answers at {path}, so both ends share a kernel"

    def _by_ucx(self, met: ZmqSession, deadline: float) -> tuple[Session, str]:
        missing = ucx.unavailable()
        if missing:
            raise ConnectorError(missing)
        if self._ucx_transport is None:
            self._ucx_transport = UcxTransport(settings_of(self._endpoint, self._options))
        session = UcxSession(
            self._ucx_transport,
            self._endpoint,
            self._options,
            self._context,
            self._loop,
            self._receive_pool,
        )
        return self._dial(session, deadline - time.monotonic()), "both ends have UCX"

    def _interrupt(self) -> None:
        os.eventfd_write(self._stop, 1)
        super()._interrupt()

    def _shut(self) -> None:
        super()._shut()
        if self._ucx_transport is not None:
            self._ucx_transport.close()

    def __del__(self) -> None:
        # Not in `close`: another thread may still wait for it, and its number must not be reused.
        if hasattr(self, "_stop"):
            os.close(self._stop)


def _endpoint(tcp: str) -> ControlAddress:
    return ControlAddress("tcp", tcp, "auto")


def _serve(name: str, options: Options) -> PooledProducer:
    openers = list[Opener]()
    make = Mapping.anonymous
    if sys.platform == "linux":
        make = partial(Mapping.shared, f"kvlink-{name}")
        openers.append(partial(ShmListener, name, options.directory))
    if options.tcp:
        openers.append(partial(_remote_door, _endpoint(options.tcp), options))
    else:
        refuse_keys(f"auto://{name} without tcp=", options)
    return PooledProducer(name, options, make, *openers)


def _remote_door(
    endpoint: ControlAddress, options: Options, producer: PooledProducer
) -> ZmqListener:
    """Control over TCP; UCX beside it, if it is there and may go where the link goes."""
    why = ucx.unavailable()
    try:
        if why is None:
            settings_of(endpoint, options)
    except ConnectorError as error:
        why = str(error)
    if why is None:
        return UcxListener(endpoint, options, producer, optional=True)
    _log.info("%s is served without UCX: %s", endpoint.url, why)
    return ZmqListener(endpoint, options, producer)


def _connect(name: str, options: Options, timeout: float) -> Consumer:
    consumer = AutoConsumer(name, options) if options.tcp else ShmConsumer(name, options)
    try:
        consumer.connect(timeout)
    except BaseException:
        consumer.close()
        raise
    return consumer


BACKEND = Backend(serve=_serve, connect=_connect)
