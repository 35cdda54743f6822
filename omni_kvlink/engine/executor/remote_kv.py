"""`RemoteKVManager`: the KV of requests that workers in other processes receive and hold."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_manager import Budget, KVReceiver, KVState
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.service import WorkerClient
from omni_kvlink.errors import CapacityError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.config import KVConfig
    from omni_kvlink.engine.executor.dp_router import DPRouter

_GRACE_SECONDS = 0.15
"""The time after a request's deadline in which a worker's own TransferTimeout may arrive."""
_STATS_TIMEOUT = 1.0
"""Seconds to wait for the workers' statistics."""


@dataclasses.dataclass(eq=False)
class RemoteKVEntry:
    """One request's KV on the ranks of its data-parallel group; the request has no prompt."""

    request: OmniDiffusionRequest
    timeout: float
    workers: list[WorkerClient]
    state: KVState = KVState.ALLOCATED
    error: Exception | None = None
    deadline: float = math.inf  # monotonic; the receive fails then even if no worker reports it
    remaining: int = 0  # ranks that have not received it yet
    nbytes: int = 0  # largest size that a rank has received


class RemoteKVManager:
    """The `KVManager` of a stage whose workers are in other processes; thread-safe.

    It keeps the stage's budget and lets all ranks of a request's group receive their parts. The KV
    is ready when all ranks have it, and failed as soon as one rank fails. A thread of its own fails
    what is late even if no worker reports it. `workers_of` returns the workers of a group.
    """

    def __init__(
        self,
        config: KVConfig,
        router: DPRouter,
        workers_of: Callable[[int], Sequence[WorkerClient]],
        workers: Sequence[WorkerClient],
    ):
        self._config, self._router = config, router
        self._workers_of, self._workers = workers_of, workers
        self._lock = threading.Lock()
        self._budget = Budget(config)
        self._entries: dict[str, RemoteKVEntry] = {}
        self._listeners: list[Callable[[], None]] = []
        self._counts = {"received": 0, "failed": 0, "freed": 0, "nbytes": 0}
        self._receiver = KVReceiver(
            "remote-kv", next_deadline=self.next_deadline, on_deadline=self._on_deadline
        )

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when a receive has ended."""
        self._listeners.append(callback)

    def can_allocate(self, request: OmniDiffusionRequest) -> bool:
        """Whether the budget has room for a request's KV now."""
        with self._lock:
            return self._budget.has_room(request)

    def allocate(self, request: OmniDiffusionRequest) -> None:
        """Charge a request's KV to the budget, and assign the request to a group."""
        key = request.request_id
        timeout = self._config.timeout if request.kv_timeout is None else request.kv_timeout
        with self._lock:
            if key in self._entries:
                raise EngineError(f"request {key!r} holds KV already: free it first")
            self._budget.take(request)
            workers = list(self._workers_of(self._router.assign(key)))
            # the ranks receive by the id alone; the prompt follows with the batch
            short = dataclasses.replace(request, prompt="", kv_timeout=timeout)
            self._entries[key] = RemoteKVEntry(short, timeout, workers)

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Let the ranks of the request's group start to receive; returns at once."""
        with self._lock:
            entry = self._entries.get(request.request_id)
            if entry is None or entry.state is not KVState.ALLOCATED:
                state = KVState.ABSENT if entry is None else entry.state
                raise EngineError(f"the KV of {request.request_id!r} is {state.value}")
            entry.state, entry.remaining = KVState.RECEIVING, len(entry.workers)
            entry.deadline = time.monotonic() + entry.timeout + _GRACE_SECONDS
        self._receiver.submit(self._begin, entry)

    def state(self, request_id: str) -> KVState:
        """The state of a request's KV."""
        entry = self._entries.get(request_id)
        return KVState.ABSENT if entry is None else entry.state

    def error(self, request_id: str) -> Exception | None:
        """Why a receive failed; None if it did not."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.error

    def next_deadline(self) -> float | None:
        """The next deadline of a receive, on `time.monotonic`'s clock."""
        with self._lock:
            entries = self._entries.values()
            deadlines = [entry.deadline for entry in entries if entry.state is KVState.RECEIVING]
        return min(deadlines, default=None)

    def free(self, request: OmniDiffusionRequest) -> None:
        """Free a request's KV on all ranks, in any state; a second call does nothing."""
        with self._lock:
            entry = self._entries.pop(request.request_id, None)
            if entry is None:
                return
            self._budget.release(request.request_id)
            self._router.remove(request.request_id)
            self._counts["freed"] += 1
            state, entry.state = entry.state, KVState.ABSENT
        if state in (KVState.RECEIVING, KVState.READY):
            self._free_on_workers(entry)

    def stats(self) -> dict[str, Any]:
        """Budget, states, counts; in "workers" the sums of those that "answered" within 1 s."""
        with self._lock:
            states = [entry.state.value for entry in self._entries.values()]
            stats = {
                "budget": self._budget.nbytes,
                "charged": self._budget.charged,
                "held": {state.value: states.count(state.value) for state in KVState},
                **self._counts,
            }
        answers = [worker.kv_stats() for worker in self._workers]
        wait(answers, _STATS_TIMEOUT)
        worker_stats = [
            answer.result() for answer in answers if answer.done() and answer.exception() is None
        ]
        sums = {
            name: sum(counts[name] for counts in worker_stats)
            for name in ("charged", *self._counts)
        }
        return {**stats, "workers": {"answered": len(worker_stats), **sums}}

    def close(self) -> None:
        """Stop the thread; a second call does nothing. What the workers hold is not freed."""
        self._receiver.close()

    def _begin(self, entry: RemoteKVEntry) -> None:
        """In the receiver's thread: call all ranks, unless the request was freed meanwhile."""
        with self._lock:  # a concurrent `free` must call the ranks after this
            if entry.state is not KVState.RECEIVING:
                return
            answers = [worker.receive_kv(entry.request) for worker in entry.workers]
        for answer in answers:
            answer.add_done_callback(partial(self._on_answer, entry))

    def _on_answer(self, entry: RemoteKVEntry, answer: Future[int]) -> None:
        """A rank has received a request's KV, or failed to."""
        error: Any = answer.exception()
        if error is None:
            with self._lock:
                entry.remaining -= 1
                entry.nbytes = max(entry.nbytes, answer.result())
                if entry.remaining:
                    return
        self._end(entry, error)

    def _on_deadline(self) -> None:
        now = time.monotonic()
        with self._lock:
            expired = [entry for entry in self._entries.values() if entry.deadline <= now]
        for entry in expired:
            key, waited = entry.request.request_id, entry.timeout
            text = f"the KV of {key!r} did not arrive within {format_seconds(waited)}; "
            text += "no worker reported it"
            self._end(entry, TransferTimeout(text, key=key, waited=waited, phase="requested"))

    def _end(self, entry: RemoteKVEntry, error: Exception | None) -> None:
        """End a receive that goes on: charge its actual size, or free what the ranks have of it."""
        with self._lock:
            if entry.state is not KVState.RECEIVING:
                return
            if error is None:
                try:
                    self._budget.correct(entry.request.request_id, entry.nbytes)
                except CapacityError as too_large:
                    error = too_large
            if error is None:
                entry.state = KVState.READY
                self._counts["received"] += 1
                self._counts["nbytes"] += entry.nbytes
            else:
                entry.state, entry.error = KVState.FAILED, error
                self._counts["failed"] += 1
        if error is not None:
            self._free_on_workers(entry)
        for callback in self._listeners:
            callback()

    def _free_on_workers(self, entry: RemoteKVEntry) -> None:
        for worker in entry.workers:
            worker.free_kv(entry.request)
