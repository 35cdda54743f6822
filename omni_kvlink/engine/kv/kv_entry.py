"""`KVEntry`: one request's KV, from its reservation until its release."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from typing import TYPE_CHECKING

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.errors import ClosedError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from omni_kvlink import KVPayload, Verify
    from omni_kvlink.engine.kv.kv_source import KVGet, KVSource, ReceivedKV


class KVState(enum.Enum):
    """The state of a request's KV."""

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


class KVEntry:
    """One request's KV; thread-safe: the receiver's thread fills it, other threads may close it.

    Args:
        request_id: whose KV it is.
        nbytes: bytes reserved.
        timeout: seconds from `begin` until it must have come.

    Attributes:
        nbytes: bytes reserved; the actual size once that is known.
        data: the KV, while the state is READY.
        error: why it did not come, while the state is FAILED.
    """

    def __init__(self, request_id: str, nbytes: int, timeout: float):
        self.request_id, self.nbytes, self.timeout = request_id, nbytes, timeout
        self.state = KVState.ALLOCATED
        self.data: KVPayload | None = None
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._source: KVSource | None = None
        self._get: KVGet | None = None
        self._received: ReceivedKV | None = None
        self._started = 0.0
        self._has_come = self._closed = False

    @property
    def deadline(self) -> float | None:
        """When the receive times out, in monotonic seconds; None once the payload has come."""
        pending = self.state is KVState.RECEIVING and not self._has_come
        return self._started + self.timeout if pending else None

    def begin(self, source: KVSource) -> None:
        """Start the receive and its timeout; raises EngineError if it was started before."""
        with self._lock:
            if self.state is not KVState.ALLOCATED:
                raise EngineError(f"the KV of {self.request_id!r} is {self.state.value} already")
            self._source, self._started = source, time.monotonic()
            self.state = KVState.RECEIVING

    def request(self, timeout: float) -> KVGet | None:
        """Request the KV, without waiting for it; None if the entry was closed meanwhile.

        Runs in the receiver's thread.

        Args:
            timeout: seconds to reconnect in, if the producer is gone.
        """
        if self.state is not KVState.RECEIVING or self._source is None:
            return None
        get = self._source.begin_get(self.request_id, timeout=timeout)
        with self._lock:
            if self.state is KVState.RECEIVING:
                self._get = get
                return get
        get.cancel()
        return None

    def open(self, verify: Verify, device: torch.device, admit: Callable[[int], None]) -> None:
        """Check the KV that has come and put it on `device`; runs in the receiver's thread.

        Args:
            verify: as for `KVConsumer.get`.
            device: where the tensors are to be.
            admit: called with the actual size in bytes; raises if the budget has no room for it.
        """
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return
            assert self._source is not None
            self._has_come = True
        started = time.perf_counter() - (time.monotonic() - self._started)
        received = self._source.open(self._get, started=started, verify=verify)
        try:
            admit(received.nbytes)
            data = received.to(device)
        except BaseException:
            received.release()
            raise
        with self._lock:
            if not self._closed:
                self._received, self.data, self.state = received, data, KVState.READY
                return
        received.release()

    def fail(self, error: Exception) -> bool:
        """End the receive with an error; False if it had ended before."""
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return False
            self.state, self.error = KVState.FAILED, error
            return True

    def expire(self) -> bool:
        """Fail the receive if its deadline has passed; whether this call did so."""
        with self._lock:
            if self.deadline is None or time.monotonic() < self.deadline:
                return False
            assert self._source is not None
            self.state, names = KVState.FAILED, self._source.keys(self.request_id)
            text = f"the KV of {self.request_id!r} did not come within {self.timeout:g} s"
            if names != [self.request_id]:
                text += f" as {', '.join(names)}: check kv.receivers of the stage before"
            self.error = TransferTimeout(
                text,
                key=self.request_id,
                waited=self.timeout,
                phase="asked for" if self._get else "connecting",
            )
        self._abort("its deadline passed")
        return True

    def close(self) -> None:
        """Release the KV, or cancel its receive; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = self.deadline is not None
            if self.state is KVState.RECEIVING:  # `open`, if it runs, then releases the payload
                self.state, self.error = KVState.FAILED, ClosedError("the request has ended")
            received, self._received, self.data = self._received, None, None
        if pending:
            self._abort("the request has ended")
        if received is not None:
            received.release()

    def _abort(self, reason: str) -> None:
        """Cancel the get, and tell the producer not to keep the KV."""
        if self._get is not None:
            self._get.cancel()
        if self._source is not None:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self._source.abort(self.request_id, reason)
