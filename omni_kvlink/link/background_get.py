"""`BackgroundGet`, and what begins a get for which no thread waits: in an event loop or a pool."""

from __future__ import annotations

import enum
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.connectors.base import MAX_RETRIES
from omni_kvlink.connectors.protocol.get_table import GetRequest
from omni_kvlink.errors import (
    ClosedError,
    PeerLostError,
    TransferTimeout,
    WireError,
    format_seconds,
    without_frames,
)
from omni_kvlink.link.consumer import begin, can_retry, stream_request
from omni_kvlink.link.copy_into import CopyInto
from omni_kvlink.link.get_requests import get_requests
from omni_kvlink.link.received_stream import open_stream
from omni_kvlink.payload.schema import check_request_id
from omni_kvlink.settings import Flag
from omni_kvlink.system.waits import Deadline, check_timeout
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.copier import StreamEvents
    from omni_kvlink.link.consumer import KVConsumer, Received, Verify
    from omni_kvlink.link.copy_into import Into
    from omni_kvlink.link.received_stream import ReceivedStream


class GetPhase(enum.Enum):
    """The phase of a `BackgroundGet`, which draws its transitions."""

    CONNECTING = "nothing is requested"
    WAITING = "the producer has the request"
    QUEUED = "the answer or the deadline has come; the copy has no thread"
    TAKEN = "the payload, or its error, is the caller's; or it is being copied into the targets"
    CLAIMED = "its copy into the targets has ended; the payload counts as read"
    STOPPED = "it was cancelled amid the copy, which ends at the next layer"
    ENDED = "it was cancelled, or nothing could be requested"


def _ignore(outcome: object) -> None:
    """Stand for a function that the caller has not given, or that was called."""


def _queue_all(waiting: list[BackgroundGet], answer: object) -> None:
    for get in waiting:
        get._queue()


