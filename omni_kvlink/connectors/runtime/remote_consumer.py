"""A consumer that shares no memory with its producer: it fetches payloads into its own memory."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.connectors.protocol.get_table import (
    MAX_TIMEOUT,
    Answer,
    GetLease,
    GetState,
    GetTable,
    check_timeout,
    get_error,
)
from omni_kvlink.connectors.protocol.messages import (
    Cancel,
    Chunk,
    Committed,
    Failed,
    FetchRange,
    Layer,
    Message,
    Offer,
    Release,
)
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.consumer import (
    Session,
    SessionConsumer,
    SessionGet,
    closed_here,
)
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.connectors.runtime.inbound_transfer import InboundTransfer
from omni_kvlink.connectors.runtime.receive_pool import ReceivePool
from omni_kvlink.errors import KVLinkError, PeerLostError, WireError
from omni_kvlink.payload.format import MAX_HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.base import Options, PendingGet
    from omni_kvlink.connectors.protocol.fetch_plan import FetchLimits
    from omni_kvlink.connectors.protocol.get_table import ChunkOf, Delivery
    from omni_kvlink.payload.layouts import LayoutCache

VERIFICATION = ("verified", "unverified", "refetched", "rejected")
"""Counters of `stats()["verification"]`: payloads delivered with all of their bytes compared with
digests, and without; ranges that were fetched again; and payloads that were not as committed."""


class RemoteGet(SessionGet):
    """A pending get; it is done when the payload has arrived, or with the error."""

    session: RemoteSession
    delivery: Delivery | None = None  # that `RemoteSession.receive_inline` has found, for `wait`

    def __init__(self, session: RemoteSession, get_state: GetState):
        self.session, self._get_table, self._get_state = session, session.get_table, get_state
        assert get_state.ready is not None
        self._done, self._pid = get_state.ready, os.getpid()

    def wait(self, *, timeout: float) -> Delivery:
        """Block until the payload has arrived; see `PendingGet`."""
        timeout = check_timeout(timeout)
        deadline = time.monotonic() + timeout
        if timeout and not self._get_state.answer.is_set() and os.getpid() == self._pid:
            self.session.receive_inline(self, deadline)
            timeout = max(0.0, deadline - time.monotonic())
        if self.delivery is not None:
            found, self.delivery = self.delivery, None
            return found
        self._get_table.wait(self._get_state, timeout)
        inbound = self._inbound
        try:
            if not inbound.ready.wait(max(0.0, deadline - time.monotonic())):
                self._get_state.phase = inbound.phase
                if inbound.cancel():
                    raise self._get_state.timeout_error()
                inbound.ready.wait(MAX_TIMEOUT)  # it is being set
            inbound.ready.result()
        except KVLinkError:
            self._get_state.settle()
            raise
        except BaseException:
            self.cancel()
            raise
        delivery = inbound.deliver()
        self._get_state.settle()
        return delivery

    def cancel(self) -> None:
        """Stop waiting; a payload that has arrived is released unread. See `PendingGet`."""
        get_state, self.delivery = self._get_state, None
        if get_state.is_settled:
            return
        if self._get_table.cancel(get_state):
            return
        get_state.answer.wait(MAX_TIMEOUT)  # it is being set
        if get_state.answer.error is not None:
            return
        if get_state.inbound is None:  # an interrupt ended `receive_inline`
            self._get_table.drop(get_state)
            return
        inbound = self._inbound
        if not inbound.cancel():
            inbound.ready.wait(MAX_TIMEOUT)  # it is being set
            if inbound.ready.error is None:
                inbound.release_unread()
        get_state.settle()

    @property
    def key(self) -> str:
        """The payload's key."""
        return self._get_state.key

    @property
    def get_state(self) -> GetState:
        """The get in the session's table."""
        return self._get_state

    @property
    def _inbound(self) -> InboundTransfer:
        assert isinstance(self._get_state.inbound, InboundTransfer)
        return self._get_state.inbound


