"""`BackgroundGet`, and what begins a get for which no thread waits: in an event loop or a pool."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

from omni_kvlink.connectors.base import MAX_RETRIES
from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.errors import ClosedError, TransferTimeout, WireError, format_seconds
from omni_kvlink.link.consumer import begin, can_retry, get_requests, stream_request
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.system.waits import Deadline, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.link.consumer import KVConsumer, Received, Verify


class GetPhase(enum.Enum):
    """The phase of a `BackgroundGet`, which draws its transitions."""

    CONNECTING = "nothing is requested"
    WAITING = "the producer has the request"
    QUEUED = "the answer or the deadline has come; the copy has no thread"
    TAKEN = "the payload, or its error, is the caller's"
    ENDED = "it was cancelled, or nothing could be requested"


class BackgroundGet:
    """One get for which no thread waits; thread-safe.

    Answer, deadline, error or cancel: exactly one of them ends it::

        CONNECTING --begin--> WAITING --answer, deadline--> QUEUED --a thread--> TAKEN
            ^                    |                                               ^ |
            |                    +--------------------- take --------------------+ |
            +------------------------------ can_retry -----------------------------+

        CONNECTING, WAITING, QUEUED --cancel--> ENDED
        CONNECTING --error, deadline--> ENDED

    `connect(timeout=…)` returns the link, and may wait for the producer; `begin(link, key,
    timeout=…)` requests the payload, as `begin_get` does.

    In an event loop: `begin`, await `pending.future`, `take`; after PeerLostError `can_retry`, and
    `begin` again. With a thread pool: `request` in one of its threads; `submit(function)` then runs
    a function in the pool that ends with `copy(delivery)` or `fail(error)`, once, unless `cancel`
    came first. Whoever polls the get calls `expire`. `fail` is called in any thread.
    """

    link: KVConsumer
    _pending: PendingGet | None = None

    def __init__(
        self,
        key: str,
        connect: Callable[..., KVConsumer],
        begin: Callable[..., PendingGet],
        timeout: float,
        *,
        url: str = "",
        submit: Callable[[Callable[[], None]], object] = lambda function: function(),
        copy: Callable[[Any], object] = lambda delivery: None,
        fail: Callable[[Exception], object] = lambda error: None,
    ):
        self.key, self.timeout, self._url = key, check_timeout(timeout), url
        self._connect, self._begin = connect, begin
        self._submit, self._copy, self._fail = submit, copy, fail
        self._deadline, self._retries = Deadline(self.timeout), 0
        self._lock = threading.Lock()  # of one assignment: an interrupt leaves it unlocked
        self.phase = GetPhase.CONNECTING

    def __repr__(self) -> str:
        return f"<BackgroundGet of {self.key!r}: {self.phase.value}>"

    @property
    def is_requested(self) -> bool:
        """Whether a request was sent."""
        return self._pending is not None

    @property
    def pending(self) -> PendingGet:
        """The request, once it was sent; when its `future` is done, `take` does not time out."""
        assert self._pending is not None
        return self._pending

    def seconds_left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return self._deadline.seconds_left()

    def begin(self, timeout: float | None = None) -> None:
        """Connect and request the payload, within `timeout` or until the deadline.

        Blocks while it connects. Raises the errors of `connect` and `begin`; ClosedError if it was
        cancelled. A request that was cancelled meanwhile is withdrawn.
        """
        deadline = self._deadline if timeout is None else Deadline(timeout)
        self._check_wanted()
        link = self._connect(timeout=deadline.seconds_left())
        self._check_wanted()
        self.adopt(link, self._begin(link, self.key, timeout=deadline.seconds_left()))

    def adopt(self, link: KVConsumer, pending: PendingGet) -> None:
        """Continue with a request that was sent with others; cancel it if this get has ended."""
        # Before the move: a `cancel` meanwhile finds the request, or the move finds that end.
        self.link, self._pending = link, pending
        if not self._move(GetPhase.WAITING, GetPhase.CONNECTING):
            pending.cancel()

    def request(self, timeout: float | None = None) -> None:
        """`begin`, in a thread of the pool, and continue there when the answer has come."""
        try:
            self.begin(timeout)
        except Exception as error:
            if self._move(GetPhase.ENDED, GetPhase.CONNECTING):
                self._fail(error)
            return
        self.pending.future.add_done_callback(lambda _: self._queue())

    def take(self) -> Delivery:
        """The delivery, or raise the error of the get; TransferTimeout if nothing has come."""
        self._move(GetPhase.TAKEN, GetPhase.WAITING, GetPhase.QUEUED)
        return self.pending.wait(timeout=0.0)

    def can_retry(self) -> bool:
        """After PeerLostError, whether only the connection broke, so that `begin` may be called.

        Blocks while it reconnects.
        """
        self._retries += 1
        limit = self.seconds_left()
        if self._retries > MAX_RETRIES or not can_retry(self.link, self.pending, timeout=limit):
            return False
        return self._move(GetPhase.CONNECTING, GetPhase.TAKEN)

    def expire(self) -> None:
        """End it if its deadline has passed: `fail` is called, perhaps by the pool."""
        if self.seconds_left() > 0:
            return
        if not self._move(GetPhase.ENDED, GetPhase.CONNECTING):
            self._queue()
            return
        text = f"the producer {self._url} was not reached within {format_seconds(self.timeout)}"
        self._fail(TransferTimeout(text, key=self.key, waited=self.timeout))

    def cancel(self) -> bool:
        """Withdraw the request, or leave the payload to others; False if another call ended it."""
        ending = GetPhase.CONNECTING, GetPhase.WAITING, GetPhase.QUEUED
        is_first = self._move(GetPhase.ENDED, *ending)
        if is_first and self._pending is not None:
            self._pending.cancel()
        return is_first

    def _queue(self) -> None:
        if self._move(GetPhase.QUEUED, GetPhase.WAITING):
            self._submit(self._run)

    def _run(self) -> None:
        """Take the payload, and copy it; runs in the pool."""
        if not self._move(GetPhase.TAKEN, GetPhase.QUEUED):
            return
        try:
            delivery = self.take()
        except Exception as error:
            self._fail(error)
        else:
            self._copy(delivery)

    def _check_wanted(self) -> None:
        if self.phase is GetPhase.ENDED:
            raise ClosedError(f"the get of {self.key!r} was cancelled")

    def _move(self, phase: GetPhase, *previous: GetPhase) -> bool:
        """Change the phase if it is one of `previous`; of several calls, one does."""
        with self._lock:
            is_allowed = self.phase in previous
            if is_allowed:
                self.phase = phase
        return is_allowed


def begin_get(
    consumer: KVConsumer,
    request_id: str,
    *,
    timeout: float,
    streamed: bool = False,
    verify: Verify = "auto",
) -> PendingGet:
    """Request a payload without waiting for it; `timeout` bounds a reconnection and nothing else.

    With `streamed`, it is delivered while it is being written: open it with `open_stream`. Bytes
    that cross a network are checked on arrival, except with `verify="off"`; see `KVConsumer.get`.
    PeerLostError if the producer is gone and did not come back in time.
    """
    request = GetRequest(check_request_id(request_id), streamed)
    return begin(consumer, [request], timeout=timeout, verify=verify)[0]


def begin_gets(
    consumer: KVConsumer, request_ids: Iterable[str], *, timeout: float, verify: Verify = "auto"
) -> list[PendingGet]:
    """Request several payloads at once, without waiting for one; else as `begin_get`."""
    return begin(consumer, get_requests(request_ids), timeout=timeout, verify=verify)


def begin_chunks(
    consumer: KVConsumer, request_id: str, *, timeout: float, start: int = 0, verify: Verify
) -> PendingGet:
    """Request an append stream, as `begin_get` does a payload; open it with `open_chunks`."""
    request = stream_request(request_id, start, verify)
    return begin(consumer, [request], timeout=timeout, verify=verify)[0]


def verify_first(received: Received) -> None:
    """Do what `verify="full"` of a `get` does, before anybody has a view of the payload.

    What was checked on arrival is not checked again. A bad payload is rejected at once.
    """
    try:
        received._verify(on_arrival=received._delivery.is_verified)
    except WireError as error:
        received._delivery.reject(str(error), at_once=True)
        raise
