"""`WorkerService`: a rank's worker that is called from another process."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.ipc.rpc import public_methods, set_result_of
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
    StepSchedulerOutput,
)
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.engine.tokens.events import EventBuffer
from omni_kvlink.engine.worker import WorkerBase, make_worker
from omni_kvlink.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.config import StageConfig
    from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.tokens.events import Event

CONCURRENT = {"check_health", "fail_kv", "kv_transfer_stats", "sink_stats", "sink_url"}
"""Methods of a worker that do not wait for the model; all others run between its batches."""
_PENDING = (KVState.ALLOCATED, KVState.RECEIVING)
CLOSE_TIMEOUT = 5.0  # seconds to release everything; the model may wait for a rank that is gone


class WorkerService:
    """A worker whose methods can be called remotely, and some methods for its KV.

    A thread of its own loads the model and runs it. Meanwhile KV is received, and methods that do
    not need the model run in the thread that calls them. `methods` has, by name, the public ones of
    this class and of the worker; of those for the model's thread a Future is the result.
    """

    def __init__(self, config: StageConfig, local_rank: int, rank: int):
        self._is_leader = RankCoords.of(rank, config.parallel_config).is_leader
        self.worker = make_worker(config, local_rank, rank)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._receiving: dict[str, Future[int]] = {}
        self._queued: set[str] = set()
        self._aborted: set[str] = set()
        of_worker = public_methods(self.worker) | {"start": self.start}
        self._events = EventBuffer()
        methods = (self.run_model, self.abort, self.receive_kv, self.free_kv, self.kv_stats)
        self.methods: dict[str, Callable[..., Any]] = {
            name: method if name in CONCURRENT else partial(self._enqueue, method)
            for name, method in of_worker.items()
        } | {method.__name__: method for method in (*methods, self.take_events)}
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> bool:
        """Abort what runs, and release everything; returns whether that is done in time."""
        with self._lock:
            queued = list(self._queued)
        for request_id in queued:
            self.abort(request_id)
        self._jobs.put(None)
        self._events.close()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def start(self) -> dict[str, Any]:
        """Take the device, load the model, and return what the executor needs to know of it."""
        self.worker.init_device()
        runner = self.worker.runner
        if runner.kv_manager is not None:
            runner.kv_manager.listen(self._on_kv)
        pipeline = runner.utility.pipeline
        return {"supports_request_batch": getattr(pipeline, "supports_request_batch", False)}

    def run_model(self, work: DiffusionSchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run requests, or their next step, in the model thread; from now on they can be aborted.

        Each that ends is in `results`; images, texts and tokens are on a group's leader alone.
        """
        with self._lock:
            self._queued.update(work.request_ids)
        return self._enqueue(self._run_model, work)

    def abort(self, request_id: str) -> None:
        """Abort a request that runs here, or is queued for the model; ignore any other."""
        with self._lock:
            if request_id not in self._queued:
                return
            self._aborted.add(request_id)  # read by the runner when it begins this request
        self.worker.abort(request_id)

    def take_events(self) -> Future[list[Event]]:
        """A future of the next events of streamed requests; see `EventBuffer.take`."""
        return self._events.take()

    def receive_kv(self, request: OmniDiffusionRequest) -> Future[int]:
        """Receive a request's KV in the background; the result is its size in bytes."""
        manager, received = self._manager(), Future[int]()
        manager.allocate(request)  # first: `_on_kv`, for another request, takes it for released
        with self._lock:
            self._receiving[request.request_id] = received
        try:
            manager.prefetch(request)
        except BaseException:
            self._receiving.pop(request.request_id, None)
            raise
        return received

    def free_kv(self, request: OmniDiffusionRequest) -> None:
        """Release a request's KV, or cancel receiving it; a second call does nothing."""
        self._manager().free(request)
        self._on_kv()

    def kv_stats(self) -> dict[str, Any]:
        """Statistics of this rank's KV manager."""
        return self._manager().stats()

    def _enqueue(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Let the model thread call a method after all earlier ones."""
        answer: Future[Any] = Future()
        self._jobs.put(partial(set_result_of, answer, partial(method, *args, **kwargs)))
        return answer

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        finally:
            self.worker.shutdown()

    def _run_model(self, work: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        ended = work.request_ids
        try:
            for request in work.requests:
                request.is_cancelled = partial(self._aborted.__contains__, request.request_id)
                request.emit = self._events.put if self._is_leader else None
            output = self._execute(work)
            ended = list(output.results)  # the others go on
        finally:
            with self._lock:
                self._queued.difference_update(ended)
                self._aborted.difference_update(ended)
        if self._is_leader:
            return output
        results = {
            key: DiffusionOutput(key, error=result.error, kv_sent=result.kv_sent)
            for key, result in output.results.items()
        }
        return ModelRunnerOutput(list(results), [None] * len(results), results)

    def _execute(self, work: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        """Run requests on the worker; images are sent once, in `results`."""
        worker: WorkerBase[Any] = self.worker
        if isinstance(work, ARSchedulerOutput):
            ended: ModelRunnerOutput = worker.execute_model(work)
            return ended
        if isinstance(work, StepSchedulerOutput):
            results = worker.execute_stepwise(work).results
        else:
            output: BatchRunnerOutput = worker.execute_model(work.requests)
            results = {entry.request_id: entry.result for entry in output.runner_outputs}
        return ModelRunnerOutput(list(results), [None] * len(results), results)

    def _manager(self) -> DiffusionKVManager:
        manager: DiffusionKVManager | None = self.worker.runner.kv_manager
        if manager is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        return manager

    def _on_kv(self) -> None:
        """Set the futures of requests whose KV is received, failed or released; in any thread."""
        manager = self._manager()
        with self._lock:
            keys = [key for key in self._receiving if manager.state(key) not in _PENDING]
            ended = {key: self._receiving.pop(key) for key in keys}
        for key, received in ended.items():
            if manager.state(key) is KVState.READY:
                received.set_result(manager.nbytes(key))
            else:
                released = ClosedError(f"the KV of {key!r} was released")
                received.set_exception(manager.error(key) or released)
