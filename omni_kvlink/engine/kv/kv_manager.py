"""`DiffusionKVManager`: receives and holds the KV of requests that wait or run."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.budget import Budget
from omni_kvlink.engine.kv.kv_entry import KVEntry, KVState
from omni_kvlink.engine.kv.kv_receiver import KVReceiver
from omni_kvlink.engine.kv.kv_source import KVSource
from omni_kvlink.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVConsumer, KVPayload
    from omni_kvlink.engine.request import OmniDiffusionRequest

_RECONNECT = 0.2
"""Seconds that a receive may take to reconnect to a producer that went away."""


class DiffusionKVManager:
    """Holds the KV of each request from before it runs until after; thread-safe.

    One thread of its own receives, verifies and enforces deadlines, while the engine's computes.

    Args:
        connector: where KV comes from: the consumer of the link to the stage before, or a
            `KVSource`; None to use only `receive_from_connector`. It stays its caller's to close.
        config: budget, timeout, how to verify.
        device: where the pipeline needs the tensors. On the CPU they stay in the link's memory.
    """

    def __init__(
        self,
        connector: KVConsumer | KVSource | None,
        config: KVConfig | None = None,
        *,
        device: torch.device | str = "cpu",
    ):
        self.connector = None if connector is None else _source(connector)
        self.config = config or KVConfig()
        self._device = torch.device(device)
        self._changed = threading.Condition()
        self._budget = Budget(self.config)
        self._entries: dict[str, KVEntry] = {}
        self._listeners: list[Callable[[], None]] = []
        self._receiver = KVReceiver(
            "kv-receiver", next_deadline=self.next_deadline, on_deadline=self._on_deadline
        )
        self._closed = False
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, whenever a receive has ended."""
        self._listeners.append(callback)

    # Before a request runs.

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether the budget has room for a request's KV now."""
        with self._changed:
            return self._budget.has_room(request)

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Reserve memory for a request's KV: its `kv_nbytes`, or `kv.reserve` if that is None.

        Raises:
            CapacityError: more than what is free; `requested` and `free` are in bytes.
            EngineError: the request has a reservation already.
        """
        with self._changed:
            self._check_open()
            if request.request_id in self._entries:
                raise EngineError(f"request {request.request_id!r} holds KV already: free it first")
            nbytes = self._budget.take(request)
            timeout = self.config.timeout if request.kv_timeout is None else request.kv_timeout
            self._entries[request.request_id] = KVEntry(request.request_id, nbytes, timeout)

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive the KV of a request that has a reservation, and return.

        Raises:
            EngineError: `allocate` it first; or this manager has no connector.
        """
        if self.connector is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        self._begin(self.connector, request)

    def receive_from_connector(
        self,
        connector: KVConsumer | KVSource,
        request: OmniDiffusionRequest,
        *,
        timeout: float | None = None,
    ) -> None:
        """Receive a request's KV and hold it; blocks until every byte is there.

        Args:
            connector: where it comes from.
            request: whose KV; memory is reserved for it if it has no reservation.
            timeout: seconds; the request's own, or the configured one, if None.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError: it did not come; the request holds
                nothing then.
            IntegrityError, WireError: what came is not what was sent.
            CapacityError: the budget has no room for it.
        """
        if self.state(request.request_id) is KVState.ABSENT:
            self.allocate(request)
        entry = self._entry(request.request_id)
        if timeout is not None:
            entry.timeout = timeout
        try:
            self._begin(_source(connector), request)
            with self._changed:
                while entry.state is KVState.RECEIVING:
                    self._changed.wait()  # the receiver's thread enforces the deadline
            if entry.error is not None:
                raise entry.error
        except BaseException:
            self.free(request)
            raise

    def state(self, request_id: str) -> KVState:
        """The state of a request's KV."""
        entry = self._entries.get(request_id)
        return KVState.ABSENT if entry is None else entry.state

    def error(self, request_id: str) -> Exception | None:
        """Why a request's receive failed; None if it did not."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.error

    def nbytes(self, request_id: str) -> int:
        """Bytes reserved for a request's KV; its actual size once it has come."""
        entry = self._entries.get(request_id)
        return 0 if entry is None else entry.nbytes

    def next_deadline(self) -> float | None:
        """When the next receive times out, in monotonic seconds; None if none is pending."""
        with self._changed:
            deadlines = [entry.deadline for entry in self._entries.values()]
            return min((one for one in deadlines if one is not None), default=None)

    # While it runs, and after.

    def get_kv_cache(self, request_id: str) -> KVPayload:
        """The KV as it came, a `KVCacheTransferData` or `KVCacheBundle`; never blocks.

        Raises:
            EngineError: it was not requested, or is not there yet.
            KVLinkError: why it did not come.
        """
        entry = self._entries.get(request_id)
        if entry is not None and entry.error is not None:
            raise entry.error
        if entry is None or entry.data is None:
            state = self.state(request_id).value
            raise EngineError(f"the KV of {request_id!r} is {state}: wait until it is ready")
        return entry.data

    def free(self, request: OmniDiffusionRequest) -> None:
        """Release a request's KV and its reservation, in any state; idempotent.

        Tensors that are still referenced keep their memory until they are gone.
        """
        with self._changed:
            entry = self._entries.pop(request.request_id, None)
            self._budget.release(request.request_id)
        if entry is not None:
            entry.close()
            self._count("freed")

    def stats(self) -> dict[str, Any]:
        """Bytes and entries held, and counters, as JSON values."""
        with self._changed:
            states = [entry.state.value for entry in self._entries.values()]
            return {
                "budget": self.config.budget,
                "charged": self._budget.charged,
                "held": {state.value: states.count(state.value) for state in KVState},
                **self._counts,
            }

    def close(self) -> None:
        """Release everything; idempotent. The connector stays open."""
        with self._changed:
            self._closed = True
            entries, self._entries = list(self._entries.values()), {}
            self._budget = Budget(self.config)
        for entry in entries:
            entry.close()
            self._count("freed")
        self._receiver.close()

    # Receiving.

    def _begin(self, source: KVSource, request: OmniDiffusionRequest) -> None:
        entry = self._entry(request.request_id)
        entry.begin(source)
        self._receiver.submit(self._request, entry)

    def _request(self, entry: KVEntry) -> None:
        """Runs in the receiver's thread; no thread waits for the answer."""
        try:
            get = entry.request(min(_RECONNECT, entry.timeout))
        except Exception as error:
            self._end(entry, error)
            return
        if get is not None:  # the callback runs in a thread of the connector, which must not block
            get.future.add_done_callback(lambda _: self._receiver.submit(self._open, entry))

    def _open(self, entry: KVEntry) -> None:
        """Runs in the receiver's thread, when a get has ended."""
        try:
            entry.open(self.config.verify, self._device, partial(self._admit, entry))
        except Exception as error:
            self._end(entry, error)
        else:
            self._end(entry, None)

    def _admit(self, entry: KVEntry, nbytes: int) -> None:
        with self._changed:
            if self._entries.get(entry.request_id) is entry:  # else it was freed meanwhile
                self._budget.correct(entry.request_id, nbytes)
            entry.nbytes = nbytes

    def _on_deadline(self) -> None:
        with self._changed:
            entries = list(self._entries.values())
        for entry in entries:
            if entry.expire():
                self._count("failed")
        self._notify()

    def _end(self, entry: KVEntry, error: Exception | None) -> None:
        if error is not None and entry.fail(error):
            self._count("failed")
        elif entry.state is KVState.READY:
            self._count("received", entry.nbytes)
        self._notify()

    def _count(self, counter: str, nbytes: int = 0) -> None:
        with self._changed:
            self._counts[counter] += 1
            self._counts["nbytes"] += nbytes
            self._changed.notify_all()

    def _notify(self) -> None:
        for callback in self._listeners:
            callback()

    def _entry(self, request_id: str) -> KVEntry:
        self._check_open()
        if request_id not in self._entries:
            raise EngineError(f"request {request_id!r} has no memory reserved: allocate it first")
        return self._entries[request_id]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the KV manager is closed")


def _source(connector: KVConsumer | KVSource) -> KVSource:
    return connector if isinstance(connector, KVSource) else KVSource(connector)
