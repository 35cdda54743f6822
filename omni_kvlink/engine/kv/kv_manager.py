"""`DiffusionKVManager`: receives and holds the KV of requests that wait or run."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import KVPayload
from omni_kvlink.engine.config import KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_source import KVSource, ReceivedKV
from omni_kvlink.errors import CapacityError, ClosedError, TransferTimeout, format_seconds
from omni_kvlink.lowlevel import BackgroundGet

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink import KVConsumer
    from omni_kvlink.engine.request import OmniDiffusionRequest

_RECONNECT = 0.2  # seconds that a receive may take to reconnect to a producer that went away


class KVState(enum.Enum):
    """The state of a request's KV."""

    ABSENT = "absent"
    ALLOCATED = "allocated"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"


@dataclasses.dataclass(eq=False)
class KVEntry:
    """One request's KV; the KV manager's lock guards it."""

    request_id: str
    timeout: float
    started: float = 0.0
    deadline: float = math.inf  # monotonic; infinite unless the payload is awaited
    state: KVState = KVState.ALLOCATED
    data: KVPayload | None = None  # while READY
    error: Exception | None = None  # while FAILED
    source: KVSource | None = None
    get: BackgroundGet | None = None
    received: ReceivedKV | None = None

    def abort(self, reason: str) -> None:
        """Cancel the get, and tell the producer not to keep the KV."""
        if self.get is not None:
            self.get.cancel()
        if self.source is not None:
            with contextlib.suppress(ClosedError):  # a closed link keeps nothing
                self.source.abort(self.request_id, reason)

    def timeout_error(self) -> TransferTimeout:
        """The error of a receive whose deadline has passed."""
        text = f"the KV of {self.request_id!r} did not come within {format_seconds(self.timeout)}"
        if self.source is not None:
            text += self.source.timeout_hint(self.request_id)
        is_requested = self.get is not None and self.get.is_requested
        phase = "asked for" if is_requested else "connecting"
        return TransferTimeout(text, key=self.request_id, waited=self.timeout, phase=phase)


class Budget:
    """Bytes reserved for the KV of each request, at most `kv.budget`; its owner holds a lock."""

    def __init__(self, config: KVConfig):
        self.nbytes = config.budget
        self._default = config.reserve or config.budget // 8
        self.reserved: dict[str, int] = {}

    @property
    def charged(self) -> int:
        """Bytes that are reserved now."""
        return sum(self.reserved.values())

    def has_room(self, request: OmniDiffusionRequest) -> bool:
        """Whether `take` would succeed."""
        return self.charged + self._size(request) <= self.nbytes

    def take(self, request: OmniDiffusionRequest) -> None:
        """Reserve `kv_nbytes`, or `kv.reserve` if it is None; raises as `correct`."""
        self.correct(request.request_id, self._size(request))

    def correct(self, request_id: str, nbytes: int) -> None:
        """Replace a reserved size by the actual one; raises CapacityError if it does not fit."""
        free = self.nbytes - self.charged + self.reserved.get(request_id, 0)
        if nbytes > free:
            text = f"the KV of {request_id!r} takes {nbytes} bytes, {free} of the budget of "
            text += f"{self.nbytes} are free: raise kv.budget"
            raise CapacityError(text, requested=nbytes, free=free)
        self.reserved[request_id] = nbytes

    def release(self, request_id: str) -> None:
        """Release a request's reservation, if it has one."""
        self.reserved.pop(request_id, None)

    def _size(self, request: OmniDiffusionRequest) -> int:
        return self._default if request.kv_nbytes is None else request.kv_nbytes


