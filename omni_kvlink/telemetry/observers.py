"""Observers of this process's transfers: each put, each receipt's end, each get, each copy out.

A transfer looks at `registered` where one of these ends, and calls nothing while it is empty.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.errors import KVLinkError, TransferFailed, without_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


MOST_RECENT = 10_000
"""Objects that a `Recent` keeps."""


class TransferEvent(NamedTuple):
    """The end of a put, of a receipt's payload, of a get, or of a copy out of a received payload.

    Attributes:
        scheme: of the link's URL: "shm", "zmq+tcp", …; of a consumer, that of its connection.
        key: the payload's request id.
        outcome: of a put "committed" or "failed"; of a receipt "released", "failed" or "expired";
            of a get "received" or "failed"; of a copy "copied" or "rejected".
        nbytes: of the payload, header included; 0 if it is not known.
        seconds: of the phases that have ended, by name, in their order, as in the `Ledger`; of a
            receipt also "delivery", from the commit to its end.
        error: what was raised; of a receipt, what its `wait` raises.
        data: the payload as it arrived, or the manifest of a stream; None on the producer's side,
            and if there is none. To be looked at during the call, not to be kept: its views hold
            memory of the link.
        trace: W3C's trace context, as the payload carries it; empty if its put was not traced.
        copies: times the tensors' bytes were copied in host memory so far, by this side.
        layer, branch: of one layer, its index from 0, and its cache in a bundle; else -1 and "".
    """

    scheme: str
    key: str
    outcome: str
    nbytes: int = 0
    seconds: Mapping[str, float] = {}
    error: BaseException | None = None
    data: Any = None
    trace: Mapping[str, str] = {}
    copies: int = 0
    layer: int = -1
    branch: str = ""

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(self.seconds.values())


class Observer:
    """Base of an observer: each method is called when something has ended, and does nothing.

    A method must neither block nor call a link. What it raises ends no transfer: it is logged,
    once for each observer. An event's `error` has a traceback, whose frames may hold memory of the
    link: do not keep it.
    """

    def on_begin(self, scheme: str, key: str, started: float) -> Mapping[str, str]:
        """A put has begun, at this time of `time.perf_counter`; in its thread.

        Return the trace context that its payload is to carry.
        """
        return {}

    def on_open(self, event: TransferEvent) -> None:
        """A stream was announced to its reader; `on_get` follows when it has arrived or failed."""

    def on_layer(self, event: TransferEvent) -> None:
        """One layer of a stream was "written" by its producer, or has "arrived" at its reader."""

    def on_put(self, event: TransferEvent) -> None:
        """A payload, a stream or a chunk was committed, or its put has failed; in its thread."""

    def on_receipt(self, event: TransferEvent) -> None:
        """A receipt is done: its payload has ended; in any thread, and the link may be locked."""

    def on_get(self, event: TransferEvent) -> None:
        """A payload or a chunk has arrived, or its get has failed; in the thread that waited.

        A get that is repeated after its connection broke is seen as often as it was requested.
        """

    def on_copy(self, event: TransferEvent) -> None:
        """Bytes of a received payload were checked ("verify") or copied out ("scatter").

        Or they were wrong: then the payload is rejected. `seconds` are of this call alone. What a
        get with `verify="full"` checks is a phase of that get's event instead.
        """


class Recent:
    """Objects by name, for an observer that keeps one until its transfer ends; thread-safe.

    At most `MOST_RECENT`: the end of a transfer may never be seen. Without a lock, which a fork
    could leave locked.
    """

    def __init__(self) -> None:
        self._objects = dict[Any, Any]()

    def add(self, name: object, thing: Any) -> list[Any]:
        """Keep an object under this name; return those that are kept no more."""
        lost = [self._objects.pop(name, None)]
        if len(self._objects) >= MOST_RECENT:
            with contextlib.suppress(RuntimeError):  # another thread changes it now: next time
                lost.append(self.pop(next(iter(self._objects))))
        self._objects[name] = thing
        return [each for each in lost if each is not None]

    def get(self, name: object) -> Any:
        """The object of this name; None if there is none."""
        return self._objects.get(name)

    def pop(self, name: object) -> Any:
        """Forget the object of this name, and return it; None if there is none."""
        return self._objects.pop(name, None)

    def clear(self) -> list[Any]:
        """Forget all, and return them."""
        objects, self._objects = self._objects, {}
        return [*objects.values()]


registered: tuple[Observer, ...] = ()
"""The observers, in the order they came. Only `add_observer` and `remove_observer` change it."""
_changing = threading.Lock()
_log = logging.getLogger("omni_kvlink")
_broken: list[Observer] = []


def add_observer(observer: Observer) -> None:
    """Call this observer for what ends from now on, in every link of this process; idempotent."""
    global registered
    with _changing:
        if not _has(registered, observer):
            registered = (*registered, observer)


def remove_observer(observer: Observer) -> None:
    """Undo `add_observer`; does nothing if it is not registered. A call may be under way."""
    global registered
    with _changing:
        registered = tuple(each for each in registered if each is not observer)
        _broken[:] = [each for each in _broken if each is not observer]


def begin(scheme: str, key: str, started: float) -> dict[str, str]:
    """Report that a put has begun; return the trace context that its payload is to carry."""
    trace = dict[str, str]()
    for observer in registered:
        try:
            trace |= observer.on_begin(scheme, key, started)
        except Exception:  # noqa: PERF203 (as in `_call`)
            _log_once(observer, "on_begin")
    return trace


def layers_of(data: Any) -> int:
    """Return the number of layers of an event's `data`; 0 if it is no cache and no manifest."""
    if hasattr(data, "layers"):
        return len(data.layers())
    return getattr(getattr(data, "metadata", None), "num_layers", 0)


