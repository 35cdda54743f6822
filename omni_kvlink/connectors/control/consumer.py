"""A consumer whose sessions connect to a producer by the control channel."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from omni_kvlink.connectors.control.security import check_access
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.runtime.consumer import Session, closed_here
from omni_kvlink.connectors.runtime.remote_consumer import RemoteConsumer
from omni_kvlink.errors import TransferTimeout

if TYPE_CHECKING:
    from omni_kvlink.connectors.base import Options
    from omni_kvlink.connectors.control.address import ControlAddress

S = TypeVar("S", bound=ControlSession)


class ControlConsumer(RemoteConsumer):
    """Opens the sessions of one link; subclasses choose their type.

    Args:
        address: Where the producer listens.
        options: Keys, quota, and whether a network may be used without keys.

    Raises:
        ConnectorError: The address needs keys.
        ValueError: The address has port 0.
    """

    def __init__(self, address: ControlAddress, options: Options):
        self._address, self._options = address, options
        if address.protocol == "tcp" and address.address.endswith(":0"):
            raise ValueError(
                f"{address.url}: port 0 cannot be connected to; use the producer's url"
            )
        check_access(address, options)
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
        self._sessions_opened = [
            *(one for one in self._sessions_opened if not one.is_closed),
            session,
        ]
        session.no_wait = no_wait
        if self._closed:
            raise closed_here(self._url)
        self._loop.call(session.connect)
        try:
            session.ready.result(max(0.0, timeout))
        except BaseException as error:
            self._disconnect(session)
            if isinstance(error, FutureTimeout) and not isinstance(error, TransferTimeout):
                raise session.connect_timeout(timeout) from None
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
