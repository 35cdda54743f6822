"""`KeptSource`: one link from which kept payloads are read, and why one is not there."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from omni_kvlink.connectors.protocol.kept_table import OTHER_IDENTITY
from omni_kvlink.connectors.protocol.phases import LOADING
from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    MissingError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
    WireError,
)
from omni_kvlink.kept.link_thread import LinkThread
from omni_kvlink.kept.store_contents import DAMAGED
from omni_kvlink.link import (
    MAX_TIMEOUT,
    KVConsumer,
    Received,
    begin,
    get_requests,
    open_delivery,
)
from omni_kvlink.system.waits import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.base import PendingGet

Reason: TypeAlias = Literal["absent", "unreachable", "evicted", "other_identity", "damaged"]
REASONS: tuple[Reason, ...] = ("absent", "unreachable", "evicted", "other_identity", "damaged")
"""Why a key is missed; of several sources' reasons, the last one of these counts."""
RETRY_SECONDS = 5.0
"""Seconds until a source is asked again that refused this process, or did not answer."""
_PAUSE = 0.1
"""Seconds until a source is connected again that was lost."""
_EVICTED = "evicted"


class KeptSource:
    """Reads what another process keeps; never waits for a process that is not there.

    A thread connects, also again after the other side was restarted, and calls `on_connected` each
    time. It then waits for `presence`, a key under which there never is a payload: so it learns
    of the other side's end at once, and of a refusal.

    Attributes:
        refusal: why the other side takes no offers; "" if it takes them, or is not there.
        was_connected: set when the other side has been there once.
    """

    def __init__(
        self,
        url: str,
        presence: str,
        options: dict[str, Any],
        on_connected: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda _: None,
    ):
        self.url, self._presence, self._options = url, presence, options
        self._on_connected, self._on_refused = on_connected, on_refused
        self._resume_at, self.was_connected = 0.0, threading.Event()
        self.refusal, self.last_error = "", ""
        self._thread = LinkThread()
        self._thread.start(self._watch)

    def __repr__(self) -> str:
        return f"<KeptSource {self.url}{'' if self.is_reachable else ', not there'}>"

    @property
    def is_reachable(self) -> bool:
        """Whether the other side is there, and answered the last question in time."""
        consumer = self._thread.consumer
        is_connected = consumer is not None and consumer.is_connected
        return is_connected and time.monotonic() >= self._resume_at

    def contains(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        """Whether each key is kept there; no key is, if it cannot be asked."""
        consumer = self._thread.consumer
        if keys and self.is_reachable and consumer is not None:
            try:
                return consumer.contains(keys, timeout=timeout)
            except ClosedError:
                pass
            except KVLinkError as error:
                self._suspend(error)
        return [False] * len(keys)

    def read(self, keys: Sequence[str], *, timeout: float) -> list[Received | Reason]:
        """Get what is kept there now, all in one message; for each key, or why it is not there."""
        consumer, started = self._thread.consumer, time.perf_counter()
        if not keys or not self.is_reachable or consumer is None:
            return ["unreachable"] * len(keys)
        try:
            pending = begin(consumer, get_requests(keys, wait=False), timeout=0.0)
        except KVLinkError as error:  # it was lost just now
            self._suspend(error)
            return ["unreachable"] * len(keys)
        deadline, results = Deadline(timeout), list[Received | Reason]()
        try:
            for get in pending:
                results.append(self._receive(consumer, get, deadline, started))
        except BaseException:
            for result in results:
                if isinstance(result, Received):
                    result.release_unread()
            raise
        return results

    def close(self) -> None:
        """Disconnect; payloads that were read stay valid."""
        self._thread.close()

    def stats(self) -> dict[str, Any]:
        """The URL, whether it is there, and its last error."""
        return {"url": self.url, "reachable": self.is_reachable, "last_error": self.last_error}

    def _receive(
        self, consumer: KVConsumer, get: PendingGet, deadline: Deadline, started: float
    ) -> Received | Reason:
        try:
            delivery = get.wait(timeout=deadline.seconds_left())
            return open_delivery(consumer, delivery, started=started)
        except TransferFailed as error:
            return _reason_of(error)
        except WireError as error:
            self.last_error = str(error)
            return "damaged"
        except KVLinkError as error:
            get.cancel()
            self._suspend(error)
            return "unreachable"

    def _suspend(self, error: KVLinkError) -> None:
        """Leave a source alone for a while that is there and does not answer."""
        self.last_error = str(error)
        is_loading = isinstance(error, TransferTimeout) and error.phase == LOADING
        if not is_loading and not isinstance(error, PeerLostError):  # it is connected again
            self._resume_at = time.monotonic() + RETRY_SECONDS

    def _watch(self) -> None:
        pause = 0.0
        while not self._thread.is_closing.wait(pause):
            pause = self._attend()

    def _attend(self) -> float:
        """Connect, and wait until the other side is gone; return the seconds until the next try."""
        consumer = self._thread.consumer
        try:
            if consumer is None:
                consumer = self._thread.connect(self.url, self._options, timeout=MAX_TIMEOUT)
            [presence] = begin(consumer, get_requests([self._presence]), timeout=MAX_TIMEOUT)
            self._on_connected()
            self.was_connected.set()
            presence.wait(timeout=MAX_TIMEOUT).release_unread()
        except PeerLostError as error:
            self.last_error = str(error)
            return _PAUSE
        except MissingError as error:  # the store has lost the connection to this process
            self.last_error = str(error)
        except TransferFailed as error:
            if error.reason != self.refusal:
                self._on_refused(error.reason)
            self.refusal = self.last_error = error.reason
        except KVLinkError as error:  # such as keys that are not allowed
            self.last_error = str(error)
        return RETRY_SECONDS


def _reason_of(error: TransferFailed) -> Reason:
    if error.reason == OTHER_IDENTITY:
        return "other_identity"
    if error.reason == DAMAGED or not isinstance(error, MissingError):  # a reader rejected it
        return "damaged"
    return "evicted" if _EVICTED in error.reason else "absent"
