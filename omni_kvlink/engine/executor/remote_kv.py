"""`RemoteKVManager`: the KV of requests that workers in other processes receive and hold."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.ipc.rpc import RpcClient
from omni_kvlink.engine.kv.kv_manager import KVManager
from omni_kvlink.engine.kv.kv_state import KVEntry, KVState
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.errors import CapacityError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.config import KVConfig

_GRACE_SECONDS = 0.15
"""The time after a request's deadline in which a worker's own TransferTimeout may arrive."""
_STATS_TIMEOUT = 1.0
"""Seconds to wait for the workers' statistics."""


@dataclasses.dataclass(eq=False, kw_only=True)
class RemoteKVEntry(KVEntry):
    """A request's KV on the ranks of its data-parallel group; the request has no prompt."""

    request: OmniDiffusionRequest
    workers: Sequence[RpcClient]
    remaining: int  # ranks that have not received it yet
    nbytes: int = 0  # largest size that a rank has received


class RemoteKVManager(KVManager[RemoteKVEntry]):
    """The `KVManager` of a stage whose workers are in other processes; thread-safe.

    It keeps the stage's budget and lets all ranks of a request's group receive their parts. The KV
    is ready when all ranks have it, and failed as soon as one rank fails, or the deadline passes
    though no worker reports it. `workers_of` returns the workers of a group.
    """

    def __init__(
        self,
        config: KVConfig,
        router: DPRouter,
        workers_of: Callable[[int], Sequence[RpcClient]],
        workers: Sequence[RpcClient],
    ):
        self._router, self._workers_of, self._workers = router, workers_of, workers
        super().__init__(config)

    def prefetch(self, request: OmniDiffusionRequest) -> None:
        """Let the ranks of the request's group start to receive; returns at once."""
        with self._changed:
            entry = self._begin(request.request_id)
            entry.deadline += _GRACE_SECONDS
        self._submit(self._call_ranks, entry)

    def stats(self) -> dict[str, Any]:
        """Budget, states, counts; in "workers" the sums of those that "answered" within 1 s."""
        answers = [worker.call("kv_stats") for worker in self._workers]
        wait(answers, _STATS_TIMEOUT)
        worker_stats = [
            answer.result() for answer in answers if answer.done() and answer.exception() is None
        ]
        sums = {
            name: sum(counts[name] for counts in worker_stats)
            for name in ("charged", *self._counts)
        }
        return {**super().stats(), "workers": {"answered": len(worker_stats), **sums}}

    def _make_entry(self, request: OmniDiffusionRequest, timeout: float) -> RemoteKVEntry:
        key = request.request_id
        workers = self._workers_of(self._router.assign(key))
        # the ranks receive by the id alone; the prompt follows with the batch
        short = dataclasses.replace(request, prompt="", kv_timeout=timeout)
        remaining = len(workers)
        return RemoteKVEntry(key, timeout, request=short, workers=workers, remaining=remaining)

    def _call_ranks(self, entry: RemoteKVEntry) -> None:
        """In the receiver's thread: call all ranks, unless the request was freed meanwhile."""
        with self._changed:  # a concurrent `free` must call the ranks after this
            if entry.state is not KVState.RECEIVING:
                return
            answers = [worker.call("receive_kv", [entry.request]) for worker in entry.workers]
        for answer in answers:
            answer.add_done_callback(partial(self._on_answer, entry))

    def _on_answer(self, entry: RemoteKVEntry, answer: Future[int]) -> None:
        """A rank has received a request's KV, or failed to."""
        error: Any = answer.exception()
        if error is not None:
            self._fail(entry, error)
            return
        with self._changed:
            entry.remaining -= 1
            entry.nbytes = max(entry.nbytes, answer.result())
            if entry.remaining:
                return
        try:
            self._charge(entry, entry.nbytes)
        except CapacityError as too_large:
            self._fail(entry, too_large)
        else:
            self._move(entry, KVState.READY)
            self._notify()

    def _fail(self, entry: RemoteKVEntry, error: Exception) -> bool:
        """Fail a receive, and free what the ranks have of it."""
        failed = super()._fail(entry, error)
        if failed:
            self._free_on_ranks(entry)
        return failed

    def _expire(self, entry: RemoteKVEntry) -> TransferTimeout:
        key, waited = entry.request_id, entry.timeout
        text = f"the KV of {key!r} did not arrive within {format_seconds(waited)}; "
        text += "no worker reported it"
        return TransferTimeout(text, key=key, waited=waited, phase="requested")

    def _release(self, entry: RemoteKVEntry, state: KVState) -> None:
        self._router.remove(entry.request_id)
        if state in (KVState.RECEIVING, KVState.READY):
            self._free_on_ranks(entry)

    def _free_on_ranks(self, entry: RemoteKVEntry) -> None:
        for worker in entry.workers:
            worker.call("free_kv", [entry.request])


class DPRouter:
    """Assigns requests to as many data-parallel groups as `count`; thread-safe."""

    def __init__(self, count: int):
        self._lock = threading.Lock()
        self._loads = [0] * count
        self._groups: dict[str, int] = {}

    def assign(self, request_id: str) -> int:
        """The request's group; a new request is assigned to the least loaded one."""
        with self._lock:
            if request_id not in self._groups:
                group = self._loads.index(min(self._loads))
                self._loads[group] += 1
                self._groups[request_id] = group
            return self._groups[request_id]

    def find(self, request_id: str) -> int | None:
        """The request's group, or None if it has not been assigned."""
        return self._groups.get(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended; unknown ones are ignored."""
        with self._lock:
            group = self._groups.pop(request_id, None)
            if group is not None:
                self._loads[group] -= 1
