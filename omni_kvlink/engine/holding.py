"""One request's KV, from the room that is set aside for it until it is given back."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable

import torch

from ..bundle import BundleBranch, KVCacheBundle
from ..connectors.base import Want
from ..errors import ClosedError, TransferTimeout
from ..link import KVLink, Payload, Received, Verify
from ..schema import KVCacheTransferData
from .errors import EngineError


class KVState(enum.Enum):
    """How far a request's KV has come."""

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


class Holding:
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
        self._connector: KVLink | None = None
        self._want: Want | None = None
        self._received: Received | None = None
        self._started = 0.0
        self._answered = self._closed = False

    @property
    def deadline(self) -> float | None:
        """When the receive fails of itself; what came in time may be looked at for longer."""
        waits = self.state is KVState.RECEIVING and not self._answered
        return self._started + self.limit if waits else None

    def begin(self, connector: KVLink) -> None:
        """The receive begins, and so does its limit."""
        with self._lock:
            if self.state is not KVState.ALLOCATED:
                raise EngineError(f"the KV of {self.request_id!r} is {self.state.value} already")
            self._connector, self._started = connector, time.monotonic()
            self.state = KVState.RECEIVING

    def expire(self) -> bool:
        """End the receive if its deadline has passed; True if it was this call that did."""
        with self._lock:
            if self.deadline is None or time.monotonic() < self.deadline:
                return False
            self.state = KVState.FAILED
            self.error = TransferTimeout(
                f"the KV of {self.request_id!r} did not come within {self.limit:g} s",
                key=self.request_id,
                waited=self.limit,
                phase="asked for" if self._want else "connecting",
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
            received, self._received, self.data = self._received, None, None
        if unanswered:
            self._withdraw("the request was ended")
        if received is not None:
            received.release()

    # In the receiver's thread.

    def ask(self, timeout: float) -> Want | None:
        """Ask the producer, without waiting for the answer; None if nobody wants it any more.

        Args:
            timeout: seconds to find a producer again that went away.
        """
        if self.state is not KVState.RECEIVING or self._connector is None:
            return None
        want = self._connector.begin_get(self.request_id, timeout=timeout)
        with self._lock:
            if self.state is KVState.RECEIVING:
                self._want = want
                return want
        want.cancel()
        return None

    def take(self, verify: Verify, device: torch.device, admit: Callable[[int], None]) -> None:
        """Views of what came, every byte checked, on the device that wants it.

        Args:
            admit: told the true size; raises if there is no room.
        """
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return
            assert self._want is not None
            self._answered = True
        received = self._open(verify)
        try:
            admit(received.manifest.nbytes)
            data = received.data if device.type == "cpu" else _moved(received, device)
        except BaseException:
            received.release()
            raise
        with self._lock:
            if not self._closed:
                self._received, self.data, self.state = received, data, KVState.READY
                self.seconds = time.monotonic() - self._started
                return
        received.release()

    def fail(self, error: Exception) -> bool:
        """The receive ended with an error; False if it had ended before."""
        with self._lock:
            if self.state is not KVState.RECEIVING:
                return False
            self.state, self.error = KVState.FAILED, error
        return True

    def _open(self, verify: Verify) -> Received:
        assert self._connector is not None
        assert self._want is not None
        delivery = self._want.wait(timeout=self.limit)  # it is there: this does not block
        started = time.perf_counter() - (time.monotonic() - self._started)
        return self._connector.open_delivery(delivery, started=started, verify=verify)

    def _withdraw(self, why: str) -> None:
        """Nobody waits here any more; and the producer shall not keep it for us."""
        if self._want is not None:
            self._want.cancel()
        if self._connector is not None:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self._connector.abort(self.request_id, why)


def _moved(received: Received, device: torch.device) -> Payload:
    """The payload in new tensors on a device; each byte is checked while it is copied."""
    data = received.data
    if isinstance(data, KVCacheTransferData):
        target: Payload = _empty_like(data, device)
    else:
        branches: dict[str, BundleBranch] = {
            name: _empty_like(branch, device) if isinstance(branch, KVCacheTransferData) else branch
            for name, branch in data.branches.items()
        }
        target = KVCacheBundle(data.request_id, branches)
    received.scatter(target)
    received.release()
    return target


def _empty_like(data: KVCacheTransferData, device: torch.device) -> KVCacheTransferData:
    blocks = {
        name: [
            None if layer is None else torch.empty(layer.shape, dtype=layer.dtype, device=device)
            for layer in layers
        ]
        for name, layers in data.layer_blocks.items()
    }
    return KVCacheTransferData(data.request_id, blocks, data.block_ids, data.metadata)
