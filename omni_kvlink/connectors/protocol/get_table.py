"""The consumer's half of the protocol without I/O: gets and their answers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from omni_kvlink.connectors.protocol.delivery import Coalesce, send_separately
from omni_kvlink.connectors.protocol.inspection import Inspections
from omni_kvlink.connectors.protocol.messages import (
    Cancel,
    Committed,
    Contained,
    Contains,
    Failed,
    Get,
    Inspected,
    Layer,
    Message,
    Offer,
    Outcome,
    Reject,
    Release,
    Status,
    unexpected,
)
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.errors import (
    KVLinkError,
    MissingError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
    format_seconds,
)
from omni_kvlink.memory.region import Finalizer
from omni_kvlink.system import process
from omni_kvlink.system.waits import MAX_TIMEOUT, Answer
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class StreamEnded(TransferFailed):
    """The append stream has ended before the chunk that was requested."""


class ChunkOf(NamedTuple):
    """Chunk `number` of the stream that the get number `stream` has received.

    With `stream` 0 it is the stream itself, of which the chunks are requested from `number` on.
    """

    stream: int
    number: int


class GetRequest(msgspec.Struct, frozen=True, gc=False):
    """One payload to be requested; or, with `chunk`, an append stream or a chunk of one.

    `streamed` takes it while it is being written. Without `waits` it fails if there is no such
    payload now.
    """

    key: str
    streamed: bool = False
    chunk: ChunkOf | None = None
    waits: bool = True


class Query(NamedTuple):
    """A question about keys, and its answer: for each key whether a get would have it at once."""

    number: int
    answer: Answer[tuple[bool, ...]]


class OwnedGet(Finalizer):
    """The request of a get, or the lease of its offer; `drop` ends it if the get is dropped."""

    __slots__ = ("_drop", "get_id", "is_answered", "offer")

    get_id: int
    is_answered: bool
    """Whether its answer has come, so that nothing else ends it."""
    offer: Offer | None
    _drop: Callable[[OwnedGet], None]

    @classmethod
    def attach(cls, get_state: GetState, drop: Callable[[OwnedGet], None]) -> OwnedGet:
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
    """One get of a session: its `answer` is the producer's Offer, or the error to raise.

    It owns the request, and the lease of the offer, until `settle`. If it is dropped before, as by
    an exception of a signal handler, its `owned` cancels the request or releases the payload
    unread. So the table does not keep it.

    `done` is set when a `wait` would not block: with the answer, or, if the connector `fetches` the
    bytes first, when they are here. `phase`, how far the payload was when it was last heard of, is
    for errors.
    """

    progress: Progress | None = None
    phase = "not announced by the producer since it was requested"

    def __init__(
        self,
        session: Any,
        get_id: int,
        request: GetRequest,
        drop: Callable[[OwnedGet], None],
        *,
        verify: bool,
        fetches: bool,
    ):
        self.session, chunk = session, request.chunk
        self.get_id, self.key, self.verify = get_id, request.key, verify
        self.streamed = request.streamed
        if chunk is not None and chunk.stream:
            self.phase = f"chunk {chunk.number} of the stream is not written yet"
        self.started = time.monotonic()
        self.answer: Answer[Offer] = Answer()  # only the table sets it
        self.done: Answer[Any] = Answer() if fetches else self.answer
        self._process = process.current
        self.owned = OwnedGet.attach(self, drop)  # last: from here on it owns

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
        if self.done is not self.answer:
            self.done.set_error(error)

    def report(self, scheme: str, error: BaseException) -> None:
        """Tell the observers that the get has failed; the end of a stream is no failure."""
        if not isinstance(error, StreamEnded):
            observers.get_failed(scheme, self.key, error, time.monotonic() - self.started)

    def timeout_error(self) -> TransferTimeout:
        """Return the error of a get whose time is over."""
        waited = time.monotonic() - self.started
        return TransferTimeout(
            f"no payload {self.key!r} after {format_seconds(waited)}: {self.phase}",
            key=self.key,
            waited=waited,
            phase=self.phase,
        )


GetT = TypeVar("GetT", bound=GetState)


class GetTable(Generic[GetT]):
    """The gets of one connection; thread-safe.

    `make` returns a get, of its number and what `GetState` takes behind that. `send` takes a
    message for the producer, `send_all` several; they must not block. `post` takes a Cancel or
    Release from a finalizer and must not even take a lock. `coalesce` calls a function, and sends
    the messages that it causes in as few as possible. With `fetches` the connector brings the bytes
    here: they may be sent while a payload is being written, although it is taken whole.
    `scheme` is of the URL of the connection, for observers.
    """

    scheme = ""

    def __init__(
        self,
        make: Callable[..., GetT],
        send: Callable[[Message], None],
        post: Callable[[Message], None],
        send_all: Callable[[Sequence[Message]], None],
        coalesce: Coalesce = send_separately,
        *,
        fetches: bool = False,
    ):
        self.coalesce, self._fetches, self._make = coalesce, fetches, make
        self._send, self._post, self._send_all = send, post, send_all
        self._process = process.current
        self._lock = threading.Lock()
        # Who removes a get from here, or marks it as answered, ends it: its answer, `cancel`, or
        # its finalizer. An answer removes it last, so that after an interrupt it can come again.
        self._waiting: dict[int, OwnedGet] = {}
        self._streams: dict[int, tuple[str, Progress]] = {}
        self._leased: set[int] = set()
        self._queries: dict[int, Query] = {}
        self._last_id = 0
        self._error: KVLinkError | None = None
        self.path_names = "", ""  # of the connection; see `LinkPath.names`
        self.inspections = Inspections(send)

    @property
    def waiting(self) -> int:
        """The number of gets that have no answer yet."""
        return len(self._waiting)

    def request(self, requests: Sequence[GetRequest], *, verify: bool = True) -> list[GetT]:
        """Request payloads; raises PeerLostError if the connection has ended.

        `verify`: compare them with their digests as they arrive, if they are copied here.
        """
        messages, get_states = list[Message](), list[GetT]()
        with self._lock:
            for request in requests:
                get_states.append(self._add(request, verify, messages))
        if len(messages) == 1:
            self._send(messages[0])
        else:
            self._send_all(messages)
        return get_states

    def query(self, keys: Sequence[str]) -> Query:
        """Ask which of these keys a get would have at once; PeerLostError as `request`."""
        with self._lock:
            self._check_connected()
            self._last_id += 1
            number = self._last_id
            query = self._queries[number] = Query(number, Answer())
        self._send(Contains(number, tuple(keys)))
        return query

    def forget(self, query: Query) -> None:
        """Take no answer to a query any more."""
        self._queries.pop(query.number, None)

    def cancel(self, get_state: GetState) -> bool:
        """Cancel a get; False if its answer came first, so that the caller must take that."""
        if not self._process.is_current:
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
        """Block until the answer comes; raises as `PendingGet.wait`, and cancels the get then.

        `timeout` is one that `check_timeout` has returned.
        """
        if not self._process.is_current:
            self._process.check(f"the get of {get_state.key!r}")
        try:
            answer = get_state.answer
            if not answer.is_set():
                if not answer.wait(timeout) and self.cancel(get_state):
                    raise get_state.timeout_error()
                answer.wait(MAX_TIMEOUT)  # it is being set
            return answer.result()
        except BaseException as error:
            self.drop(get_state)
            get_state.report(self.scheme, error)
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

    def find(self, get_id: int) -> GetT | None:
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
        elif isinstance(message, Contained):
            query = self._queries.pop(message.query, None)
            if query is not None:  # else nobody waits for it any more
                query.answer.set_result(message.found)
        elif isinstance(message, (Layer, Committed)):
            stream = self._streams.get(message.get_id)
            if stream is None:
                return  # it was released
            _, progress = stream
            if isinstance(message, Layer):
                progress.announce(message.first, message.digests)
            else:
                progress.commit(message.extra)
        elif isinstance(message, Inspected):
            self.inspections.on_answer(message)
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

    def close(self, error: KVLinkError) -> list[GetT]:
        """Fail all gets, also later ones, and all streams; return the gets that were waiting."""
        with self._lock:
            if self._error is None:
                # Without its traceback, whose frames hold the session and its last payload.
                self._error = type(error)(str(error))
            waiting = self._alive()  # also one whose answer was interrupted: it comes no more
            self._waiting.clear()
            queries = list(self._queries.values())
            self._queries.clear()
        for query in queries:
            query.answer.set_error(type(error)(str(error)))
        for get_state in waiting:
            get_state.fail(type(error)(f"{error}; {get_state.key!r} was awaited"))
        self._fail_streams(error)
        self.inspections.close(error)
        return waiting

    def disconnect(self) -> None:
        """Send no more messages: the connection is gone, and its session need not be kept.

        Called after `close`: there are no more requests either.
        """
        del self._make
        self._send = self._post = self._send_all = _ignore
        self.inspections.disconnect()
        self.coalesce = send_separately

    def _add(self, request: GetRequest, verify: bool, messages: list[Message]) -> GetT:
        """Append the message that requests it to `messages`; called with the lock held."""
        self._check_connected()
        self._last_id += 1
        number, chunk, streamed = self._last_id, request.chunk, request.streamed or self._fetches
        if chunk is None:
            messages.append(Get(number, request.key, streamed, waits=request.waits))
        else:
            stream = chunk.stream or number
            messages.append(Get(number, request.key, streamed, stream, chunk.number))
        get_state = self._make(
            number, request, self._on_dropped, verify=verify, fetches=self._fetches
        )
        self._waiting[number] = get_state.owned
        return get_state

    def _check_connected(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _fail_streams(self, error: KVLinkError, key: str | None = None) -> None:
        for get_id in list(self._streams):  # a finalizer may remove one meanwhile
            stream = self._streams.get(get_id)
            if stream is not None and key in (None, stream[0]):
                self._streams.pop(get_id, None)
                stream[1].fail(error)

    def _on_dropped(self, owned: OwnedGet) -> None:
        """For finalizers: takes no lock. An interrupt may call it again."""
        if not self._process.is_current:
            return
        if owned.get_id in self._waiting and not owned.is_answered:
            self._post(Cancel(owned.get_id))
            self._waiting.pop(owned.get_id, None)
        elif owned.offer is not None:
            self.release(owned.get_id, owned.offer.epoch, "unread")

    def _unanswered(self) -> list[GetT]:
        return [state for state in self._alive() if not state.owned.is_answered]

    def _alive(self) -> list[GetT]:
        return [state for ref in list(self._waiting.values()) if (state := ref()) is not None]

    def _find_answered(self, get_id: int) -> GetT | None:
        """Mark a waiting get as answered, and return it; None if there is none, or it is gone."""
        with self._lock:
            owned = self._waiting.get(get_id)
            if owned is None:
                return None
            owned.is_answered, get_state = True, owned()
            if get_state is None:
                del self._waiting[get_id]
            return get_state


_ERRORS = {"complete": StreamEnded, "missing": MissingError}


def _ignore(message: object) -> None:
    pass


def get_error(key: str, message: Failed) -> KVLinkError:
    """Return the error that a get of `key` raises when the producer sends this message."""
    if message.ending == "closed":
        return PeerLostError(f"the producer closed the link while {key!r} was awaited")
    kind = _ERRORS.get(message.ending, TransferFailed)
    text = f"payload {key!r} {message.ending}: {message.reason}"
    return kind(text, key=key, reason=message.reason)


class GetLease(NamedTuple):
    """The lease that a get of a table has."""

    get_table: GetTable[Any]
    get_id: int
    epoch: int

    @property
    def scheme(self) -> str:
        """The scheme of the connection; see `Delivery.scheme`."""
        return self.get_table.scheme

    def path_name(self, *, is_copy: bool) -> str:
        """See `DeliveryLease.path_name`."""
        return self.get_table.path_names[is_copy]

    def release(self, outcome: Outcome, reason: str) -> None:
        """See `DeliveryLease.release`."""
        self.get_table.release(self.get_id, self.epoch, outcome, reason)

    def reject(self, reason: str) -> None:
        """See `DeliveryLease.reject`."""
        self.get_table.reject(self.get_id, self.epoch, reason)

    def coalesce(self, act: Callable[[], T]) -> T:
        """See `DeliveryLease.coalesce`."""
        return self.get_table.coalesce(act)
