"""One request's KV, from the room that is set aside for it until it is given back."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable

import torch

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_source import KVNeeds, KVSource, ReceivedKV
from omni_kvlink.errors import ClosedError, TransferTimeout
from omni_kvlink.link import Payload, Verify


class KVState(enum.Enum):
    """How far a request's KV has come."""

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


class KVEntry:
    """One request's KV; thread-safe: the receiver's thread works on it, and others may end it.

    Args:
        nbytes: room set aside; what it really takes once that is known.
        limit: seconds from `begin` until it must have come.

    Attributes:
        data: the KV, while the state is READY.
        error: why it did not come, while the state is FAILED.
    """

    def __init__(self, request_id: str, nbytes: int, limit: float):
        self.request_id, self.nbytes, self.limit = request_id, nbytes, limit
        self.state = KVState.ALLOCATED
        self.data: Payload | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._source: KVSource | None = None
        self._wants: KVNeeds | None = None
        self._arrival: ReceivedKV | None = None
        self._started = 0.0
        self._answered = self._closed = False

    @property
    def deadline(self) -> float | None:
        """When the receive fails of itself; what came in time may be looked at for longer."""
        waits = self.state is KVState.RECEIVING and not self._answered
        return self._started + self.limit if waits else None

    def begin(self, source: KVSource) -> None:
        """The receive begins, and so does its limit."""
        with self._lock:
            if self.state is not KVState.ALLOCATED:
                raise EngineError(f"the KV of {self.request_id!r} is {self.state.value} already")
            self._source, self._started = source, time.monotonic()
            self.state = KVState.RECEIVING

    def expire(self) -> bool:
        """End the receive if its deadline has passed; True if it was this call that did."""
        with self._lock:
            if self.deadline is None or time.monotonic() < self.deadline:
                return False
            self.state = KVState.FAILED
            self.error = TransferTimeout(
                f"the KV of {self.request_id!r} did not come within {self.limit:g} s{self._as()}",
                key=self.request_id,
                waited=self.limit,
                phase="asked for" if self._wants else "connecting",
            )
        self._withdraw("its deadline passed")
        return True

    def close(self) -> None:
        """Give back what came, or ask for it no more; once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unanswered = self.deadline is not None
            if self.state is KVState.RECEIVING:  # and the receiver gives back what it looks at
                self.state, self.error = KVState.FAILED, ClosedError("the request was ended")
            arrival, self._arrival, self.data = self._arrival, None, None
        if unanswered:
            self._withdraw("the request was ended")
        if arrival is not None:
            arrival.release()

    # In the receiver's thread.

    def ask(self, timeout: float) -> KVNeeds | None:
        """Ask the producer, without waiting for the answer; None if nobody wants it any more.

        Args:
            timeout: seconds to find a producer again that went away.
        """
        if self.state is not KVState.RECEIVING or self._source is None:
            return None
        wants = self._source.begin_get(self.request_id, timeout=timeout)
        with self._lock:
            if self.state is KVState.RECEIVING:
                self._wants = wants
                return wants
        wants.cancel()
        return None

    def take(self, verify: Verify, device: torch.device, admit: Callable[[int], None]) -> None:
        """What came, every byte checked, on the device that wants it.

        Args:
            admit: told the true size; raises if there is no room.
        """
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return
            assert self._source is not None
            assert self._wants is not None
            self._answered = True
        started = time.perf_counter() - (time.monotonic() - self._started)
        arrival = self._source.open(self._wants, started=started, verify=verify)
        try:
            admit(arrival.nbytes)
            data = arrival.placed_on(device)
        except BaseException:
            arrival.release()
            raise
        with self._lock:
            if not self._closed:
                self._arrival, self.data, self.state = arrival, data, KVState.READY
                self.seconds = time.monotonic() - self._started
                return
        arrival.release()

    def fail(self, error: Exception) -> bool:
        """The receive ended with an error; False if it had ended before."""
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return False
            self.state, self.error = KVState.FAILED, error
        if self._source is not None and self._source.is_divided:
            self._withdraw(f"another part did not come: {error}")
        return True

    def _as(self) -> str:
        """Under which other names it was asked for, and what to look at if nobody sent those."""
        keys = [] if self._source is None else self._source.keys(self.request_id)
        if keys == [self.request_id]:
            return ""
        return (
            f" as {', '.join(keys)}: the stage before must have this one's division, kv.receivers"
        )

    def _withdraw(self, why: str) -> None:
        """Nobody waits here any more; and the producer shall not keep it for us."""
        if self._wants is not None:
            self._wants.cancel()
        if self._source is not None:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self._source.abort(self.request_id, why)
