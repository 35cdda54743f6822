"""The consumer's half of the protocol without I/O: gets, the progress of streams, deliveries."""

from __future__ import annotations

import copy
import os
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from omni_kvlink.connectors.protocol.messages import (
    Cancel,
    Committed,
    Failed,
    Get,
    Layer,
    Message,
    Offer,
    Outcome,
    Reject,
    Release,
    Status,
    shorten,
    unexpected,
)
from omni_kvlink.connectors.protocol.process_check import check_process
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
    WireError,
    format_seconds,
)
from omni_kvlink.memory.ownership import Finalizer
from omni_kvlink.memory.region import LOST, Region
from omni_kvlink.payload.layouts import KnownHeader
from omni_kvlink.payload.manifest import header_bytes
from omni_kvlink.settings import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.payload.layouts import LayoutCache
    from omni_kvlink.payload.manifest import Manifest

T = TypeVar("T")
MAX_TIMEOUT = 1e9
"""Seconds that every clock of the system accepts; a longer timeout is shortened to this one."""
_TIMEOUT = Seconds(endless=True)
_NUMBERS = (float, int)


_making = threading.RLock()  # a finalizer, or a signal handler, may come while it is held


def _renew_making() -> None:
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_renew_making)  # a thread of the parent may have held it


def list_of(owner: object, name: str) -> list[Any]:
    """Return the list that is this attribute of `owner`, made now if it is None; any thread.

    An object that makes its lists when they are needed costs the garbage collector less.
    """
    with _making:
        found: list[Any] | None = getattr(owner, name)
        if found is None:
            found = []
            setattr(owner, name, found)
        return found


class LazyEvent:
    """An event that has no lock until somebody waits for it, unlike `threading.Event`."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake those who wait; after an interrupt, the next call wakes the others."""
        self._is_set = True
        waiting = self._waiting
        if not waiting:  # who comes later sees that it is set
            return
        for lock in tuple(waiting):
            with suppress(RuntimeError):  # another thread was faster
                lock.release()
            with suppress(ValueError):
                waiting.remove(lock)  # last: an interrupt loses none

    def clear(self) -> None:
        """Undo `set`."""
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        """Block until it is set, for `timeout` seconds at most; return whether it is."""
        if self._is_set:
            return True
        deadline, lock = time.monotonic() + timeout, threading.Lock()
        lock.acquire()
        waiting = list_of(self, "_waiting")
        is_released = True
        # A `set` from before the last `clear` may release the lock as late as now.
        while is_released and not self._is_set:
            waiting.append(lock)
            if self._is_set:  # it may have come before the lock was there to be released
                break
            is_released = lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
        with suppress(ValueError):
            waiting.remove(lock)
        return self._is_set


class Answer(LazyEvent, Generic[T]):
    """A result or an error that comes once; unlike a `Future`, it has no lock until it is needed.

    One owner sets it. `future` returns the same as a `Future`, for those who need one.
    """

    __slots__ = ("_callbacks", "_result", "error")

    _result: T

    def __init__(self) -> None:
        self._is_set, self._waiting = False, None
        self._callbacks: list[Callable[[Answer[T]], None]] | None = None
        self.error: Exception | None = None

    def set_result(self, result: T) -> None:
        """End with a result."""
        self._result = result
        self._end()

    def set_error(self, error: Exception) -> None:
        """End with an error."""
        self.error = error
        self._end()

    def result(self) -> T:
        """Return the result, or raise a copy of the error; only when it is set.

        The traceback of the error itself would keep the frames that wait, and what they use.
        """
        if self.error is not None:
            raise copy.copy(self.error)
        return self._result

    def add_done_callback(self, callback: Callable[[Answer[T]], None]) -> None:
        """Call this with this object when it is set, at once or later, in any thread.

        Once; or twice if another thread calls meanwhile, or after an interrupt.
        """
        list_of(self, "_callbacks").append(callback)
        if self._is_set:
            self._call_back()

    def future(self) -> Future[T]:
        """Return a new future that ends as this does."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # only this object ends it
        self.add_done_callback(partial(_end, future))
        return future

    def _end(self) -> None:
        self.set()
        if self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            with suppress(IndexError, ValueError):  # another thread was faster
                callback = self._callbacks[0]
                callback(self)
                self._callbacks.remove(callback)  # last: an interrupt loses none


def _end(future: Future[T], answer: Answer[T]) -> None:
    with suppress(InvalidStateError):
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.result())


class StreamEnded(TransferFailed):
    """The stream that grows has ended before the chunk that was requested."""


class Coalesce(Protocol):
    """Calls a function, and sends the messages that it causes in as few as possible."""

    def __call__(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result."""