class BackgroundGet:
    """One get for which no thread waits; thread-safe.

    Answer, deadline, error or cancel: exactly one of them ends it::

        CONNECTING --begin--> WAITING --answer, deadline--> QUEUED --a thread--> TAKEN
            ^                    |                                               ^ |
            |                    +--------------------- take --------------------+ |
            +------------------------------ can_retry -----------------------------+

        CONNECTING, WAITING, QUEUED --cancel--> ENDED
        CONNECTING --error, deadline--> ENDED
        TAKEN --end of the copy--> CLAIMED, TAKEN --cancel--> STOPPED: with `into`

    `connect(timeout=…)` returns the link, and may wait for the producer; `begin(link, key,
    timeout=…)` requests the payload, as `begin_get` does.

    In an event loop: `begin`, await `pending.future`, `take`; after PeerLostError `can_retry`, and
    `begin` again. With a thread pool: `request` in one of its threads; `submit(function)` then runs
    a function in the pool that ends with `copy(delivery)` or `fail(error)`, once, unless `cancel`
    came first. Whoever polls the get calls `expire`. `fail` is called in any thread.

    With `into` (see `KVConsumer.get`), of a `begin` that asks for layers while they are written,
    the pool's thread copies them into the targets as they come: again from the first one if only
    the connection broke. It ends with `copy(copies)`, the `CopyInto`, or `fail(error)`: no target
    is written any more then, and the payload is released. Before that, `copied(copies)` is called
    as by `CopyInto.run`, and once when the payload is claimed; a device may still write the last
    layers then (`copies.ends`). `after` is that of `CopyInto`.
    """

    link: KVConsumer
    _pending: PendingGet | None = None
    _stream: ReceivedStream | None = None
    _leaves_unread = True
    _waiting: list[BackgroundGet] | None = None

    def __init__(
        self,
        key: str,
        connect: Callable[..., KVConsumer],
        begin: Callable[..., PendingGet],
        timeout: float,
        *,
        url: str = "",
        submit: Callable[[Callable[[], None]], object] = lambda function: function(),
        copy: Callable[[Any], object] = _ignore,
        fail: Callable[[Exception], object] = _ignore,
        into: Into | None = None,
        copied: Callable[[CopyInto], object] = _ignore,
        after: StreamEvents | None = None,
    ):
        self.key, self.timeout, self._url = key, check_timeout(timeout), url
        self._connect, self._begin = connect, begin
        self._submit, self._copy, self._fail = submit, copy, fail
        self._into, self._copied, self._after = into, copied, after
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

    @property
    def is_read(self) -> bool:
        """Whether the payload was copied into targets, and counts as read: no other one has it."""
        is_declined = self.phase is GetPhase.STOPPED and not self._leaves_unread
        return is_declined or self.phase is GetPhase.CLAIMED

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
        # The future keeps its callbacks: one that refers to this object after its end would be a
        # reference cycle, with the link in it. Before `begin`: another thread may end it from then.
        waiting = self._waiting = [self]
        try:
            self.begin(timeout)
        except Exception as error:
            if self._move(GetPhase.ENDED, GetPhase.CONNECTING):
                self._end(self._fail, error)
            return
        self.pending.future.add_done_callback(partial(_queue_all, waiting))

    def take(self) -> Delivery:
        """The delivery, or raise the error of the get; TransferTimeout if nothing has come."""
        self._move(GetPhase.TAKEN, GetPhase.WAITING, GetPhase.QUEUED)
        return self.pending.wait(timeout=0.0)

    def can_retry(self) -> bool:
        """After PeerLostError, whether only the connection broke, so that `begin` may be called.

        Blocks while it reconnects.
        """
        self._retries += 1
        limit = self.seconds_left() if self._retries <= MAX_RETRIES else 0.0
        if not can_retry(self.link, self.pending, timeout=limit):
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
        self._end(self._fail, TransferTimeout(text, key=self.key, waited=self.timeout))

    def cancel(self, *, leaves_unread: bool = True) -> bool:
        """Withdraw the request, or leave the payload to others; False if another call ended it.

        False, too, amid a copy into the targets: they are written until `fail` is called, with
        ClosedError, when the layer that is being copied is there. The payload is released as read
        then, unless it `leaves_unread`.
        """
        ending = GetPhase.CONNECTING, GetPhase.WAITING, GetPhase.QUEUED
        is_first = self._move(GetPhase.ENDED, *ending)
        if is_first:
            if self._pending is not None:
                self._pending.cancel()
            self._end(_ignore, None)
        self._leaves_unread = leaves_unread  # before the move, which the copy looks at
        if self._into is not None and self._move(GetPhase.STOPPED, GetPhase.TAKEN):
            stream = self._stream
            if stream is not None:
                stream.interrupt(self._cancelled())
        return is_first

    def _queue(self) -> None:
        if self._move(GetPhase.QUEUED, GetPhase.WAITING):
            self._submit(self._run)

    def _run(self) -> None:
        """Take the payload, and copy it; runs in the pool."""
        if not self._move(GetPhase.TAKEN, GetPhase.QUEUED):
            return
        try:
            taken: Any = self.take()
            if self._into is not None:
                taken = self._copy_into(taken, self._into)
        except Exception as error:
            without_frames(error)  # they would keep the payload's lease
            is_lost = isinstance(error, PeerLostError) and self._into is not None
            if is_lost and self.can_retry():
                self.request()
            else:
                self._end(self._fail, error)
        else:
            self._end(self._copy, taken)

    def _end(self, call: Callable[[Any], object], outcome: Any) -> None:
        """Report the outcome, and forget the caller's functions, which may refer to this object."""
        self._copy = self._fail = self._copied = _ignore
        self._into = None
        if self._waiting:
            self._waiting.clear()
        call(outcome)

    def _copy_into(self, delivery: Delivery, into: Into) -> CopyInto:
        """Copy the payload as it comes; no target is written any more when this has ended."""
        started = time.perf_counter()
        with open_stream(self.link, delivery, started=started, timeout=0.0) as stream:
            self._stream = stream  # before the look at the phase; `cancel` does the reverse
            try:
                copies = CopyInto(stream, into, after=self._after)
                try:
                    copies.run(self.seconds_left, self._on_copied)
                    if not self._move(GetPhase.CLAIMED, GetPhase.TAKEN):
                        raise self._cancelled()
                    self._copied(copies)
                finally:
                    copies.wait()
            except PeerLostError:
                raise
            except BaseException:
                self._move(GetPhase.CLAIMED, GetPhase.TAKEN)
                raise
            finally:
                self._stream = None
                if self.phase is GetPhase.STOPPED:
                    (stream.release_unread if self._leaves_unread else stream.release)()
        return copies

    def _on_copied(self, copies: CopyInto) -> None:
        self._check_wanted()
        self._copied(copies)

    def _check_wanted(self) -> None:
        if self.phase in (GetPhase.ENDED, GetPhase.STOPPED):
            raise self._cancelled()

    def _cancelled(self) -> ClosedError:
        return ClosedError(f"the get of {self.key!r} was cancelled")

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
    wait: bool = True,
) -> PendingGet:
    """Request a payload without waiting for it; `timeout` bounds a reconnection and nothing else.

    With `streamed`, it is delivered while it is being written: open it with `open_stream`. Bytes
    that cross a network are checked on arrival, except with `verify="off"`; see `KVConsumer.get`,
    also for `wait`. PeerLostError if the producer is gone and did not come back in time.
    """
    request = GetRequest(check_request_id(request_id), streamed, waits=Flag().read(wait, "wait"))
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
    started = time.perf_counter()
    try:
        received._verify(on_arrival=received._delivery.is_verified)
    except WireError as error:
        received._delivery.reject(str(error), at_once=True)
        observers.copied(received._delivery, "verify", started, error)
        raise
