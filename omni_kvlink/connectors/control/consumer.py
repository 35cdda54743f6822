"""The consumer's end of the control channel."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from omni_kvlink.connectors.control.lane import count_lanes
from omni_kvlink.connectors.control.link_lanes import LinkLanes
from omni_kvlink.connectors.control.receive_pool import ReceivePool, SessionResources
from omni_kvlink.connectors.control.remote_get import RemoteGet
from omni_kvlink.connectors.control.security import find_credentials
from omni_kvlink.connectors.control.session import ControlSession
from omni_kvlink.connectors.protocol.messages import own_hello
from omni_kvlink.connectors.runtime.consumer import Session, SessionConsumer, closed_here
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.errors import (
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferTimeout,
    format_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.base import Options, PendingGet
    from omni_kvlink.connectors.control.address import ControlAddress

VERIFICATION = ("verified", "unverified", "refetched", "rejected")
"""Counters of `stats()["verification"]`: payloads delivered with all of their bytes compared with
digests, and without; ranges that were fetched again; and payloads that were not as committed."""


_MALLOC_KEEPS = 31 << 20
"""Bytes; glibc adapts its threshold to freed blocks of at most 32 MiB."""


class ControlConsumer(SessionConsumer):
    """Opens the sessions of one link, with one event loop and one memory pool for all of them."""

    _make_session: Callable[[SessionResources], ControlSession] = ControlSession
    """Returns a new session, not yet connected; of the type that a subclass has."""

    _has_lanes = True
    """Whether payloads may come by lanes beside the control channel, which must be TCP."""

    def __init__(self, address: ControlAddress, options: Options):
        if address.protocol == "tcp" and address.address.endswith(":0"):
            raise SchemaError(
                f"{address.url}: port 0 cannot be connected to; use the producer's url"
            )
        address.check_directory()
        credentials = find_credentials(address, options)
        super().__init__(address.url, options.require)
        self._address, self._options = address, options
        self._may_return = threading.Event()  # `close` need not wait for the loop any longer
        self._closing = self._is_shut_down = False
        self.counters = Counter[str]()
        self._sessions_opened: list[ControlSession] = []
        self._lanes: LinkLanes | None = None
        if self._has_lanes and address.protocol == "tcp":
            keyed = credentials is not None
            count = count_lanes(options.lanes, is_encrypted=keyed)
            self._lanes = LinkLanes(address.url, count, is_encrypted=keyed)
        self._closers: list[Callable[[], None]] = []  # of parts that subclasses have opened
        self._context: zmq.Context[Any] = zmq.Context()
        with contextlib.ExitStack() as opened:
            opened.callback(self._context.term)
            self._loop = EventLoop("kvlink-reader", crashed=self._crashed_in_loop)
            opened.callback(self._loop.close)
            self._receive_pool = self._make_pool(options)
            opened.pop_all()
        self._resources = SessionResources(
            address,
            credentials,
            self._context,
            self._loop,
            self._receive_pool,
            self.layouts,
            self.counters,
            self._lanes,
        )

    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        return self._connect_session(self._make_session(self._resources), timeout, no_wait=no_wait)

    def _connect_session(
        self, session: ControlSession, timeout: float, *, no_wait: bool = False
    ) -> ControlSession:
        """Connect a session, and wait until its handshake is done."""
        live = (s for s in self._sessions_opened if not s.is_closed)
        self._sessions_opened = [*live, session]
        session.no_wait, session.hello = no_wait, own_hello(require=self._options.require)
        if self._closed:
            raise closed_here(self._url)
        self._loop.call(session.connect_in_loop)
        try:
            if not session.ready.wait(max(0.0, timeout)):
                raise self._connect_timeout(session, timeout)
            session.ready.result()
        except BaseException:
            self._disconnect(session)
            raise
        return session

    def _connect_timeout(self, session: ControlSession, waited: float) -> TransferTimeout:
        """Return the error of a `connect` that waited so many seconds, with the likely reason."""
        phase = "handshake" if session.was_connected else "connecting"
        reason = "nobody serves it; start the producer, or give a longer timeout"
        if session.handshake_error:
            cure = "the producer may have keys, this side has none"
            if self._resources.credentials is not None:
                cure = self._resources.credentials.cure
            reason = f"handshakes fail ({session.handshake_error}): {cure}"
        elif session.was_connected:
            reason = "the producer does not answer"
        else:
            reason = self._address.unknown_host() or reason
        message = f"{self._address.url} after {format_seconds(waited)}: {reason}"
        return TransferTimeout(message, waited=waited, phase=phase)

    def can_retry(self, pending: PendingGet, *, timeout: float) -> bool:
        """See `Consumer.can_retry`; what has come is freed if the get cannot be requested again."""
        is_possible = super().can_retry(pending, timeout=timeout)
        if not is_possible and isinstance(pending, RemoteGet):
            pending.drop_kept()
        return is_possible

    def _disconnect(self, session: ControlSession) -> None:
        """Close a session's connection at once; any thread."""
        self._loop.call(partial(session.disconnect_in_loop, closed_here(self._url)))

    def _interrupt(self) -> None:
        for session in self._sessions_opened:
            end = partial(session.set_ready_in_loop, closed_here(self._url))
            if self._loop.is_own_thread:
                end()
            else:
                self._loop.call(end)

    def _shut_down_in_loop(self, error: KVLinkError) -> None:
        self._is_shut_down = True
        # Also a session that is connecting now: the context waits for all of its sockets.
        for session in self._sessions_opened:
            session.disconnect_in_loop(error)
        self._context.term()
        if self._lanes is not None:
            self._lanes.threads.close()
        for close in self._closers:
            close()

    def _make_pool(self, options: Options) -> ReceivePool:
        """Return the memory of the host that payloads are received in; subclasses have others."""
        return ReceivePool(
            options.quota,
            self._loop,
            self._close_if_unused_in_loop,
            prefault=options.prefault_nbytes,
        )

    def stats(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        verification = {name: self.counters[name] for name in VERIFICATION}
        return {
            **super().stats(),
            "memory": self._receive_pool.stats(),
            "verification": verification,
            "resumed": {
                "payloads": self.counters["resumed"],
                "kept_nbytes": self.counters["kept_nbytes"],
                "again_nbytes": self.counters["again_nbytes"],
            },
            **({} if self._lanes is None else {"lanes": self._lanes.stats()}),
        }

    def close(self) -> None:
        """Fail all gets, then close; with payloads in use, close when the last is released."""
        is_first = not self._closed
        super().close()
        if not is_first:
            return
        # Called twice through the loop, to run after the releases that closing the session caused.
        self._loop.call(partial(self._loop.call, self._close_in_loop))
        if not self._loop.is_own_thread:  # else `close_deferred` was called
            self._may_return.wait()
            if self._is_shut_down:
                self._loop.close()

    def close_deferred(self) -> None:
        """Close in the loop's thread."""
        self._loop.call(self.close)

    def _close_in_loop(self) -> None:
        self._closing = True
        self._receive_pool.free_kept()
        self._close_if_unused_in_loop()
        self._may_return.set()

    def _close_if_unused_in_loop(self) -> None:
        """Close everything after `close`, unless a payload is in use."""
        if not self._closing or self._receive_pool.is_in_use or self._is_shut_down:
            return
        self._shut_down_in_loop(closed_here(self._url))
        self._receive_pool.close()
        self._loop.close()

    def _crashed_in_loop(self, error: BaseException) -> None:
        text = f"{self._url}: the consumer's thread failed: {error!r}"
        self._shut_down_in_loop(PeerLostError(text))
        self._may_return.set()


def keep_freed_memory() -> None:
    """Make malloc keep freed blocks of up to 31 MiB, in which ZMQ receives chunks.

    glibc returns freed memory to the system above a threshold that grows with the largest freed
    block; mapping fresh memory for each chunk would cost more than the transfer. The block that is
    allocated here is never touched.
    """
    block = bytearray(_MALLOC_KEEPS)
    del block
