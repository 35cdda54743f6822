"""Observers of this process's transfers: each put, each receipt's end, each get, each copy out.

A transfer looks at `registered` where one of these ends, and calls nothing while it is empty.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink.errors import KVLinkError, TransferFailed, without_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
    """

    scheme: str
    key: str
    outcome: str
    nbytes: int = 0
    seconds: Mapping[str, float] = {}
    error: BaseException | None = None
    data: Any = None


class Observer:
    """Base of an observer: each method is called when something has ended, and does nothing.

    A method must neither block nor call a link. What it raises ends no transfer: it is logged,
    once for each observer. An event's `error` has a traceback, whose frames may hold memory of the
    link: do not keep it.
    """

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

        Or they were wrong: then the payload is rejected. `seconds` are of this call alone.
        """


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


def committed(scheme: str, receipts: Iterable[Any]) -> None:
    """Report puts, whose ledgers are complete, and the ends of their receipts when they come."""
    for receipt in receipts:
        ledger = receipt.ledger
        event = TransferEvent(scheme, receipt.key, "committed", ledger.nbytes, ledger.seconds)
        _call("on_put", event)
        receipt.add_done_callback(partial(_settled, scheme, receipt, time.perf_counter()))


def put_failed(scheme: str, puts: Iterable[Any], error: BaseException) -> None:
    """Report puts of which nothing was published."""
    for put in puts if registered else ():
        ledger = put.ledger
        event = TransferEvent(scheme, put.key, "failed", ledger.nbytes, ledger.seconds, error)
        _call("on_put", event)


def received(
    scheme: str, key: str, nbytes: int, seconds: Mapping[str, float], data: object
) -> None:
    """Report a payload that has arrived."""
    event = TransferEvent(scheme, key, "received", nbytes, seconds, None, data)
    _call("on_get", event)


def get_failed(scheme: str, key: str, error: BaseException, waited: float = 0.0) -> None:
    """Report a get that has raised an error of this library, after so many seconds."""
    if registered and isinstance(error, KVLinkError):
        event = TransferEvent(scheme, key, "failed", 0, {"wait": waited}, error)
        _call("on_get", event)


def copied(delivery: Any, phase: str, started: float, error: BaseException | None = None) -> None:
    """Report that bytes of a payload were checked or copied out, or were wrong."""
    if registered:
        seconds = {phase: time.perf_counter() - started}
        outcome = "copied" if error is None else "rejected"
        event = TransferEvent(delivery.scheme, delivery.key, outcome, 0, seconds, error)
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
            if not _has(_broken, observer):
                _broken.append(observer)
                # As text: a record may be kept, and frames hold memory of the link.
                text = "an observer failed in %s; this is logged once\n%s"
                _log.error(text, method, traceback.format_exc())


def _has(observers: Iterable[Observer], observer: Observer) -> bool:
    return any(each is observer for each in observers)