def send_separately(act: Callable[[], T]) -> T:
    """Call `act` and return its result; its messages are not coalesced."""
    return act()


class DeliveryLease(Protocol):
    """The lease of an offered payload, which its `Delivery` ends."""

    def release(self, outcome: Outcome, reason: str) -> None:
        """End it; called once, in any thread. It must neither block nor take a lock."""

    def reject(self, reason: str) -> None:
        """Tell the producer that the payload is bad, while views of it are in use; not to block."""

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result; what it releases and requests may be sent in one."""


class GetLease:
    """The lease that a get of a table has."""

    __slots__ = ("_get_table", "epoch", "get_id")

    def __init__(self, get_table: GetTable, get_id: int, epoch: int):
        self._get_table, self.get_id, self.epoch = get_table, get_id, epoch

    def release(self, outcome: Outcome, reason: str) -> None:
        """See `DeliveryLease.release`."""
        self._get_table.release(self.get_id, self.epoch, outcome, reason)

    def reject(self, reason: str) -> None:
        """See `DeliveryLease.reject`."""
        self._get_table.reject(self.get_id, self.epoch, reason)

    def coalesce(self, act: Callable[[], T]) -> T:
        """See `DeliveryLease.coalesce`."""
        return self._get_table.coalesce(act)


def is_fault_of_payload(error: BaseException) -> bool:
    """Whether the bytes of a payload that was being opened are the reason of `error`."""
    return isinstance(error, (WireError, SchemaError))


_UNREAD: tuple[Outcome, str] = ("unread", "")
_READ: tuple[Outcome, str] = ("read", "")


class LeasedSpan(Finalizer):
    """Ends a lease, once, when the last view of a payload is freed, or before.

    At exit it does nothing: the end of the connection releases the payload.
    """

    __slots__ = ("lease", "outcome")

    lease: DeliveryLease
    outcome: tuple[Outcome, str]

    @classmethod
    def of(cls, region: Region, lease: DeliveryLease) -> LeasedSpan:
        """Return a new one, unread, which lives as long as the lease."""
        span = cls(region.span, cls.run)
        span.lease, span.outcome = lease, _UNREAD
        span.begin(region.span)
        return span

    def end(self) -> None:
        """End the lease."""
        self.lease.release(*self.outcome)


class Delivery:
    """A payload that arrived. Its lease ends when the last view of its region is freed.

    The outcome is "unread", also if it is only dropped, until its reader says that it was read, by
    `release` or `mark_read`. Of `release`, `release_unread` and `reject`, the first call decides.

    Attributes:
        key: of the payload.
        region: its bytes; None once it was released.
        draft: of a payload that is still being written: its header without digests.
        progress: of a payload that is still being written; None if it is complete.
        manifest: its header, if the connector has decoded it.
        copies: times its bytes were copied in this process.
        is_verified: whether every byte was, or is before its layer is announced, compared with its
            digest on arrival.

    `head`, if it is given, is what the region begins with: a copy of the header at least.
    """

    def __init__(
        self,
        key: str,
        region: Region,
        lease: DeliveryLease,
        *,
        draft: bytes = b"",
        progress: Progress | None = None,
        manifest: Manifest | None = None,
        copies: int = 0,
        is_verified: bool = False,
        head: memoryview | None = None,
    ):
        self._head = head
        self.key, self.copies, self.is_verified = key, copies, is_verified
        self.draft, self.progress, self.manifest = draft, progress, manifest
        self.region: Region | None = region
        self._pid = os.getpid()
        self._span = LeasedSpan.of(region, lease)

    def __repr__(self) -> str:
        return f"<Delivery of {self.key!r}{', released' if self.region is None else ''}>"

    def check_process(self) -> None:
        """Raise ClosedError in a forked child: the memory may be reused without its knowledge."""
        if os.getpid() != self._pid:
            check_process(self._pid, f"payload {self.key!r}")

    @property
    def is_read(self) -> bool:
        """Whether the payload counts as read when its lease ends, or has ended."""
        return self._span.outcome is _READ

    def mark_read(self) -> None:
        """Count it as read from now on, if it is dropped: its reader has taken it to its end."""
        if self.region is not None and self._span.outcome is _UNREAD:
            self._span.outcome = _READ

    def open_region(self) -> Region:
        """Return `region`; ClosedError if it was released, or belongs to a parent process."""
        self.check_process()
        region = self.region
        if region is None:
            raise ClosedError(f"payload {self.key!r} was released; use it inside its `with` block")
        if region.is_lost:
            raise ClosedError(f"payload {self.key!r}: {LOST}; get it in this process")
        return region

    def open_manifest(self, region: Region, layouts: LayoutCache) -> Manifest:
        """Return the manifest of what was requested; WireError if it is another payload's."""
        header = self.open_header(region, layouts)
        return header.manifest() if isinstance(header, KnownHeader) else header

    def open_header(self, region: Region, layouts: LayoutCache) -> Manifest | KnownHeader:
        """Return the header of what was requested; WireError if it is another payload's."""
        header: Manifest | KnownHeader | None = self.manifest
        if header is None:
            head, self._head = self._head, None
            text = self.draft or head or header_bytes(region)
            header = layouts.read_header(text, region.nbytes)
        if header.request_id != self.key:
            raise WireError(f"requested {self.key!r}, the payload says it is {header.request_id!r}")
        return header

    def reject(self, reason: str, *, at_once: bool = False) -> None:
        """Release a payload that is not what was committed; the producer learns it at once.

        Views that were handed out stay valid: the lease ends with the last of them. With `at_once`
        it ends now, because nobody has a view that will be used.
        """
        is_first = self._span.outcome[0] != "rejected"
        self._span.outcome = "rejected", shorten(reason)
        self._drop_region(
            TransferFailed(f"payload {self.key!r} was rejected here: {reason}", key=self.key)
        )
        if at_once:
            self._span.run()
        elif is_first and self._span.is_alive and os.getpid() == self._pid:
            self._span.lease.reject(shorten(reason))

    def release(self) -> None:
        """Drop the region, as read; the lease ends when the last view of it is freed, too."""
        if self.region is None:
            return
        if self._span.outcome is _UNREAD:
            self._span.outcome = _READ
        self._give_back()

    def release_unread(self) -> None:
        """Do what `release` does, and let another reader have the payload, unless it is bad."""
        if self.region is None:
            return
        if self._span.outcome is _READ:
            self._span.outcome = _UNREAD
        self._give_back()

    def end_after(self, error: BaseException) -> None:
        """End the lease now: nobody has a view that will be used, because `error` was raised.

        The payload is rejected if `is_fault_of_payload(error)`. After any other error, such as that
        of a signal handler or of missing memory, another reader may have it.
        """
        if is_fault_of_payload(error):
            self.reject(str(error) or repr(error), at_once=True)
        else:
            self.release_unread()
            self._span.run()  # the error's traceback may keep a view

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act`; what it releases and requests is sent in one message, if possible."""
        return self._span.lease.coalesce(act)

    def _give_back(self) -> None:
        if self.progress is None:
            self.coalesce(self._drop)
        else:
            error = ClosedError(f"payload {self.key!r} was given back")
            self.coalesce(partial(self._drop_region, error))

    def _drop(self) -> None:
        self.region = None

    def _drop_region(self, error: KVLinkError) -> None:
        self.region = None
        if self.progress is not None and os.getpid() == self._pid:  # it takes a lock
            self.progress.fail(error)


class ChunkOf(NamedTuple):
    """Chunk `number` of the stream that the get number `stream` has received.

    With `stream` 0 it is the stream itself, of which the chunks are requested from `number` on.
    """

    stream: int
    number: int


class OwnedGet(Finalizer):
    """The request of a get, or the lease of its offer; `drop` ends it if the get is dropped."""

    __slots__ = ("_drop", "get_id", "is_answered", "offer")

    get_id: int
    is_answered: bool
    """Whether its answer has come, so that nothing else ends it."""
    offer: Offer | None
    _drop: Callable[[OwnedGet], None]

    @classmethod
    def of(cls, get_state: GetState, drop: Callable[[OwnedGet], None]) -> OwnedGet:
        """Return that of a get; `drop` takes no lock, and may be called twice."""
        owned = cls(get_state, cls.run)
        owned.get_id, owned.is_answered, owned.offer = get_state.get_id, False, None
        owned._drop = drop
        owned.begin(get_state)
        return owned

    def end(self) -> None:
        """Cancel the request, or release the payload unread."""
        self._drop(self)


class GetState:
    """One get: its `answer` is the producer's Offer, or the error to raise.

    It owns the request, and the lease of the offer, until `settle`. If it is dropped before, as by
    an exception of a signal handler, its `owned` cancels the request or releases the payload
    unread. So the table does not keep it.

    Of a connector that brings the bytes here first, `ready` ends when they are here, and `inbound`
    is their transfer. `phase`, how far the payload was when it was last heard of, is for errors.
    """

    def __init__(
        self,
        get_id: int,
        key: str,
        ready: Answer[None] | None,
        drop: Callable[[OwnedGet], None],
        *,
        streamed: bool,
        verify: bool,
    ):
        self.ready = ready
        self.get_id, self.key, self.streamed, self.verify = get_id, key, streamed, verify
        self.inbound: object = None
        self.phase = "not announced by the producer since it was requested"
        self.started = time.monotonic()
        self.progress: Progress | None = None
        self.answer: Answer[Offer] = Answer()  # only the table sets it
        self.owned = OwnedGet.of(self, drop)  # last: from here on it owns

    @property
    def offer(self) -> Offer | None:
        """The producer's answer, once it has come."""
        return self.owned.offer

    @property
    def is_settled(self) -> bool:
        """Whether it owns nothing any more."""
        return not self.owned.is_alive

    def settle(self) -> None:
        """Give up the ownership: the get was cancelled, has failed, or its lease has an owner."""
        self.owned.detach()

    def fail(self, error: KVLinkError) -> None:
        """End the get with an error instead of an offer."""
        self.settle()
        self.answer.set_error(error)
        if self.ready is not None:
            self.ready.set_error(error)

    def timeout_error(self) -> TransferTimeout:
        """Return the error of a get whose time is over."""
        waited = time.monotonic() - self.started
        return TransferTimeout(
            f"no payload {self.key!r} after {format_seconds(waited)}: {self.phase}",
            key=self.key,
            waited=waited,
            phase=self.phase,
        )


class GetTable:
    """The gets of one connection; thread-safe.

    `send` takes a message for the producer, `send_all` several; they must not block. `post` takes
    a Cancel or Release from a finalizer and must not even take a lock. `coalesce` calls a function,
    and sends the messages that it causes in as few as possible.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        post: Callable[[Message], None],
        send_all: Callable[[Sequence[Message]], None],
        coalesce: Coalesce = send_separately,
    ):
        self.coalesce = coalesce
        self._send, self._post, self._send_all = send, post, send_all
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Who removes a get from here, or marks it as answered, ends it: its answer, `cancel`, or
        # its finalizer. An answer removes it last, so that after an interrupt it can come again.
        self._waiting: dict[int, OwnedGet] = {}
        self._streams: dict[int, tuple[str, Progress]] = {}
        self._leased: set[int] = set()
        self._last_id = 0
        self._error: KVLinkError | None = None

    @property
    def waiting(self) -> int:
        """The number of gets that have no answer yet."""
        return len(self._waiting)

    def request(
        self,
        key: str,
        *,
        streamed: bool = False,
        early: bool = False,
        verify: bool = True,
        ready: Answer[None] | None = None,
        of: ChunkOf | None = None,
    ) -> GetState:
        """Request a payload; raises PeerLostError if the connection has ended.

        `early`: its bytes may be sent while it is being written, although it is taken whole.
        `verify`: compare them with their digests as they arrive, if they are copied here.
        `of`: request a chunk, or a stream that grows.
        """
        with self._lock:
            get_state = self._add(key, ready, streamed=streamed, verify=verify)
        number = get_state.get_id
        if of is None:
            self._send(Get(number, key, streamed or early))
        else:
            if of.stream:
                get_state.phase = f"chunk {of.number} of the stream is not written yet"
            self._send(Get(number, key, streamed or early, of.stream or number, of.number))
        return get_state

    def request_all(
        self,
        keys: Sequence[str],
        *,
        early: bool = False,
        verify: bool = True,
        ready: Callable[[], Answer[None]] | None = None,
    ) -> list[GetState]:
        """Request several payloads at once; `ready` makes an answer for each. See `request`."""
        with self._lock:
            get_states = [
                self._add(key, None if ready is None else ready(), streamed=False, verify=verify)
                for key in keys
            ]
        self._send_all([Get(one.get_id, one.key, early) for one in get_states])
        return get_states

    def cancel(self, get_state: GetState) -> bool:
        """Cancel a get; False if its answer came first, so that the caller must take that."""
        if os.getpid() != self._pid:
            return True  # it is its parent's
        with self._lock:
            owned = self._waiting.get(get_state.get_id)
            if owned is None or owned.is_answered:
                return False
            del self._waiting[get_state.get_id]
        self._send(Cancel(get_state.get_id))
        get_state.settle()
        return True

    def wait(self, get_state: GetState, timeout: float) -> Offer:
        """Block until the answer comes; raises as `PendingGet.wait`, and cancels the get then."""
        if os.getpid() != self._pid:
            check_process(self._pid, f"the get of {get_state.key!r}")
        try:
            answer = get_state.answer
            if not answer.is_set():
                if not answer.wait(check_timeout(timeout)) and self.cancel(get_state):
                    raise get_state.timeout_error()
                answer.wait(MAX_TIMEOUT)  # it is being set
            return answer.result()
        except BaseException:
            self.drop(get_state)
            raise

    def drop(self, get_state: GetState) -> None:
        """Cancel a get, or release its offer unread; does nothing to one that has ended."""
        if get_state.is_settled:
            return
        if self.cancel(get_state):
            return
        get_state.answer.wait(MAX_TIMEOUT)  # it is being set
        if get_state.answer.error is None:
            self.release(get_state.get_id, get_state.answer.result().epoch, "unread")
            get_state.settle()

    def find(self, get_id: int) -> GetState | None:
        """Return a get that has no answer yet."""
        with self._lock:
            ref = self._waiting.get(get_id)
            return None if ref is None else ref()

    def release(self, get_id: int, epoch: int, outcome: Outcome, reason: str = "") -> None:
        """End the lease of a get; callable from finalizers."""
        self._streams.pop(get_id, None)
        self._leased.discard(get_id)
        self._post(Release(get_id, epoch, outcome, reason))

    def reject(self, get_id: int, epoch: int, reason: str) -> None:
        """Tell the producer that a payload is not what was committed; its lease goes on."""
        self._post(Reject(get_id, epoch, reason))

    def on_message(self, message: Message) -> None:
        """Handle a message of the producer: wake the get that it is for.

        An offer for a get that was cancelled is released unread. Raises WireError if a producer
        must not send the message.
        """
        if isinstance(message, Offer):
            get_state = self._find_answered(message.get_id)
            if get_state is None and message.get_id in self._leased:
                return  # a repeated message: the lease is in use
            if get_state is None:
                self.release(message.get_id, message.epoch, "unread")
            else:
                get_state.owned.offer = message  # first: a get that is dropped now releases it
                if message.draft:
                    get_state.progress = get_state.progress or Progress()
                    self._streams[message.get_id] = get_state.key, get_state.progress
                self._leased.add(message.get_id)
                get_state.answer.set_result(message)
            self._waiting.pop(message.get_id, None)
        elif isinstance(message, Status):
            waiting = self.find(message.get_id)
            if waiting is not None:
                waiting.phase = message.phase
        elif isinstance(message, Failed):
            get_state = self._find_answered(message.get_id)
            if get_state is not None:
                get_state.fail(get_error(get_state.key, message))
                self._waiting.pop(message.get_id, None)
            elif (stream := self._streams.pop(message.get_id, None)) is not None:
                key, progress = stream
                progress.fail(get_error(key, message))
        elif isinstance(message, (Layer, Committed)):
            stream = self._streams.get(message.get_id)
            if stream is None:
                return  # it was released
            _, progress = stream
            if isinstance(message, Layer):
                progress.announce(message.first, message.digests)
            else:
                progress.commit()
        else:
            unexpected(message)

    def fail(self, key: str, error: KVLinkError) -> None:
        """Fail every waiting get of one key, and every stream of it."""
        with self._lock:
            waiting = [get_state for get_state in self._unanswered() if get_state.key == key]
            for get_state in waiting:
                self._waiting.pop(get_state.get_id, None)
        for get_state in waiting:
            get_state.fail(error)
        self._fail_streams(error, key)

    def close(self, error: KVLinkError) -> list[GetState]:
        """Fail all gets, also later ones, and all streams; return the gets that were waiting."""
        with self._lock:
            if self._error is None:
                # Without its traceback, whose frames hold the session and its last payload.
                self._error = type(error)(str(error))
            waiting = self._alive()  # also one whose answer was interrupted: it comes no more
            self._waiting.clear()
        for get_state in waiting:
            get_state.fail(type(error)(f"{error}; {get_state.key!r} was awaited"))
        self._fail_streams(error)
        return waiting

    def disconnect(self) -> None:
        """Send no more messages: the connection is gone, and its session need not be kept."""
        self._send = self._post = self._send_all = _ignore
        self.coalesce = send_separately

    def _add(
        self, key: str, ready: Answer[None] | None, *, streamed: bool, verify: bool
    ) -> GetState:
        if self._error is not None:
            raise type(self._error)(str(self._error))
        self._last_id += 1
        get_state = GetState(
            self._last_id, key, ready, self._on_dropped, streamed=streamed, verify=verify
        )
        self._waiting[self._last_id] = get_state.owned
        return get_state

    def _fail_streams(self, error: KVLinkError, key: str | None = None) -> None:
        for get_id in list(self._streams):  # a finalizer may remove one meanwhile
            stream = self._streams.get(get_id)
            if stream is not None and key in (None, stream[0]):
                self._streams.pop(get_id, None)
                stream[1].fail(error)

    def _on_dropped(self, owned: OwnedGet) -> None:
        """For finalizers: takes no lock. An interrupt may call it again."""
        if os.getpid() != self._pid:
            return
        if owned.get_id in self._waiting and not owned.is_answered:
            self._post(Cancel(owned.get_id))
            self._waiting.pop(owned.get_id, None)
        elif owned.offer is not None:
            self.release(owned.get_id, owned.offer.epoch, "unread")

    def _unanswered(self) -> list[GetState]:
        return [state for state in self._alive() if not state.owned.is_answered]

    def _alive(self) -> list[GetState]:
        return [state for ref in list(self._waiting.values()) if (state := ref()) is not None]

    def _find_answered(self, get_id: int) -> GetState | None:
        """Mark a waiting get as answered, and return it; None if there is none, or it is gone."""
        with self._lock:
            owned = self._waiting.get(get_id)
            if owned is None:
                return None
            owned.is_answered, get_state = True, owned()
            if get_state is None:
                del self._waiting[get_id]
            return get_state


def _ignore(message: object) -> None:
    pass


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return a timeout that every clock accepts; infinity means no limit.

    SchemaError for a negative number, for NaN, and for what is no number.
    """
    if type(seconds) in _NUMBERS and 0 <= seconds < MAX_TIMEOUT:  # a call costs more than the test
        return seconds
    limit: float = _TIMEOUT.read(seconds, name)
    return min(MAX_TIMEOUT, limit)


def result_of(future: Future[T], timeout: float | None = None) -> T:
    """Return a future's result, or raise a copy of its error.

    The traceback of the error itself would keep the frames that wait, which hold the future: a
    reference cycle with all that they use.
    """
    error = future.exception(timeout)
    if error is None:
        return future.result()
    try:
        raise copy.copy(error)
    finally:
        del error


def get_error(key: str, message: Failed) -> KVLinkError:
    """Return the error that a get of `key` raises when the producer sends this message."""
    if message.ending == "closed":
        return PeerLostError(f"the producer closed the link while {key!r} was awaited")
    kind = StreamEnded if message.ending == "complete" else TransferFailed
    text = f"payload {key!r} {message.ending}: {message.reason}"
    return kind(text, key=key, reason=message.reason)
