"""`WorkerService`: one rank's worker, for an executor that is elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.ipc.futures import settle
from omni_kvlink.engine.kv.kv_entry import KVState
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
)
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker
from omni_kvlink.errors import ClosedError

Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]

AT_ONCE = {
    "abort",
    "check_health",
    "fail_kv",
    "free_kv",
    "kv_stats",
    "receive_kv",
    "sink_stats",
    "sink_url",
}
"""Methods that never wait for what the model does; all others run between its batches."""


class WorkerService:
    """The methods of a worker, and some for its KV, called from one thread and run in another.

    `run` is that other thread: where the model is loaded and runs. Meanwhile KV is received.

    Args:
        config: of the stage, with all that the ranks must know to meet.
        local_rank, rank: as the worker's.
    """

    def __init__(self, config: StageConfig, local_rank: int, rank: int):
        self._leads = RankCoords.of(rank, config.parallel_config).is_leader
        self.worker = make_worker(config, local_rank, rank)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._receiving: dict[str, Future[int]] = {}
        self._queued: set[str] = set()
        self._aborted: set[str] = set()

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Call a method of this service, or else of the worker; the answer in a future."""
        answer: Future[Any] = Future()
        try:
            own = getattr(self, method, None)
            call = partial(own or getattr(self.worker, method), *args, **kwargs)
            if method == "run_model":
                self._expect(args[0])
        except Exception as error:
            answer.set_exception(error)
            return answer
        if method in AT_ONCE:
            settle(answer, call)
        else:
            self._jobs.put((call, answer))
        return answer

    def run(self) -> None:
        """Do what was called, one after the other, until `stop`; then give everything back."""
        try:
            while (job := self._jobs.get()) is not None:
                call, answer = job
                settle(answer, call)
        finally:
            self.worker.shutdown()

    def stop(self) -> None:
        """Let `run` return as soon as it can; from any thread."""
        with self._lock:
            queued = list(self._queued)
        for request_id in queued:
            self.abort(request_id)
        self._jobs.put(None)

    # What an executor calls besides the worker's own methods.

    def start(self) -> dict[str, Any]:
        """Take the device, load the model; what the executor should know of it."""
        self.worker.init_device()
        runner = self.worker.runner
        if runner.kv_manager is not None:
            runner.kv_manager.listen(self._on_kv)
        pipeline = runner.utility.pipeline
        return {"supports_request_batch": getattr(pipeline, "supports_request_batch", False)}

    def run_model(self, work: DiffusionSchedulerOutput) -> dict[str, DiffusionOutput]:
        """Run requests; a result for each, with its images if this rank leads its group."""
        try:
            for request in work.requests:
                request.is_cancelled = partial(self._aborted.__contains__, request.request_id)
            results = self._results(work)
        finally:
            with self._lock:
                self._queued.difference_update(work.request_ids)
                self._aborted.difference_update(work.request_ids)
        if self._leads:
            return results
        return {
            key: DiffusionOutput(key, error=result.error, kv_sent=result.kv_sent)
            for key, result in results.items()
        }

    def abort(self, request_id: str) -> None:
        """A request that runs here, or is about to, ends as soon as it can."""
        with self._lock:
            if request_id not in self._queued:
                return
            self._aborted.add(request_id)  # the runner asks when it begins, and is told after
        self.worker.abort(request_id)

    def receive_kv(self, request: OmniDiffusionRequest) -> Future[int]:
        """Receive a request's KV; the answer comes when all of it is there: its bytes."""
        manager, ended = self._manager(), Future[int]()
        with self._lock:
            self._receiving[request.request_id] = ended
        try:
            manager.allocate(request)
            manager.prefetch(request)
        except BaseException:
            self._receiving.pop(request.request_id, None)
            raise
        return ended

    def free_kv(self, request: OmniDiffusionRequest) -> None:
        """Give back a request's KV, however far it came; the second time does nothing."""
        self._manager().free(request)
        self._on_kv()

    def kv_stats(self) -> dict[str, Any]:
        return self._manager().stats()

    # Inside.

    def _results(self, work: DiffusionSchedulerOutput) -> dict[str, DiffusionOutput]:
        run: Any = self.worker.execute_model
        output = run(work if isinstance(work, ARSchedulerOutput) else work.requests)
        if isinstance(output, BatchRunnerOutput):
            output = output.as_model_output()
        return {key: output.result_of(key) for key in output.req_ids}

    def _expect(self, work: DiffusionSchedulerOutput) -> None:
        """Requests come that may be aborted from now on."""
        with self._lock:
            self._queued.update(work.request_ids)

    def _manager(self) -> DiffusionKVManager:
        manager = self.worker.runner.kv_manager
        if manager is None:
            raise EngineError("this stage has no KV source: set kv.sources")
        return manager

    def _on_kv(self) -> None:
        """A receive is over, in whichever thread."""
        manager = self._manager()
        with self._lock:
            states = {key: manager.state(key) for key in self._receiving}
            over = {
                key: self._receiving.pop(key)
                for key, state in states.items()
                if state not in (KVState.ALLOCATED, KVState.RECEIVING)
            }
        for key, ended in over.items():
            if states[key] is KVState.READY:
                ended.set_result(manager.nbytes(key))
            else:
                gone = ClosedError(f"the KV of {key!r} was given back")
                ended.set_exception(manager.error(key) or gone)


def make_worker(
    config: StageConfig, local_rank: int, rank: int
) -> GPUARWorker | GPUDiffusionWorker:
    """The worker of a stage's kind."""
    if isinstance(config, OmniARConfig):
        return GPUARWorker(local_rank, rank, config)
    assert isinstance(config, OmniDiffusionConfig)
    return GPUDiffusionWorker(local_rank, rank, config)
