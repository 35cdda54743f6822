"""`auto://name?tcp=host:port`: shared memory where both ends share a kernel, else UCX, else ZMQ."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from omni_kvlink.connectors import ucx
from omni_kvlink.connectors.base import Backend, Consumer, Options, refuse_keys
from omni_kvlink.connectors.control.address import ControlAddress
from omni_kvlink.connectors.control.consumer import ControlConsumer, keep_freed_memory
from omni_kvlink.connectors.control.listener import ControlListener, SenderOpener
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.control.tcp_sender import TcpSender
from omni_kvlink.connectors.protocol.path import SHM_PATH
from omni_kvlink.connectors.runtime.consumer import closed_here
from omni_kvlink.connectors.runtime.event_loop import Wake
from omni_kvlink.connectors.runtime.producer import Opener, PooledProducer
from omni_kvlink.connectors.shm.consumer import ShmConsumer, ShmSession
from omni_kvlink.connectors.shm.listener import ShmListener
from omni_kvlink.connectors.shm.rendezvous import dial, socket_path
from omni_kvlink.connectors.ucx.consumer import UcxSession
from omni_kvlink.connectors.ucx.sender import UcxSender
from omni_kvlink.connectors.ucx.settings import UcxSettings
from omni_kvlink.connectors.ucx.transport import UcxTransport
from omni_kvlink.errors import ConnectorError, KVLinkError, TransferTimeout
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from omni_kvlink.connectors.runtime.consumer import Session

_log = logging.getLogger("omni_kvlink")


class AutoConsumer(ControlConsumer):
    """Connects to the producer over TCP, then chooses the fastest transport that reaches it.

    That both ends share a kernel is proved: the producer behind the Unix socket of that name must
    have the same nonce as the one that answers over TCP.
    """

    def __init__(self, name: str, options: Options):
        self._name = name
        self._ucx_transport: UcxTransport | None = None
        self._choice = "", "not connected yet"  # the transport in use, and why
        self._cancelled: Wake | None = Wake()
        super().__init__(ControlAddress("tcp", options.tcp, "auto"), options)
        self._label = self._url = f"auto://{name}?tcp={options.tcp}"
        keep_freed_memory()

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values; `transport` and `why` tell the choice."""
        transport, reason = self._choice
        ucx_stats = {} if self._ucx_transport is None else {"ucx": self._ucx_transport.stats()}
        return {**super().stats(), **ucx_stats, "transport": transport, "why": reason}

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        deadline = time.monotonic() + timeout
        control = self._connect_session(ControlSession(self._resources), timeout, no_wait=no_wait)
        try:
            session, choice = self._choose(control, deadline)
        except BaseException:
            self._disconnect(control)  # ending ZMQ's context waits for every socket
            raise
        if session is not control:
            self._disconnect(control)
        self._choice = choice
        return session

    def _choose(self, control: ControlSession, deadline: float) -> tuple[Session, tuple[str, str]]:
        """Return the session to use, the one over TCP if none is faster; its transport, and why."""
        reasons = []
        for transport, open_session in (("shm", self._open_shm), ("ucx", self._open_ucx)):
            try:
                if transport not in control.transports:
                    raise ConnectorError(f"the producer does not serve {transport}")
                session, reason = open_session(control, deadline)
            except KVLinkError as error:  # noqa: PERF203 (at most two rounds)
                self._check_open()
                reasons.append(f"no {transport}: {error}")
            else:
                return _with_why(session, transport, "; ".join([reason, *reasons]))
        return _with_why(control, "zmq", "; ".join(reasons))

    def _open_shm(self, control: ControlSession, deadline: float) -> tuple[Session, str]:
        if not all(map(SHM_PATH.meets, {*self._require, *(control.required or ())})):
            raise ConnectorError("it is not as required")
        path, cancelled = socket_path(self._name, self._options.directory), self._cancelled
        if cancelled is None:
            raise closed_here(self._url)
        try:
            with translate_errors(path):
                sock = dial(path, 0.0, cancelled.fd)
                session = ShmSession(
                    f"shm://{self._name}", sock, deadline, cancelled.fd, self._require
                )
        except TransferTimeout:
            raise ConnectorError(f"nobody serves {path} here") from None
        if session.incarnation != control.incarnation:
            session.close()
            raise ConnectorError(f"behind {path} is another producer")
        return session, f"this producer answers at {path}, so both ends share a kernel"

    def _open_ucx(self, control: ControlSession, deadline: float) -> tuple[Session, str]:
        missing = ucx.unavailable()
        if missing:
            raise ConnectorError(missing)
        if self._ucx_transport is None:
            self._ucx_transport = UcxTransport(UcxSettings.of_link(self._address, self._options))
            self._closers.append(self._ucx_transport.close)
        session = UcxSession(self._resources, self._ucx_transport)
        session.required = control.required
        if refusal := session.path_refusal(self._require):
            raise ConnectorError(refusal)
        return self._connect_session(session, deadline - time.monotonic()), "both ends have UCX"

    def _interrupt(self) -> None:
        cancelled, self._cancelled = self._cancelled, None  # closed once no thread uses it
        if cancelled is not None:
            cancelled.set()
        super()._interrupt()


def _with_why(session: Session, transport: str, why: str) -> tuple[Session, tuple[str, str]]:
    """Return a session and its choice, which its path says, too."""
    assert session.path is not None
    session.path = msgspec.structs.replace(session.path, why=why)
    return session, (transport, why)


def _serve(name: str, options: Options) -> PooledProducer:
    openers = list[Opener]()
    make = Mapping.anonymous
    if sys.platform == "linux":
        make = partial(Mapping.shared, f"kvlink-{name}")
        openers.append(partial(ShmListener, name, options.directory))
    if options.tcp:
        address = ControlAddress("tcp", options.tcp, "auto")
        senders = _senders(address, options)
        openers.append(partial(ControlListener, address, options, senders=senders))
    else:
        refuse_keys(f"auto://{name} without tcp=", options)
    return PooledProducer(name, options, make, *openers, is_shared=True)


def _senders(address: ControlAddress, options: Options) -> list[SenderOpener]:
    """Return ZMQ, and UCX before it if it is installed and may be used for this address."""
    why = ucx.unavailable()
    try:
        if why is None:
            UcxSettings.of_link(address, options)
    except ConnectorError as error:
        why = str(error)
    if why is None:
        return [UcxSender, TcpSender]
    _log.info("%s is served without UCX: %s", address.url, why)
    return [TcpSender]


def _connect(name: str, options: Options, timeout: float) -> Consumer:
    consumer = AutoConsumer(name, options) if options.tcp else ShmConsumer(name, options)
    return consumer.connect(timeout)


BACKEND = Backend(serve=_serve, connect=_connect)