class KVReceiver:
    """A thread that runs jobs in order, and `on_deadline` at `next_deadline`; none may raise."""

    def __init__(
        self, name: str, next_deadline: Callable[[], float | None], on_deadline: Callable[[], None]
    ):
        self._next_deadline, self._on_deadline = next_deadline, on_deadline
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a job after those submitted before; ignored once closed."""
        self._jobs.put(partial(call, *args))

    def close(self) -> None:
        """Stop after the current job; the others are not run. Idempotent."""
        self._is_closed = True
        self.submit(self._on_deadline)  # wakes the thread, which runs no more jobs
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            deadline, job = self._next_deadline(), self._on_deadline
            limit = None if deadline is None else deadline - time.monotonic()
            if limit is None or limit > 0:
                with contextlib.suppress(queue.Empty):
                    job = self._jobs.get(timeout=limit)
            if not self._is_closed:
                job()


class DiffusionKVManager:
    """Holds the KV of each request from before it runs until after; thread-safe.

    One thread of its own receives, verifies and enforces deadlines, while the engine's computes. KV
    comes from `connector`, which its owner closes; None to use only `receive_from_connector`. On
    the CPU the tensors stay in the link's memory.
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
        self._closed = False
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}
        self._receiver = KVReceiver(
            "kv-receiver", next_deadline=self.next_deadline, on_deadline=self._on_deadline
        )

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, whenever a receive has ended; no lock is held then."""
        self._listeners.append(callback)

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether the budget has room for a request's KV now."""
        with self._changed:
            return self._budget.has_room(request)

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Reserve memory for a request's KV; raises CapacityError if the budget has no room."""
        key = request.request_id
        timeout = self.config.timeout if request.kv_timeout is None else request.kv_timeout
        with self._changed:
            self._check_open()
            if key in self._entries:
                raise EngineError(f"request {key!r} holds KV already: free it first")
            self._budget.take(request)
            self._entries[key] = KVEntry(key, timeout)

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Begin to receive the KV of a request that has a reservation, and return."""
        if self.connector is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        self._begin(self._entry(request.request_id), self.connector)

    def receive_from_connector(
        self,
        connector: KVConsumer | KVSource,
        request: OmniDiffusionRequest,
        *,
        timeout: float | None = None,
    ) -> None:
        """Allocate, if `allocate` was not called, and receive; blocks until every byte is there.

        `timeout` in seconds replaces the request's. After an error the request holds nothing.

        Raises:
            TransferTimeout, TransferFailed, PeerLostError: it did not come.
            IntegrityError, WireError: what came is not what was sent.
            CapacityError: the budget has no room for it.
        """
        if self.state(request.request_id) is KVState.ABSENT:
            self.allocate(request)
        entry = self._entry(request.request_id)
        entry.timeout = entry.timeout if timeout is None else timeout
        try:
            self._begin(entry, _source(connector))
            with self._changed:  # the receiver's thread enforces the deadline
                self._changed.wait_for(lambda: entry.state is not KVState.RECEIVING)
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
        """The error of a request's receive; None if it has not failed."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.error

    def nbytes(self, request_id: str) -> int:
        """Bytes reserved for a request's KV; its actual size once it has come."""
        return self._budget.reserved.get(request_id, 0)

    def next_deadline(self) -> float | None:
        """The next deadline of a receive, in monotonic seconds; None if none is pending."""
        with self._changed:
            deadline = min((entry.deadline for entry in self._entries.values()), default=math.inf)
        return None if deadline == math.inf else deadline

    def get_kv_cache(self, request_id: str) -> KVPayload:
        """The KV as it came; never blocks. Raises the error of its receive, or EngineError."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.error is not None:
            raise entry.error
        if entry is None or entry.data is None:
            state = self.state(request_id)
            if state is KVState.ABSENT:
                text = f"the KV of {request_id!r} is absent: it was freed, or never received"
                raise EngineError(f"{text}; take what is needed of it before `free`")
            raise EngineError(f"the KV of {request_id!r} is {state.value}: wait until it is ready")
        return entry.data

    def free(self, request: OmniDiffusionRequest) -> None:
        """Release a request's KV and its reservation, in any state; idempotent."""
        self._free(request.request_id)

    def stats(self) -> dict[str, Any]:
        """Bytes and entries held, and counters, as JSON values."""
        with self._changed:
            states = [entry.state for entry in self._entries.values()]
            return {
                "budget": self.config.budget,
                "charged": self._budget.charged,
                "held": {state.value: states.count(state) for state in KVState},
                **self._counts,
            }

    def close(self) -> None:
        """Release everything; idempotent. The connector stays open."""
        with self._changed:
            self._closed = True
        for request_id in list(self._entries):
            self._free(request_id)
        self._receiver.close()

    def _begin(self, entry: KVEntry, source: KVSource) -> None:
        with self._changed:
            if entry.state is not KVState.ALLOCATED:
                raise EngineError(f"the KV of {entry.request_id!r} is {entry.state.value} already")
            entry.source, entry.started = source, time.monotonic()
            entry.deadline, entry.state = entry.started + entry.timeout, KVState.RECEIVING
            entry.get = BackgroundGet(
                entry.request_id,
                lambda timeout: source.link,
                lambda link, key, timeout: source.begin_get(key, timeout=timeout),
                entry.timeout,
                submit=self._receiver.submit,
                copy=partial(self._open, entry, source),
                fail=partial(self._end, entry),
            )
        self._receiver.submit(entry.get.request, min(_RECONNECT, entry.timeout))

    def _free(self, request_id: str) -> None:
        with self._changed:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                return
            self._budget.release(request_id)
            is_awaited, received = entry.deadline < math.inf, entry.received
            entry.received = entry.data = None
            if entry.state is KVState.RECEIVING:
                entry.error, entry.state = ClosedError("the request has ended"), KVState.FAILED
            self._count("freed")
        if is_awaited:
            entry.abort("the request has ended")
        if received is not None:
            received.release()

    # In the receiver's thread. The KV of an entry that is freed meanwhile is no longer RECEIVING.

    def _open(self, entry: KVEntry, source: KVSource, delivery: Any) -> None:
        """Verify the KV that has come, and put it on the device."""
        with self._changed:
            entry.deadline = math.inf
        started = time.perf_counter() - (time.monotonic() - entry.started)
        try:
            received = source.open(delivery, started=started, verify=self.config.verify)
            with contextlib.ExitStack() as unless_held:
                unless_held.callback(received.release)
                unless_held.callback(entry.abort, "its request failed, or has ended")  # first
                with self._changed:
                    if entry.state is KVState.RECEIVING:
                        self._budget.correct(entry.request_id, received.nbytes)
                data = received.to(self._device)
                with self._changed:
                    if entry.state is KVState.RECEIVING:
                        entry.received, entry.data, entry.state = received, data, KVState.READY
                        self._count("received", received.nbytes)
                        unless_held.pop_all()
        except Exception as error:
            self._end(entry, error)
        else:
            self._notify()

    def _on_deadline(self) -> None:
        with self._changed:
            now, entries = time.monotonic(), list(self._entries.values())
        for entry in [entry for entry in entries if entry.deadline <= now]:
            if entry.state is KVState.RECEIVING:  # not freed meanwhile, which aborts it, too
                entry.abort("its deadline passed")
                self._end(entry, entry.timeout_error())

    # In any thread.

    def _end(self, entry: KVEntry, error: Exception) -> None:
        """A receive has failed."""
        with self._changed:
            if entry.state is KVState.RECEIVING:
                entry.error, entry.state, entry.deadline = error, KVState.FAILED, math.inf
                self._count("failed")
        self._notify()

    def _count(self, counter: str, nbytes: int = 0) -> None:
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
