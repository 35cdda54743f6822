"""A consumer that shares no memory with its producer: payloads are fetched, then delivered."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from omni_kvlink.connectors.base import Delivery, Options, PendingGet
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchLimits
from omni_kvlink.connectors.protocol.get_table import GetState, GetTable, failure
from omni_kvlink.connectors.protocol.messages import (
    Abort,
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
from omni_kvlink.errors import KVLinkError, PeerLostError, TransferTimeout, WireError
from omni_kvlink.payload.header import MAX_HEADER


class RemoteGet(SessionGet):
    """A payload that was asked for; its future ends when it is here, or with the error."""

    def __init__(self, session: RemoteSession, get_state: GetState):
        self.session, self._inbox, self._get_state = session, session.inbox, get_state
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # only the session ends it
        get_state.future.add_done_callback(self._answered)

    def wait(self, *, timeout: float) -> Delivery:
        deadline = self._get_state.started + timeout
        self._inbox.wait(self._get_state, deadline - time.monotonic())
        inbound = self._inbound
        try:
            inbound.there.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout as error:
            if isinstance(error, TransferTimeout):  # the same class since Python 3.11
                raise
            self._get_state.phase = inbound.phase
            if inbound.withdraw():
                raise self._get_state.timed_out() from None
            inbound.there.result()
        except KVLinkError:
            raise
        except BaseException:
            self.cancel()
            raise
        return inbound.deliver()

    def cancel(self) -> None:
        if self._inbox.cancel(self._get_state) or self._get_state.future.exception() is not None:
            return
        inbound = self._inbound
        if not inbound.withdraw() and inbound.there.exception() is None:
            inbound.give_back()

    @property
    def _inbound(self) -> InboundTransfer:
        assert isinstance(self._get_state.inbound, InboundTransfer)
        return self._get_state.inbound

    def _answered(self, offered: Future[Offer]) -> None:
        error = offered.exception()
        if error is None:
            self._inbound.there.add_done_callback(self._ended)
        else:
            self.future.set_exception(error)

    def _ended(self, there: Future[None]) -> None:
        error = there.exception()
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class RemoteSession(Session):
    """One connection to one life of a producer; subclasses carry messages and bytes.

    Everything but `get_id`, `send` and `fail` is the loop's.
    """

    def __init__(self, url: str, loop: EventLoop, receive_pool: ReceivePool):
        self._url, self._loop, self._receive_pool = url, loop, receive_pool
        self._over = False
        self._inbound_transfers: dict[int, InboundTransfer] = {}
        self._fetching: deque[InboundTransfer] = deque()
        self._outbox: deque[Message] = deque()
        self.inbox = GetTable(self._say, self._post)

    @abstractmethod
    def _carry(self, message: Message) -> None:
        """Send now, without blocking; in the loop."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close the connection; in the loop, once."""

    @property
    def pace(self) -> FetchLimits:
        """How it asks for bytes."""
        return FetchLimits(CHUNK, WINDOW)

    def _ask(self, inbound: InboundTransfer, start: int, stop: int) -> None:
        """Have these bytes sent; in the loop."""
        self._say(FetchRange(inbound.offer.get_id, inbound.offer.epoch, start, stop))

    # For any thread

    @property
    def is_over(self) -> bool:
        return self._over

    def request(self, key: str, *, streamed: bool) -> PendingGet:
        return RemoteGet(self, self.inbox.request(key, streamed=streamed, early=True))

    def send(self, message: Abort) -> None:
        self._say(message)

    def fail(self, key: str, error: KVLinkError) -> None:
        super().fail(key, error)
        self._loop.call(partial(self._fail_arrivals, error, key))

    def close(self) -> None:
        self._loop.call(partial(self.leave, closed_here(self._url)))

    # In the loop's thread

    def leave(self, error: KVLinkError) -> None:
        """Ask for nothing more; what readers hold keeps the connection, so that they can say so."""
        for get_state in self.inbox.end(error):
            self._say(Cancel(get_state.number))
        for inbound in [*self._inbound_transfers.values()]:
            if inbound.fail(error):
                inbound.give_back()

    def end(self, error: KVLinkError) -> None:
        """The connection is over. What is here stays; the rest will not come."""
        if self._over:
            return
        self.flush()
        if self._over:  # flushing met the end of the connection
            return
        self._over = True
        self._outbox.clear()
        self._hang_up()
        self.inbox.end(error)
        self._fail_arrivals(error)
        self._fetching.clear()

    def on_message(self, message: Message, beside: bytes = b"") -> None:
        """What the producer said.

        Args:
            beside: a small payload that came with its offer, or a stream's draft.

        Raises:
            WireError: it may not say that.
        """
        if isinstance(message, Offer):
            self._admit(message, beside)
        elif isinstance(message, (Layer, Committed)):
            if message.get_id in self._inbound_transfers:
                self._inbound_transfers[message.get_id].handle(message)
            return
        elif isinstance(message, Failed) and message.get_id in self._inbound_transfers:
            inbound = self._inbound_transfers[message.get_id]
            self._drop_failed(inbound, failure(inbound.key, message))
        self.inbox.on_message(message)

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Bytes came; those of a payload that was let go of meanwhile are nobody's.

        Raises:
            WireError: they were not asked for.
        """
        inbound = self._inbound_transfers.get(chunk.get_id)
        if inbound is not None:
            inbound.take(chunk, payload)

    def _admit(self, offer: Offer, beside: bytes) -> None:
        start, stop = offer.first
        if beside and len(beside) != stop - start:
            raise WireError(f"{self._url} sent another payload than it offered")
        if offer.get_id in self._inbound_transfers:
            return  # said twice: it is in use
        if offer.draft > 8 + MAX_HEADER:
            raise WireError(f"a header of {offer.draft} bytes; the limit is {8 + MAX_HEADER}")
        get_state = self.inbox.find(offer.get_id)
        if get_state is None:
            return  # the inbox gives it back
        release = partial(self.inbox.release, offer.get_id, offer.epoch)
        get_state.inbound = inbound = InboundTransfer(
            get_state.key,
            offer,
            self._receive_pool,
            release,
            self._fetch,
            streamed=get_state.streamed,
            inline_bytes=beside,
            chunk=self.pace.chunk,
        )
        self._inbound_transfers[offer.get_id] = inbound
        fault_points.point("get.offered")
        self._receive_pool.take(inbound.fetch.nbytes, inbound)

    def _fetch(self, inbound: InboundTransfer) -> None:
        """Ask for as much as the window allows, in turns: a small payload overtakes a large one."""
        if inbound not in self._fetching and inbound.fetch.is_hungry:
            self._fetching.append(inbound)
        capacity = self.pace.window - sum(one.fetch.unanswered for one in self._fetching)
        idle = 0
        while idle < len(self._fetching):
            one = self._fetching[0]
            span = one.fetch.ask(capacity)
            if span is None:
                idle += 1
            else:
                idle = 0
                capacity -= span[1] - span[0]
                self._ask(one, *span)
            self._fetching.rotate(-1)
        for one in [one for one in self._fetching if not one.fetch.is_hungry]:
            self._fetching.remove(one)

    def _fail_arrivals(self, error: KVLinkError, key: str | None = None) -> None:
        for inbound in [*self._inbound_transfers.values()]:
            if key in (None, inbound.key):
                self._drop_failed(inbound, error)

    def _drop_failed(self, inbound: InboundTransfer, error: KVLinkError) -> None:
        """One that nobody has yet goes back; one that is read stays with its reader."""
        if inbound.fail(error):
            inbound.give_back()
        elif inbound in self._fetching:
            self._fetching.remove(inbound)

    def _post(self, message: Message) -> None:
        """For finalizers: no lock, no socket."""
        self._loop.call(partial(self._release, message))

    def _release(self, message: Message) -> None:
        """Say it, then bring the memory back: with the last block a closed link ends."""
        assert isinstance(message, Release)
        inbound = self._inbound_transfers.pop(message.get_id, None)
        self._say(message)
        if inbound is not None:
            if inbound in self._fetching:
                self._fetching.remove(inbound)
            self._speak()  # not `flush`: it listens, and an offer would find the block still taken
            inbound.let_go()

    def _say(self, message: Message) -> None:
        self._outbox.append(message)
        if not self._loop.is_own_thread or len(self._outbox) == 1:
            self._loop.call(self.flush)

    def flush(self) -> None:
        """Messages leave; subclasses listen, too."""
        self._speak()

    def _speak(self) -> None:
        """In the order they were said."""
        while self._outbox and not self._over:
            self._carry(self._outbox.popleft())


class RemoteConsumer(SessionConsumer):
    """The reading end: one loop and one store of memory, whatever becomes of its sessions."""

    def __init__(self, url: str, options: Options):
        super().__init__(url)
        self._left = threading.Event()
        self._leaving = self._finished = False
        self._loop = EventLoop("kvlink-reader", crashed=self._crashed)
        try:
            self._receive_pool = ReceivePool(
                options.quota, self._loop, self._emptied, prefault=options.prefault
            )
        except BaseException:
            self._loop.stop()
            raise

    def _shut(self) -> None:
        """Close what subclasses opened; in the loop, once."""

    def health(self) -> dict[str, Any]:
        return {**super().health(), "memory": self._receive_pool.stats()}

    def close(self) -> None:
        is_first = not self._closed and os.getpid() == self._pid
        super().close()
        if not is_first:
            return
        self._loop.call(partial(self._loop.call, self._leave))  # after what the session gives back
        if not self._loop.is_own_thread:  # else a forgotten link, collected in this very thread
            self._left.wait()
            if self._finished:
                self._loop.stop()

    def _leave(self) -> None:
        """Go now, or with the last view."""
        self._leaving = True
        if not self._receive_pool.blocks:
            self._finish()
        self._left.set()

    def _emptied(self) -> None:
        if self._leaving:
            self._finish()

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if isinstance(self._session, RemoteSession):
            self._session.end(closed_here(self._url))
        self._shut()
        self._receive_pool.close()
        self._loop.stop()

    def _crashed(self, error: BaseException) -> None:
        if isinstance(self._session, RemoteSession):
            self._session.end(PeerLostError(f"{self._url}: the reading thread broke: {error!r}"))
        self._finished = True
        self._shut()
        self._left.set()
