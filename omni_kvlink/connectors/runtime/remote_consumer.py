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

    def __init__(self, session: RemoteSession, wanted: GetState):
        self.session, self._inbox, self._wanted = session, session.inbox, wanted
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # only the session ends it
        wanted.future.add_done_callback(self._answered)

    def wait(self, *, timeout: float) -> Delivery:
        deadline = self._wanted.started + timeout
        self._inbox.wait(self._wanted, deadline - time.monotonic())
        arrival = self._arrival
        try:
            arrival.there.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout as error:
            if isinstance(error, TransferTimeout):  # the same class since Python 3.11
                raise
            self._wanted.phase = arrival.phase
            if arrival.withdraw():
                raise self._wanted.timed_out() from None
            arrival.there.result()
        except KVLinkError:
            raise
        except BaseException:
            self.cancel()
            raise
        return arrival.deliver()

    def cancel(self) -> None:
        if self._inbox.cancel(self._wanted) or self._wanted.future.exception() is not None:
            return
        arrival = self._arrival
        if not arrival.withdraw() and arrival.there.exception() is None:
            arrival.give_back()

    @property
    def _arrival(self) -> InboundTransfer:
        assert isinstance(self._wanted.arrival, InboundTransfer)
        return self._wanted.arrival

    def _answered(self, offered: Future[Offer]) -> None:
        error = offered.exception()
        if error is None:
            self._arrival.there.add_done_callback(self._ended)
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

    Everything but `want`, `send` and `fail` is the loop's.
    """

    def __init__(self, url: str, loop: EventLoop, store: ReceivePool):
        self._url, self._loop, self._store = url, loop, store
        self._over = False
        self._arrivals: dict[int, InboundTransfer] = {}
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

    def _ask(self, arrival: InboundTransfer, start: int, stop: int) -> None:
        """Have these bytes sent; in the loop."""
        self._say(FetchRange(arrival.offer.want, arrival.offer.epoch, start, stop))

    # For any thread

    @property
    def is_over(self) -> bool:
        return self._over

    def want(self, key: str, *, streamed: bool) -> PendingGet:
        return RemoteGet(self, self.inbox.want(key, streamed=streamed, early=True))

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
        for wanted in self.inbox.end(error):
            self._say(Cancel(wanted.number))
        for arrival in [*self._arrivals.values()]:
            if arrival.fail(error):
                arrival.give_back()

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
            if message.want in self._arrivals:
                self._arrivals[message.want].hear(message)
            return
        elif isinstance(message, Failed) and message.want in self._arrivals:
            arrival = self._arrivals[message.want]
            self._drop_failed(arrival, failure(arrival.key, message))
        self.inbox.on_message(message)

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Bytes came; those of a payload that was let go of meanwhile are nobody's.

        Raises:
            WireError: they were not asked for.
        """
        arrival = self._arrivals.get(chunk.want)
        if arrival is not None:
            arrival.take(chunk, payload)

    def _admit(self, offer: Offer, beside: bytes) -> None:
        start, stop = offer.first
        if beside and len(beside) != stop - start:
            raise WireError(f"{self._url} sent another payload than it offered")
        if offer.want in self._arrivals:
            return  # said twice: it is in use
        if offer.draft > 8 + MAX_HEADER:
            raise WireError(f"a header of {offer.draft} bytes; the limit is {8 + MAX_HEADER}")
        wanted = self.inbox.find(offer.want)
        if wanted is None:
            return  # the inbox gives it back
        release = partial(self.inbox.release, offer.want, offer.epoch)
        wanted.arrival = arrival = InboundTransfer(
            wanted.key,
            offer,
            self._store,
            release,
            self._fetch,
            streamed=wanted.streamed,
            gift=beside,
            chunk=self.pace.chunk,
        )
        self._arrivals[offer.want] = arrival
        fault_points.point("get.offered")
        self._store.take(arrival.fetch.nbytes, arrival)

    def _fetch(self, arrival: InboundTransfer) -> None:
        """Ask for as much as the window allows, in turns: a small payload overtakes a large one."""
        if arrival not in self._fetching and arrival.fetch.is_hungry:
            self._fetching.append(arrival)
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
        for arrival in [*self._arrivals.values()]:
            if key in (None, arrival.key):
                self._drop_failed(arrival, error)

    def _drop_failed(self, arrival: InboundTransfer, error: KVLinkError) -> None:
        """One that nobody has yet goes back; one that is read stays with its reader."""
        if arrival.fail(error):
            arrival.give_back()
        elif arrival in self._fetching:
            self._fetching.remove(arrival)

    def _post(self, message: Message) -> None:
        """For finalizers: no lock, no socket."""
        self._loop.call(partial(self._release, message))

    def _release(self, message: Message) -> None:
        """Say it, then bring the memory back: with the last block a closed link ends."""
        assert isinstance(message, Release)
        arrival = self._arrivals.pop(message.want, None)
        self._say(message)
        if arrival is not None:
            if arrival in self._fetching:
                self._fetching.remove(arrival)
            self._speak()  # not `flush`: it listens, and an offer would find the block still taken
            arrival.let_go()

    def _say(self, message: Message) -> None:
        self._outbox.append(message)
        if not self._loop.is_here or len(self._outbox) == 1:
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
            self._store = ReceivePool(
                options.quota, self._loop, self._emptied, prefault=options.prefault
            )
        except BaseException:
            self._loop.stop()
            raise

    def _shut(self) -> None:
        """Close what subclasses opened; in the loop, once."""

    def health(self) -> dict[str, Any]:
        return {**super().health(), "memory": self._store.stats()}

    def close(self) -> None:
        is_first = not self._closed and os.getpid() == self._pid
        super().close()
        if not is_first:
            return
        self._loop.call(partial(self._loop.call, self._leave))  # after what the session gives back
        if not self._loop.is_here:  # else a forgotten link, collected in this very thread
            self._left.wait()
            if self._finished:
                self._loop.stop()

    def _leave(self) -> None:
        """Go now, or with the last view."""
        self._leaving = True
        if not self._store.blocks:
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
        self._store.close()
        self._loop.stop()

    def _crashed(self, error: BaseException) -> None:
        if isinstance(self._session, RemoteSession):
            self._session.end(PeerLostError(f"{self._url}: the reading thread broke: {error!r}"))
        self._finished = True
        self._shut()
        self._left.set()
