"""`DistributedExecutor`: what executors have in common whose workers are elsewhere."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, NoReturn, Protocol

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestFailed
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.executor.dp_router import DPRouter
from omni_kvlink.engine.executor.remote_kv import RemoteKVManager
from omni_kvlink.engine.ipc.codec import renamed
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
)
from omni_kvlink.engine.parallel.rank_coords import group_ranks
from omni_kvlink.errors import ClosedError, TransferTimeout

END = 10.0
"""Seconds that workers have to end when they are told to, before they are killed."""
_SETTLE = 5.0
"""Seconds in which the others must come back when one rank of a group has failed."""


class WorkerHandle(Protocol):
    """A `WorkerService` elsewhere; thread-safe. Nothing here waits but `join`."""

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Call a method of the service; the future has the answer, or why there is none.

        That is what the method raised, or EngineDeadError: the worker is gone.
        """

    @property
    def ended(self) -> Exception | None:
        """Why its calls end in errors, once the worker is gone."""

    def end(self) -> None:
        """Tell the worker to give everything back and end; it is no death."""

    def kill(self) -> None:
        """End the worker at once, whatever it does; it is no death of its own."""

    def join(self, timeout: float) -> None:
        """Wait until it has ended, which it was told to; one that does not in time is killed."""


DeathCallback = Callable[[EngineDeadError], None]
_GONE = (EngineDeadError, ClosedError)
"""What calls of a worker end in that died, or was told to end."""