class RemoteSession(Session):
    """One connection to one incarnation of a producer; subclasses carry messages and bytes.

    Methods are called in the loop's thread, except those under "For any thread".
    """

    def __init__(
        self,
        url: str,
        loop: EventLoop,
        receive_pool: ReceivePool,
        layouts: LayoutCache,
        counters: Counter[str] | None = None,
    ):
        self._url, self._loop, self._receive_pool, self._layouts = url, loop, receive_pool, layouts
        self._counters = Counter[str]() if counters is None else counters
        self._inbound_transfers: dict[int, InboundTransfer] = {}
        self._fetching: deque[InboundTransfer] = deque()
        self._outbox: deque[Message] = deque()
        self.get_table = GetTable(self.send, self._post_release, self.send_all)

    @abstractmethod
    def _transmit(self, message: Message) -> None:
        """Send a message now, without blocking."""

    @abstractmethod
    def _close_connection(self) -> None:
        """Close the connection; called once."""

    @property
    @abstractmethod
    def fetch_limits(self) -> FetchLimits:
        """Bytes to request at a time, and bytes that may be requested and not yet received."""

    def _fetch_range(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Request bytes of a payload."""
        self.send(FetchRange(inbound.offer.get_id, inbound.offer.epoch, start, stop))

    # For any thread

    def request(
        self, key: str, *, streamed: bool, verify: bool = True, of: ChunkOf | None = None
    ) -> PendingGet:
        """Ask for a payload; see `Session`."""
        get_state = self.get_table.request(
            key, streamed=streamed, early=True, verify=verify, ready=Answer(), of=of
        )
        return RemoteGet(self, get_state)

    def request_all(self, keys: Sequence[str], *, verify: bool) -> list[PendingGet]:
        """Ask for several payloads at once; see `Session`."""
        get_states = self.get_table.request_all(keys, early=True, verify=verify, ready=Answer)
        return [RemoteGet(self, get_state) for get_state in get_states]

    def receive_inline(self, get: RemoteGet, deadline: float) -> None:
        """Receive a payload that comes inside its offer in the calling thread: `get.delivery`.

        Blocks until the get has ended, to the `deadline` (`time.monotonic`) at most. It may return
        earlier: if the payload does not come so, or the session leaves that to the loop.
        """

    def send(self, message: Message) -> None:
        """Queue a message for the producer; never blocks."""
        self._outbox.append(message)
        if not self._loop.is_own_thread or len(self._outbox) == 1:
            self._loop.call(self.flush)

    def send_all(self, messages: Sequence[Message]) -> None:
        """Queue several messages for the producer; never blocks."""
        self._outbox.extend(messages)
        self._loop.call(self.flush)

    def fail(self, key: str, error: KVLinkError) -> None:
        """Fail all gets of a key, also those whose bytes are arriving."""
        super().fail(key, error)
        self._loop.call(partial(self._fail_inbound, error, key))

    def close(self) -> None:
        """Fail all gets; the connection stays until the last payload that is in use is released."""
        self._loop.call(partial(self._close, closed_here(self._url)))

    # In the loop's thread

    def _close(self, error: KVLinkError) -> None:
        for get_state in self.get_table.close(error):
            self.send(Cancel(get_state.get_id))
        self._fail_inbound(error)

    def disconnect(self, error: KVLinkError) -> None:
        """Close the connection, and fail all payloads that have not arrived completely."""
        if self.is_closed:
            return
        self.flush()
        if self.is_closed:  # `flush` met the end of the connection
            return
        self.is_closed = True
        self._outbox.clear()
        self._close_connection()
        self.get_table.close(error)
        self._fail_inbound(error)
        self._fetching.clear()

    def on_message(self, message: Message, inline_bytes: bytes = b"") -> None:
        """Handle a message of the producer; WireError if a producer may not send it.

        `inline_bytes` are those of a small payload or stream's draft that travelled with its offer.
        """
        if isinstance(message, Offer):
            self._on_offer(message, inline_bytes)
            return
        if isinstance(message, (Layer, Committed)):
            if message.get_id in self._inbound_transfers:
                self._inbound_transfers[message.get_id].on_message(message)
            return
        if isinstance(message, Failed) and message.get_id in self._inbound_transfers:
            inbound = self._inbound_transfers[message.get_id]
            self._fail_one(inbound, get_error(inbound.key, message))
        self.get_table.on_message(message)

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Store bytes that arrived, unless their payload was released; may raise WireError."""
        inbound = self._inbound_transfers.get(chunk.get_id)
        if inbound is not None:
            inbound.on_chunk(chunk, payload)

    def _on_offer(self, offer: Offer, inline_bytes: bytes) -> None:
        start, stop = offer.first
        if inline_bytes and len(inline_bytes) != stop - start:
            raise WireError(f"{self._url} sent another payload than it offered")
        if offer.draft > 8 + MAX_HEADER:
            raise WireError(f"a header of {offer.draft} bytes; the limit is {8 + MAX_HEADER}")
        get_state = self.get_table.find(offer.get_id)
        if get_state is None or offer.get_id in self._inbound_transfers:
            self.get_table.on_message(offer)  # cancelled, or a repeated offer
            return
        self.has_inline = bool(inline_bytes)
        lease = GetLease(self.get_table, offer.get_id, offer.epoch)
        chunk = self.fetch_limits.chunk
        get_state.inbound = inbound = InboundTransfer(
            get_state,
            offer,
            self._receive_pool,
            lease,
            self._fetch_more,
            inline_bytes,
            chunk,
            self._counters,
            self._layouts,
        )
        self._inbound_transfers[offer.get_id] = inbound
        if fault_points.enabled:
            fault_points.point("get.offered")
        # First, because `allocate` may complete `ready`: whoever it wakes finds the get answered.
        self.get_table.on_message(offer)
        self._receive_pool.allocate(inbound.plan.nbytes, inbound)

    def _fetch_more(self, inbound: InboundTransfer) -> None:
        """Request what the window allows, of all payloads in turn: small ones overtake large."""
        if self.is_closed:
            return  # memory that was mapped meanwhile arrives behind the end; it will be released
        if inbound not in self._fetching and inbound.plan.is_active:
            self._fetching.append(inbound)
        window = self.fetch_limits.window - sum(one.plan.pending_nbytes for one in self._fetching)
        idle = 0
        while idle < len(self._fetching):
            one = self._fetching[0]
            span = one.plan.next_range(window)
            if span is None:
                idle += 1
            else:
                idle = 0
                window -= span[1] - span[0]
                self._fetch_range(one, *span)
            self._fetching.rotate(-1)
        for one in [one for one in self._fetching if not one.plan.is_active]:
            self._fetching.remove(one)

    def _fail_inbound(self, error: KVLinkError, key: str | None = None) -> None:
        for inbound in [*self._inbound_transfers.values()]:
            if key in (None, inbound.key):
                self._fail_one(inbound, error)

    def _fail_one(self, inbound: InboundTransfer, error: KVLinkError) -> None:
        """Release a payload that was not delivered; a delivered one stays with its consumer."""
        if inbound.fail(error):
            inbound.release_unread()
        elif inbound in self._fetching:
            self._fetching.remove(inbound)

    def _post_release(self, message: Message) -> None:
        """For finalizers: takes no lock."""
        handle = self._on_release if isinstance(message, Release) else self.send
        self._loop.call(partial(handle, message))

    def _on_release(self, message: Message) -> None:
        """Notify the producer, then free the memory: a closed link ends with its last block."""
        assert isinstance(message, Release)
        inbound = self._inbound_transfers.pop(message.get_id, None)
        self.send(message)
        if inbound is not None and inbound in self._fetching:
            self._fetching.remove(inbound)
        # Not `flush`: it also reads, and an offer would find the memory still in use.
        self._send_queued()
        if inbound is not None:
            inbound.close()
        self._receive_pool.free_share((self.get_table, message.get_id))

    def flush(self) -> None:
        """Send queued messages in their order; subclasses also read."""
        self._send_queued()

    def _send_queued(self) -> None:
        while self._outbox and not self.is_closed:
            self._transmit(self._outbox.popleft())


class RemoteConsumer(SessionConsumer):
    """A consumer with one event loop and one memory pool, which all of its sessions share."""

    def __init__(self, url: str, options: Options):
        super().__init__(url)
        self._may_return = threading.Event()  # `close` need not wait for the loop any longer
        self._closing = self._is_shut_down = False
        self.counters = Counter[str]()
        self._loop = EventLoop("kvlink-reader", crashed=self._crashed)
        try:
            self._receive_pool = self._make_pool(options)
        except BaseException:
            self._loop.close()
            raise

    def _make_pool(self, options: Options) -> ReceivePool:
        """Return the memory of the host that payloads are received in; subclasses have others."""
        return ReceivePool(
            options.quota, self._loop, self._close_if_unused, prefault=options.prefault_nbytes
        )

    def _close_resources(self) -> None:
        """Close what subclasses opened; in the loop, once."""

    def health(self) -> dict[str, Any]:
        """Return state and counters, as JSON values."""
        verification = {name: self.counters[name] for name in VERIFICATION}
        return {
            **super().health(),
            "memory": self._receive_pool.stats(),
            "verification": verification,
        }

    def close(self) -> None:
        """Fail all gets, then close; with payloads in use, close when the last is released."""
        is_first = not self._closed and os.getpid() == self._pid
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
        self._close_if_unused()
        self._may_return.set()

    def _close_if_unused(self) -> None:
        """Close everything after `close`, unless a payload is in use."""
        if not self._closing or self._receive_pool.is_in_use or self._is_shut_down:
            return
        self._is_shut_down = True
        if isinstance(self._session, RemoteSession):
            self._session.disconnect(closed_here(self._url))
        self._close_resources()
        self._receive_pool.close()
        self._loop.close()

    def _crashed(self, error: BaseException) -> None:
        if isinstance(self._session, RemoteSession):
            problem = PeerLostError(f"{self._url}: the consumer's thread failed: {error!r}")
            self._session.disconnect(problem)
        self._is_shut_down = True
        self._close_resources()
        self._may_return.set()