def trace_of(header: Any) -> dict[str, str]:
    """Return the trace context of a payload's header; empty if there is none, or no header."""
    producer = {} if header is None else header.producer
    if "traceparent" not in producer:
        return {}
    return {name: producer[name] for name in ("traceparent", "tracestate") if name in producer}


def layer(end: Any, outcome: str, started: float, at: tuple[str, int], header: Any) -> None:
    """Report that a layer, by branch and index, was "written" or has "arrived"."""
    seconds = {"copy" if outcome == "written" else "wait": time.perf_counter() - started}
    about = end.scheme, header.request_id, outcome, 0, seconds, None, None
    _call("on_layer", TransferEvent(*about, trace_of(header), 0, at[1], at[0]))


def opened(scheme: str, seconds: Mapping[str, float], header: Any) -> None:
    """Report that a stream was announced to its reader."""
    about = scheme, header.request_id, "opened", header.nbytes, seconds, None, header
    _call("on_open", TransferEvent(*about, trace_of(header)))


def put_refused(scheme: str, key: str, error: BaseException, trace: Mapping[str, str]) -> None:
    """Report a put that has raised before it took memory."""
    if registered:
        _call("on_put", TransferEvent(scheme, key, "failed", error=error, trace=trace))


def committed(scheme: str, receipts: Iterable[Any]) -> None:
    """Report puts, whose ledgers are complete, and the ends of their receipts when they come."""
    for receipt in receipts:
        ledger = receipt.ledger
        about = scheme, receipt.key, "committed", ledger.nbytes, ledger.seconds, None, None
        _call("on_put", TransferEvent(*about, ledger.trace, ledger.copies))
        if any(type(each).on_receipt is not Observer.on_receipt for each in registered):
            receipt.add_done_callback(partial(_settled, scheme, receipt, time.perf_counter()))


def put_failed(scheme: str, puts: Iterable[Any], error: BaseException) -> None:
    """Report puts of which nothing was published."""
    for put in puts if registered else ():
        ledger = put.ledger
        about = scheme, put.key, "failed", ledger.nbytes, ledger.seconds, error, None
        _call("on_put", TransferEvent(*about, ledger.trace, ledger.copies))


def received(
    scheme: str,
    key: str,
    nbytes: int,
    seconds: Mapping[str, float],
    data: object,
    header: Any = None,
    copies: int = 0,
) -> None:
    """Report a payload that has arrived."""
    about = scheme, key, "received", nbytes, seconds, None, data
    _call("on_get", TransferEvent(*about, trace_of(header), copies))


def get_failed(
    scheme: str, key: str, error: BaseException, waited: float = 0.0, header: Any = None
) -> None:
    """Report a get that has raised an error of this library, after so many seconds."""
    if registered and isinstance(error, KVLinkError):
        about = scheme, key, "failed", 0, {"wait": waited}, error, None
        _call("on_get", TransferEvent(*about, trace_of(header)))


def copied(
    delivery: Any, phase: str, started: float, error: BaseException | None = None, tensor: str = ""
) -> None:
    """Report that bytes of a payload were checked or copied out, or were wrong."""
    if registered:
        seconds = {phase: time.perf_counter() - started}
        outcome = "copied" if error is None else "rejected"
        event = TransferEvent(delivery.scheme, delivery.key, outcome, 0, seconds, error)
        branch, _, rest = tensor.partition(".")
        number = rest.partition(".")[0]
        if number.isdecimal():  # else it is no layer of a cache
            event = event._replace(branch=branch, layer=int(number))
        _call("on_copy", event)


def _settled(scheme: str, receipt: Any, committed: float) -> None:
    error: TransferFailed | None = None
    ledger, state = receipt.ledger, receipt.state
    seconds = {**ledger.seconds, "delivery": time.perf_counter() - committed}
    if state != "released":
        try:
            receipt.check(waited=seconds["delivery"])
        except TransferFailed as failure:
            error = without_frames(failure)
    _call("on_receipt", TransferEvent(scheme, receipt.key, state, ledger.nbytes, seconds, error))


def _call(method: str, event: TransferEvent) -> None:
    for observer in registered:
        try:
            getattr(observer, method)(event)
        except Exception:  # noqa: PERF203 (one that fails must not keep the others from it)
            _log_once(observer, method)


def _log_once(observer: Observer, method: str) -> None:
    if not _has(_broken, observer):
        _broken.append(observer)
        # As text: a record may be kept, and frames hold memory of the link.
        text = "an observer failed in %s; this is logged once\n%s"
        _log.error(text, method, traceback.format_exc())


def _has(observers: Iterable[Observer], observer: Observer) -> bool:
    return any(each is observer for each in observers)