class DistributedExecutor(Executor):
    """Workers by rank, and what is asked of them.

    A request goes to all ranks of its data-parallel group; the first of them answers with images,
    the others with errors alone. When one worker dies all are ended: they may wait for it.

    Attributes:
        workers: handles, by rank.
        start_timeout: seconds until every worker must have loaded its model.
    """

    start_timeout = 120.0

    @abstractmethod
    def _make_workers(self, on_death: DeathCallback) -> None:
        """Start a worker for each rank, at once, and put their handles into `workers`.

        Args:
            on_death: for a worker to call, from any thread, when it is gone that nobody told to.
        """

    def _init_executor(self) -> None:
        self.workers: list[WorkerHandle] = []
        self._lock = threading.Lock()
        self._callbacks: list[FailureCallback] = []
        self._dead: EngineDeadError | None = None
        self._is_shut = False
        parallel = self.config.parallel_config
        self._groups = DPRouter(parallel.data_parallel_size)
        try:
            self._make_workers(self._fail)
            found = self.collective_rpc("start", timeout=self.start_timeout)
        except BaseException:
            for worker in self.workers:
                worker.kill()  # those that wait for one that failed would not end
            self.shutdown()
            raise
        self.supports_request_batch = all(one["supports_request_batch"] for one in found)
        if isinstance(self.config, OmniDiffusionConfig) and self.config.kv.sources:
            self.kv_manager = RemoteKVManager(
                self.config.kv, self._groups, self._group, self.workers
            )

    # Requests.

    def execute_model(self, scheduler_output: DiffusionSchedulerOutput) -> ModelRunnerOutput:
        if not isinstance(scheduler_output, ARSchedulerOutput):
            return super().execute_model(scheduler_output)
        results = self._run([scheduler_output])
        ids = scheduler_output.request_ids
        return ModelRunnerOutput(ids, [None] * len(ids), results)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        work = [DiffusionSchedulerOutput([request]) for request in scheduler_output.requests]
        return BatchRunnerOutput.of(scheduler_output.request_ids, self._run(work))

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        shares: dict[int, DiffusionSchedulerOutput] = {}
        for request in scheduler_output.requests:
            group = self._groups.choose(request.request_id)
            shares.setdefault(group, DiffusionSchedulerOutput([])).requests.append(request)
        results = self._run(list(shares.values()))
        return BatchRunnerOutput.of(scheduler_output.request_ids, results)

    def fail_kv(self, request_id: str, reason: str) -> None:
        for worker in self.workers if self.config.kv.sinks else []:
            worker.call("fail_kv", [request_id, reason])  # in any thread: nobody waits for it

    def abort(self, request_id: str) -> None:
        group = self._groups.find(request_id)
        for worker in [] if group is None else self._group(group):
            worker.call("abort", [request_id])

    # Workers.

    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._check_alive()
        answers = [worker.call(method, args, kwargs) for worker in self.workers]
        late = wait(answers, timeout, FIRST_EXCEPTION).not_done
        for rank, answer in enumerate(answers):
            error = answer.exception() if answer.done() else None
            if isinstance(error, _GONE):
                self._check_alive()
            if error is not None:
                raise renamed(error, f"rank {rank}: ") if len(answers) > 1 else error
        if late:
            ranks = ", ".join(str(rank) for rank, one in enumerate(answers) if one in late)
            raise TransferTimeout(
                f"{method}: no answer of rank {ranks} within {timeout:g} s",
                waited=timeout or 0.0,
                phase="starting" if method == "start" else "running",
            )
        return [answer.result() for answer in answers]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        with self._lock:
            dead = self._dead
            if dead is None:
                self._callbacks.append(callback)
        if dead is not None:
            callback(dead)

    def check_health(self, *, timeout: float) -> None:
        """A worker that does not answer counts as dead, and all are ended."""
        try:
            self.collective_rpc("check_health", timeout=timeout)
        except TransferTimeout as error:
            frozen = EngineDeadError(f"a worker is frozen: {error}")
            self._fail(frozen)
            raise self._dead or frozen from None

    def determine_available_memory(self) -> list[int]:
        return self.collective_rpc("determine_available_memory")

    def shutdown(self) -> None:
        with self._lock:
            if self._is_shut:
                return
            self._is_shut = True
        for worker in self.workers:
            worker.end()
        limit = time.monotonic() + END
        for worker in self.workers:
            worker.join(max(0.0, limit - time.monotonic()))
        if isinstance(self.kv_manager, RemoteKVManager):
            self.kv_manager.close()

    # Inside.

    def _group(self, group: int) -> list[WorkerHandle]:
        """The workers that paint a request of this group, its leader first."""
        return [self.workers[rank] for rank in group_ranks(group, self.config.parallel_config)]

    def _run(self, work: Sequence[DiffusionSchedulerOutput]) -> dict[str, DiffusionOutput]:
        """Run shares of a batch, each of one group; those of one group one after the other.

        Raises:
            EngineDeadError: a worker is gone.
        """
        self._check_alive()
        requests = [request for share in work for request in share.requests]
        try:
            asked = []
            for share in work:
                (group,) = {self._groups.choose(key) for key in share.request_ids}
                asked.append([one.call("run_model", [share]) for one in self._group(group)])
            for request in requests:
                if request.is_cancelled():  # and the workers were not told: nobody knew which
                    self.abort(request.request_id)
            results: dict[str, DiffusionOutput] = {}
            for share, answers in zip(work, asked, strict=True):
                results |= self._results(share.request_ids, answers)
            return results
        finally:
            for request in requests:
                if not request.need_kv_receive:
                    self._groups.forget(request.request_id)

    def _results(
        self, request_ids: Sequence[str], answers: Sequence[Future[dict[str, DiffusionOutput]]]
    ) -> dict[str, DiffusionOutput]:
        """What a group says of its requests; what one rank of it lacks nobody has painted."""
        if wait(answers, return_when=FIRST_EXCEPTION).not_done:
            wait(answers, _SETTLE)
        errors = [error for one in answers if one.done() and (error := one.exception())]
        for error in errors:
            if isinstance(error, _GONE):
                wait(answers, _SETTLE)
                self._part(error)
        if not all(one.done() for one in answers):
            self._fail(EngineDeadError(f"a rank waits for one that failed: {errors[0]}"))
            self._check_alive()
        if errors:
            failure = errors[0]
            if not isinstance(failure, EngineError):
                failure = RequestFailed(f"a worker failed: {failure!r}")
            return {key: DiffusionOutput(key, error=failure) for key in request_ids}
        results = _merged([answer.result() for answer in answers])
        for result in results.values():
            if isinstance(result.error, EngineDeadError):
                self._part(result.error)
        return results

    def _part(self, error: Any) -> NoReturn:
        """Ranks are gone, or one says so of another: raises which, and nothing goes on."""
        gone = [worker.ended for worker in self.workers if worker.ended is not None]
        if not gone:  # they live, and can do nothing together any more
            self._fail(error)
        self._check_alive()
        raise (gone or [error])[0]

    def _fail(self, error: EngineDeadError) -> None:
        """A worker is gone, or as good as that: the others may wait for it, and are ended."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = error
            callbacks, self._callbacks = self._callbacks, []
        for worker in self.workers:
            worker.kill()
        for callback in callbacks:
            callback(error)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._is_shut:
            raise EngineDeadError("the executor was shut down")


def _merged(by_rank: Sequence[Mapping[str, DiffusionOutput]]) -> dict[str, DiffusionOutput]:
    """The leader's results, with the errors of others, and with what they sent on."""
    merged = dict(by_rank[0])
    for key, result in merged.items():
        of_ranks = [results[key] for results in by_rank]
        error = next((one.error for one in of_ranks if one.error is not None), None)
        if error is not None:
            merged[key] = DiffusionOutput(key, error=error, seconds=result.seconds)
        elif result.kv_sent is not None:
            nbytes = max(one.kv_sent.nbytes for one in of_ranks if one.kv_sent is not None)
            result.kv_sent = dataclasses.replace(result.kv_sent, nbytes=nbytes)
    return merged
