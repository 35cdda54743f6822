"""The consumer of every connector: one session at a time, renewed when the producer comes back."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from omni_kvlink.connectors.base import MAX_RETRIES, Consumer, PendingGet
from omni_kvlink.connectors.protocol.delivery import Delivery, is_fault_of_payload
from omni_kvlink.connectors.protocol.get_table import (
    ChunkOf,
    GetLease,
    GetRequest,
    GetState,
    GetTable,
    Query,
)
from omni_kvlink.connectors.protocol.messages import (
    ANSWERS,
    MAX_KEYS,
    MAX_MESSAGE,
    PROTOCOL,
    SLOT,
    Abort,
    Hello,
    Inspected,
    Location,
    Message,
    Offer,
    Refused,
    common_version,
    holds,
    shorten,
)
from omni_kvlink.connectors.protocol.path import path_refusal
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.errors import (
    ClosedError,
    ConnectorError,
    IntegrityError,
    KVLinkError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
    VersionError,
    WireError,
    format_seconds,
)
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.format import MAX_HEADER
from omni_kvlink.system.failures import translate_errors
from omni_kvlink.system.threads import is_abandoned, uninterrupted
from omni_kvlink.system.waits import Answer, Deadline, LazyEvent, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.path import LinkPath
    from omni_kvlink.connectors.runtime.event_loop import EventLoop

_log = logging.getLogger("omni_kvlink")
T = TypeVar("T")
_KEY_OVERHEAD = 32
"""Bytes of a message beside the keys in it, and of a key beside its characters, at most."""
_RECONNECT_SECONDS = 0.5
"""Seconds that a live producer may take to answer again after its connection broke."""


class Session(ABC):
    """One connection to one run of a producer, which `incarnation` identifies.

    `path` is that of its payloads; None if it cannot be told. `required` is what the producer
    requires of it; None if that is of a version which requires nothing, and heeds nothing.
    """

    get_table: GetTable[Any]
    incarnation: str
    path: LinkPath | None = None
    required: tuple[str, ...] | None = None
    version = PROTOCOL[0]
    """The highest protocol version that both sides speak."""
    is_closed = False
    has_inline = True
    """Whether the last payload came inside its offer; if not, a get allocates nothing before."""
    _loop: EventLoop
    """The loop in which `close` may be called."""

    @abstractmethod
    def send(self, message: Abort | Refused) -> None:
        """Send a message to the producer; does not block."""

    def take_hello(self, hello: Hello) -> None:
        """Take from the producer's Hello what there is to be known of it."""
        self.incarnation, self.required = hello.incarnation, hello.require
        self.version = common_version(hello.versions) or PROTOCOL[0]

    def refuse(self, reason: str) -> None:
        """Tell the producer why this connection's path is not as required, and end it."""
        self.send(Refused(shorten(reason), PROTOCOL))
        self.close()

    def take_path(self, path: LinkPath, url: str, known: LinkPath | None = None) -> None:
        """Take this path from now on; log it, unless it is called as `known`, or as before."""
        if path.name not in (known.name if known else "", self.get_table.path_names[0]):
            _log.info("%s goes by %s: %s", url, path.name, path.why)
        self.path, self.get_table.path_names = path, path.names

    def path_refusal(self, require: Sequence[str]) -> str:
        """Return why the path is not as either side requires, with the cure; "" if it is."""
        union = {*require, *(self.required or ())}
        if "rdma" in union and self.required is None:
            return "the producer is of an earlier version, which sends small payloads over TCP"
        return path_refusal(self.path, union)

    def contains(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        """Ask the producer for keys; see `Consumer.contains`."""
        queries = list[Query]()
        try:
            queries.extend(map(self.get_table.query, _messages_of(keys)))
            for query in queries:
                self.receive_answer(query.answer, deadline)
                if not query.answer.wait(deadline.seconds_left()):
                    waited = format_seconds(deadline.timeout)
                    raise TransferTimeout(f"no answer about {len(keys)} keys after {waited}")
            return [is_here for query in queries for is_here in query.answer.result()]
        finally:
            for query in queries:
                self.get_table.forget(query)

    def receive_answer(  # noqa: B027 (optional)
        self, answer: Answer[tuple[bool, ...]], deadline: Deadline
    ) -> None:
        """Receive it in the calling thread, where that is possible; returns at the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Fail every waiting get with ClosedError; disconnect when the last view is freed.

        If it disconnected earlier, the producer would reuse memory that a reader still looks at.
        """

    def stats(self) -> dict[str, Any]:
        """Return what is to be known of this connection, as JSON values."""
        return {}

    def close_deferred(self) -> None:
        """Close in the loop's thread; takes no lock."""
        self._loop.call(self.close)

    def fail(self, key: str, error: KVLinkError) -> None:
        """Fail every get of this key that waits here."""
        self.get_table.fail(key, error)


class SessionGet(GetState, PendingGet):
    """A get of a session's table."""

    session: Session
    _future: Future[Any] | None = None

    @property
    def future(self) -> Future[Any]:  # type: ignore[override]
        """Made when it is asked for: a get that blocks needs none."""
        if self._future is None:
            self._future = self.done.future()
        return self._future

    @property
    def is_done(self) -> bool:
        """Whether the payload, its offer, or an error has come."""
        return self.done.is_set()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Call this once when it has; without a future."""
        self.done.add_done_callback(callback)

    def request_chunk(self, number: int) -> PendingGet:
        """Request a chunk of the stream that this get has received."""
        request = GetRequest(self.key, chunk=ChunkOf(self.get_id, number))
        [chunk] = self.session.get_table.request([request], verify=self.verify)
        assert isinstance(chunk, SessionGet)
        return chunk


class MappedSession(Session):
    """A session with a producer whose memory is mapped in this process."""

    @abstractmethod
    def slot(self, location: Location, draft: int) -> Region:
        """Return the mapped slot of an offer: its head, the payload, and `draft` bytes behind it.

        Raises WireError if there is no such memory.
        """

    def receive_until(self, event: LazyEvent, deadline: float) -> None:
        """See `PendingGet.receive_until`."""

    def receive_answer(self, answer: Answer[tuple[bool, ...]], deadline: Deadline) -> None:
        """Receive it in this thread: it comes sooner than by the loop."""
        self.receive_until(answer, deadline.at)


class MappedGet(SessionGet):
    """A get of a payload that lies in memory which both sides map."""

    session: MappedSession

    @property
    def connection(self) -> MappedSession:  # type: ignore[override]
        """Its session, which `receive_until` receives for."""
        return self.session

    def receive_until(self, event: LazyEvent, deadline: float) -> None:
        """See `PendingGet.receive_until`."""
        if self._process.is_current:
            self.session.receive_until(event, deadline)

    def wait(self, *, timeout: float) -> Delivery:
        """Block until the offer comes, and map it."""
        get_table, answer = self.session.get_table, self.answer
        limit = check_timeout(timeout)
        if not answer.is_set():
            deadline = time.monotonic() + limit
            if self.inline_target is not None and limit and self.session.has_inline:
                self.inline_target.open()
            if self._process.is_current:
                self.session.receive_until(answer, deadline)
            limit = max(0.0, deadline - time.monotonic())
        offer = get_table.wait(self, limit)
        lease = GetLease(get_table, self.get_id, offer.epoch)
        try:
            fault_points.point("get.offered")
            self.session.has_inline = bool(offer.inline)
            if offer.inline:
                return self._deliver_inline(offer, lease)
            nbytes, draft = offer.location.nbytes, offer.draft
            if draft > 8 + MAX_HEADER:  # it will be copied
                raise WireError(f"a header of {draft} bytes; the limit is {8 + MAX_HEADER}")
            slot = self.session.slot(offer.location, draft)
            if not holds(slot, offer.epoch, nbytes, committed=not draft):
                raise IntegrityError(f"the slot offered for {self.key!r} holds another")
            region = slot.slice(SLOT, nbytes)
            header = bytes(slot.view(SLOT + nbytes, SLOT + nbytes + draft))
            fault_points.point("get.mapped")
        except BaseException as error:
            if is_fault_of_payload(error):
                lease.release("rejected", shorten(repr(error)))
                self.settle()
            else:
                get_table.drop(self)  # now: the error's traceback may keep the get
            self.report(get_table.scheme, error)
            raise
        delivery = Delivery(
            self.key,
            region,
            lease,
            draft=header,
            progress=self.progress,
            extra=offer.extra,
        )
        self.settle()
        return delivery

    def _deliver_inline(self, offer: Offer, lease: GetLease) -> Delivery:
        """Copy a payload that came inside its offer into memory of its own, where it is aligned."""
        nbytes = offer.inline.nbytes
        if offer.location.nbytes != nbytes or offer.draft:
            raise WireError(f"a payload of {nbytes} bytes was offered as another")
        target = self.inline_target
        region = None if target is None else target.fill(offer.inline, verify=False)
        head = offer.inline if region is None else None
        region = region or Region.copy_of(offer.inline)
        fault_points.point("get.mapped")
        delivery = Delivery(self.key, region, lease, copies=1, head=head)
        self.settle()
        return delivery

    def cancel(self) -> None:
        """Withdraw the request, or release the offer unread."""
        self.session.get_table.drop(self)


class SessionConsumer(Consumer):
    """A consumer that reconnects to its producer after a restart; subclasses open the sessions."""

    tells_path = True

    def __init__(self, url: str, require: Sequence[str] = ()):
        super().__init__(url)
        self._url, self._require = url, require
        self._taken: LinkPath | None = None  # the path of the last session
        self._opening = threading.Lock()
        self._connecting = 0  # the thread of `connect`, until it has returned
        self._session: Session | None = None
        self._sessions = 0

    @abstractmethod
    def _open(self, timeout: float, *, no_wait: bool = False) -> Session:
        """Wait for a producer and complete the handshake, both within `timeout` seconds.

        With `no_wait` only for the answer of a producer that is there. Raises TransferTimeout, or
        ClosedError if the link was closed meanwhile.
        """

    def _interrupt(self) -> None:
        """Wake a thread that waits in `_open`: the link was closed."""

    def connect(self, timeout: float) -> Consumer:
        """Open the first session and return this consumer; close it if that fails."""
        self._connecting = threading.get_ident()
        _open_consumers.add(self)
        try:
            if _has_ended.is_set():
                raise ClosedError(f"link {self._url} was opened after the main thread had ended")
            if is_abandoned():  # before `cancel_connect` could find this consumer
                raise ClosedError(f"link {self._url}: its connect was interrupted")
            self._replace(timeout)
        except BaseException:
            self.close()
            raise
        self._connecting = 0
        return self

    @property
    def is_connected(self) -> bool:
        """Whether there is a session that has not ended."""
        return self._session is not None and not self._session.is_closed

    def begin(
        self, requests: Sequence[GetRequest], *, timeout: float, verify: bool = True
    ) -> list[PendingGet]:
        """Request payloads; blocks only while it reconnects."""
        session = self._session
        if self._closed or session is None or session.is_closed:
            session = self._new_session(timeout)
        if requests and not requests[0].waits:
            self._check_answers(session, "a get can be told not to wait")
        gets: list[PendingGet] = session.get_table.request(requests, verify=verify)
        return gets

    def can_retry(self, pending: PendingGet, *, timeout: float) -> bool:
        """Return whether the producer of a get can be reached again, and reconnect."""
        assert isinstance(pending, SessionGet)
        old, limit = pending.session, min(timeout, _RECONNECT_SECONDS)
        if self._closed or limit <= 0:
            return False
        try:
            new = uninterrupted(partial(self._replace, limit, no_wait=True))
        except (KVLinkError, TimeoutError):
            return False  # the caller raises the error that ended the first session
        return new is not old and new.incarnation == old.incarnation

    def contains(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        """Ask the producer; again if only the connection broke."""
        deadline, retries = Deadline(timeout), 0
        while True:
            session = self._session
            if self._closed or session is None or session.is_closed:
                session = self._new_session(deadline.seconds_left())
            self._check_answers(session, "keys can be asked for")
            try:
                return session.contains(keys, deadline)
            except PeerLostError:
                retries += 1
                if retries > MAX_RETRIES or not deadline.seconds_left():
                    raise

    def abort(self, key: str, reason: str) -> None:
        """End this key for both sides."""
        self._check_open()
        session = self._session
        if session is not None and not session.is_closed:
            session.send(Abort(key, shorten(reason)))
            error = TransferFailed(f"payload {key!r} aborted: {reason}", key=key, reason=reason)
            session.fail(key, error)

    def inspect(self, after: int, prefix: str, *, timeout: float) -> Inspected:
        """Ask the producer for a page of its payloads; blocks for the answer."""
        deadline = time.monotonic() + timeout
        session = self._session
        if self._closed or session is None or session.is_closed:
            session = self._new_session(timeout)
        self._check_answers(session, "a producer can be inspected")
        inspections = session.get_table.inspections
        page = inspections.request(after, prefix, max(0.0, deadline - time.monotonic()))
        if page is None:
            waited = format_seconds(timeout)
            raise TransferTimeout(f"{self._url}: no answer to a question after {waited}")
        if page.reason:
            raise ConnectorError(f"{self._url} may not be inspected by this process: {page.reason}")
        return page

    def _check_answers(self, session: Session, what: str) -> None:
        """Raise VersionError if the producer does not know a question: it would disconnect."""
        if session.version < ANSWERS:
            raise VersionError(
                f"{self._url} speaks protocol {session.version}, and {what} from {ANSWERS} on: "
                "install this version of omni_kvlink there, too"
            )

    def stats(self) -> dict[str, Any]:
        """Return the state of the connection; `incarnation` identifies the producer's run."""
        self._check_process()
        session = self._session
        return {
            "role": "consumer",
            "url": self._url,
            "closed": self._closed,
            "connected": self.is_connected,
            "sessions": self._sessions,
            "incarnation": session.incarnation if session else "",
            "waiting": session.get_table.waiting if session else 0,
            "path": session.path.to_dict() if session and session.path else None,
            **(session.stats() if session else {}),
        }

    def close(self) -> None:
        """Close the session; waiting calls raise ClosedError."""
        if not self._begin_close():
            return
        _open_consumers.discard(self)
        self._interrupt()
        with self._opening:
            if self._session is not None:
                self._session.close()

    def close_deferred(self) -> None:
        """Close the session in its loop; no call waits that would have to be interrupted."""
        self._closed = True
        if self._session is not None:
            self._session.close_deferred()

    def _new_session(self, timeout: float) -> Session:
        """Return a new session: the last one has ended."""
        self._check_open()
        try:
            return uninterrupted(partial(self._replace, timeout))
        except TimeoutError as error:
            raise PeerLostError(f"{self._url}: the producer is gone: {error}") from None

    def _replace(self, timeout: float, *, no_wait: bool = False) -> Session:
        """Return the session, a new one if the last has ended; one thread opens it."""
        deadline = time.monotonic() + timeout
        if not self._opening.acquire(timeout=max(0.0, timeout)):
            raise PeerLostError(f"{self._url}: the producer is gone, and did not come back")
        try:
            self._check_open()
            if self._session is None or self._session.is_closed:
                with translate_errors(self._url):
                    session = self._open(deadline - time.monotonic(), no_wait=no_wait)
                session.get_table.scheme = self._url.partition("://")[0]
                self._session = self._checked(session)
                self._sessions += 1
            return self._session
        finally:
            self._opening.release()

    def _checked(self, session: Session) -> Session:
        """Return a session whose path is as required; ConnectorError, on both sides, if not."""
        if refusal := session.path_refusal(self._require):
            session.refuse(refusal)
            raise ConnectorError(f"{self._url}: {refusal}")
        if session.path is not None:
            session.take_path(session.path, self._url, self._taken)
            self._taken = session.path
        return session


def cancel_connect(thread: int) -> None:
    """Close the consumer that a thread is connecting, which then raises ClosedError."""
    for consumer in list(_open_consumers):
        if consumer._connecting == thread:
            consumer.close()


_open_consumers: weakref.WeakSet[SessionConsumer] = weakref.WeakSet()
_has_ended = threading.Event()  # the main thread


def _close_all() -> None:
    """Close the consumers when the main thread has ended.

    Python then joins the other threads: a `get` in one of them would hold up the end of the
    process until its deadline. Producers stay open, so that threads can see their payloads
    delivered; functions of `atexit` run too late for this.
    """
    _has_ended.set()
    for consumer in list(_open_consumers):
        consumer.close()


if hasattr(threading, "_register_atexit"):  # private, as in `concurrent.futures.thread`
    threading._register_atexit(_close_all)


def _messages_of(keys: Sequence[str]) -> list[list[str]]:
    """Divide keys into parts, each of which fits into one `Contains`."""
    most = 4 * sum(map(len, keys)) + _KEY_OVERHEAD * (len(keys) + 1)
    if keys and len(keys) <= MAX_KEYS and most <= MAX_MESSAGE:
        return [[*keys]]
    parts, nbytes = list[list[str]](), MAX_MESSAGE
    for key in keys:
        key_nbytes = _KEY_OVERHEAD + (len(key) if key.isascii() else 4 * len(key))
        nbytes += key_nbytes
        if nbytes > MAX_MESSAGE - _KEY_OVERHEAD or len(parts[-1]) == MAX_KEYS:
            parts.append([])
            nbytes = key_nbytes
        parts[-1].append(key)
    return parts


def check_hello(url: str, message: Message) -> Hello:
    """Return the producer's answer to Hello, if it is one that this side can work with."""
    if isinstance(message, Refused) and common_version(message.versions) is not None:
        raise ConnectorError(f"{url} refused this process: {message.reason}")
    if not isinstance(message, (Hello, Refused)):
        raise WireError(f"{url} does not speak this protocol")
    if isinstance(message, Refused) or common_version(message.versions) is None:
        raise VersionError(
            f"{url} speaks protocol {message.versions[0]} to {message.versions[1]}, "
            f"this library {PROTOCOL[0]} to {PROTOCOL[1]}"
        )
    return message


def closed_here(url: str) -> KVLinkError:
    """Return the error of a get whose own link was closed while it waited."""
    return ClosedError(f"link {url} was closed on this side")
