"""`DistributedExecutor`: common part of the executors whose workers are in other processes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import threading
import time
from abc import abstractmethod
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestFailed
from omni_kvlink.engine.executor.base import Executor, FailureCallback
from omni_kvlink.engine.executor.remote_kv import DPRouter, RemoteKVManager
from omni_kvlink.engine.ipc.codec import with_prefix
from omni_kvlink.engine.ipc.process import ProcessHandle
from omni_kvlink.engine.ipc.rpc import SHUTDOWN_TIMEOUT, RpcClient, RpcTransport
from omni_kvlink.engine.outputs import (
    ARSchedulerOutput,
    BatchRunnerOutput,
    DiffusionOutput,
    DiffusionSchedulerOutput,
    ModelRunnerOutput,
    StepSchedulerOutput,
)
from omni_kvlink.engine.parallel.rank_coords import group_ranks
from omni_kvlink.engine.worker import worker_class
from omni_kvlink.errors import ClosedError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.engine.tokens.events import Event

_RESULT_TIMEOUT = 5.0
"""Seconds in which the other ranks of a group must answer after one of them has failed."""
Answers: TypeAlias = "Sequence[Future[ModelRunnerOutput]]"
"""The outputs of a part of a batch, of each rank of its group."""
Pending: TypeAlias = "tuple[list[str], Answers]"
"""The ids of a part's requests, and its outputs."""
_CLIENT_ERRORS = (EngineDeadError, ClosedError)
"""The errors of a worker's calls after it has died, or was shut down."""


class DistributedExecutor(Executor):
    """Runs requests on workers in other processes, one for each rank.

    A request goes to all ranks of its data-parallel group; the group's leader answers with images,
    the other ranks with errors only. When one worker dies all are killed, because the others may
    wait for it.
    """

    supports_step_execution = True

    @abstractmethod
    def _start_workers(self) -> None:
        """Start a process for each rank, and `_add_worker` each in the order of the ranks."""

    def _add_worker(self, transport: RpcTransport) -> None:
        self.workers.append(RpcClient(transport, self._fail))

    def _init_executor(self) -> None:
        self.workers: list[RpcClient] = []  # by rank
        self._lock = threading.Lock()
        self._callbacks: list[FailureCallback] = []
        self._dead: EngineDeadError | None = None
        self._closed = False
        worker_class(self.config)  # raises here, not in a process that dies of it
        self._taking: set[int] = set()  # leaders that are called for their events
        self._collectors = ThreadPoolExecutor(self.max_concurrent_batches, "collector")
        self._router = DPRouter(self.config.parallel_config.data_parallel_size)
        try:
            self._start_workers()
            infos = self.collective_rpc("start", timeout=self.config.start_timeout)
        except BaseException:
            for worker in self.workers:
                worker.kill()  # one that waits for a rank that failed would not shut down
            self.shutdown()
            raise
        self.supports_request_batch = all(info["supports_request_batch"] for info in infos)
        if isinstance(self.config, OmniDiffusionConfig) and self.config.kv.sources:
            self.kv_manager = RemoteKVManager(
                self.config.kv, self._router, self._workers_of, self.workers
            )

    @property
    def max_concurrent_batches(self) -> int:
        """The configured number; a worker's next batch is in its queue while one runs."""
        return getattr(self.config, "max_concurrent_batches", 1)

    def execute_model(
        self, scheduler_output: DiffusionSchedulerOutput
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """Run everything that was scheduled; see `Executor.execute_model`."""
        if isinstance(scheduler_output, StepSchedulerOutput):
            return self._run_step(scheduler_output)
        if self.max_concurrent_batches == 1:
            return super().execute_model(scheduler_output)
        divide = self._by_group if self.supports_request_batch else self._one_by_one
        collect = self._begin(scheduler_output, divide(scheduler_output))
        return self._collectors.submit(lambda: collect().as_model_output())

    def _run_step(self, scheduler_output: StepSchedulerOutput) -> ModelRunnerOutput:
        ended = scheduler_output.request_ids
        try:
            outputs = self._collect(self._send(self._by_group(scheduler_output)))
            results = _united(outputs)
            ended = list(results)  # the others go on
        finally:
            for request_id in ended:
                self._router.remove(request_id)
        if isinstance(scheduler_output, ARSchedulerOutput):
            (output,) = outputs  # an AR stage has one group
            return output
        return ModelRunnerOutput(ended, [results[key].output for key in ended], results)

    def execute_request(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run each request by a call of its own on its group."""
        return self._begin(scheduler_output, self._one_by_one(scheduler_output))()

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BatchRunnerOutput:
        """Run all requests of a group by one call on that group."""
        return self._begin(scheduler_output, self._by_group(scheduler_output))()

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage that a request's KV will not be sent; does not wait for workers."""
        for worker in self.workers if self.config.kv.sinks else []:
            worker.call("fail_kv", [request_id, reason])

    def abort(self, request_id: str) -> None:
        """Abort a running request on all ranks of its group; does not wait for them."""
        group = self._router.find(request_id)
        for worker in [] if group is None else self._workers_of(group):
            worker.call("abort", [request_id])

    def collective_rpc(
        self,
        method: str,
        *,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; see `Executor.collective_rpc`."""
        self._check_alive()
        answers = [worker.call(method, args, kwargs) for worker in self.workers]
        pending = wait(answers, timeout, FIRST_EXCEPTION).not_done
        for rank, answer in enumerate(answers):
            error = answer.exception() if answer.done() else None
            if isinstance(error, _CLIENT_ERRORS):
                self._check_alive()
            if error is not None:
                raise with_prefix(error, f"rank {rank}: ") if len(answers) > 1 else error
        if pending:
            ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer in pending)
            raise TransferTimeout(
                f"{method}: no answer of rank {ranks} within {format_seconds(timeout or 0.0)}",
                waited=timeout or 0.0,
                phase="starting" if method == "start" else "running",
            )
        return [answer.result() for answer in answers]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        """Call this, from any thread, once, when a worker is gone; at once if one already is."""
        with self._lock:
            dead = self._dead
            if dead is None:
                self._callbacks.append(callback)
        if dead is not None:
            callback(dead)

    def check_health(self, *, timeout: float) -> None:
        """Return if every worker answers in time; otherwise kill all, and raise EngineDeadError."""
        try:
            self.collective_rpc("check_health", timeout=timeout)
        except TransferTimeout as error:
            frozen = EngineDeadError(f"a worker is frozen: {error}")
            self._fail(frozen)
            raise self._dead or frozen from None

    def shutdown(self) -> None:
        """Shut down the workers, and release their memory; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self.workers:
            worker.shutdown()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        for worker in self.workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._collectors.shutdown(wait=False)  # no call is pending any more
        if isinstance(self.kv_manager, RemoteKVManager):
            self.kv_manager.close()

    def _workers_of(self, group: int) -> list[RpcClient]:
        """The workers of a data-parallel group, its leader first."""
        return [self.workers[rank] for rank in group_ranks(group, self.config.parallel_config)]

    def _one_by_one(self, batch: DiffusionSchedulerOutput) -> list[DiffusionSchedulerOutput]:
        return [DiffusionSchedulerOutput([request]) for request in batch.requests]

    def _by_group(self, scheduled: DiffusionSchedulerOutput) -> list[DiffusionSchedulerOutput]:
        """The part of a batch, or of a step, that each group runs."""
        by_group: dict[int, list[str]] = {}
        for key in scheduled.request_ids:
            by_group.setdefault(self._router.assign(key), []).append(key)
        return [_part(scheduled, keys) for keys in by_group.values()]

    def _begin(
        self, batch: DiffusionSchedulerOutput, work: Sequence[DiffusionSchedulerOutput]
    ) -> Callable[[], BatchRunnerOutput]:
        """Send the parts of a batch; the call that is returned waits for its outputs."""
        with ExitStack() as unless_sent:
            unless_sent.callback(self._remove, batch)
            pending = self._send(work)
            at_end = unless_sent.pop_all()

        def outputs() -> BatchRunnerOutput:
            with at_end:
                return BatchRunnerOutput.of(batch.request_ids, _united(self._collect(pending)))

        return outputs

    def _remove(self, batch: DiffusionSchedulerOutput) -> None:
        """Forget the groups of requests that have run; those with KV have theirs until it ends."""
        for request in batch.requests:
            if not request.need_kv_receive:
                self._router.remove(request.request_id)

    def _send(self, work: Sequence[DiffusionSchedulerOutput]) -> list[Pending]:
        """Send parts of a batch, each to one group; a group runs its parts one after the other."""
        self._check_alive()
        pending: list[Pending] = []
        for part in work:
            (group,) = {self._router.assign(key) for key in part.request_ids}
            answers = [worker.call("run_model", [part]) for worker in self._workers_of(group)]
            pending.append((part.request_ids, answers))
            if any(request.sampling_params.stream for request in part.requests):
                self._take_events(group)
        for request in (request for part in work for request in part.requests):
            if request.is_cancelled():  # before its group was known, so no worker knows
                self.abort(request.request_id)
        return pending

    def _collect(self, pending: Sequence[Pending]) -> list[ModelRunnerOutput]:
        """Wait for the outputs of the parts."""
        return [self._output(request_ids, answers) for request_ids, answers in pending]

    def _take_events(self, group: int) -> None:
        """Take the events of a group's leader, again and again, unless that is done already."""
        with self._lock:
            if group in self._taking:
                return
            self._taking.add(group)
        self._next_events(group)

    def _next_events(self, group: int) -> None:
        coming = self._workers_of(group)[0].call("take_events")
        coming.add_done_callback(partial(self._on_events, group))

    def _on_events(self, group: int, coming: Future[list[Event]]) -> None:
        events = [] if coming.exception() is not None else coming.result()
        for event in events:
            self.events.put(event)
        if events:
            self._next_events(group)
        else:  # the leader is gone, or closes
            self._taking.discard(group)

    def _output(self, request_ids: Sequence[str], answers: Answers) -> ModelRunnerOutput:
        """A group's output; a request that failed on one rank has failed."""
        if wait(answers, return_when=FIRST_EXCEPTION).not_done:
            wait(answers, _RESULT_TIMEOUT)
        errors = [error for answer in answers if answer.done() and (error := answer.exception())]
        for error in errors:
            if isinstance(error, _CLIENT_ERRORS):
                wait(answers, _RESULT_TIMEOUT)
                self._raise_dead(error)
        if not all(answer.done() for answer in answers):
            self._fail(EngineDeadError(f"a rank waits for one that failed: {errors[0]}"))
            self._check_alive()
        if errors:
            failure = errors[0]
            if not isinstance(failure, EngineError):
                failure = RequestFailed(f"a worker failed: {failure!r}")
            return ModelRunnerOutput.failed(list(request_ids), failure)
        outputs = [answer.result() for answer in answers]
        results = _merged([output.results for output in outputs])
        for result in results.values():
            if isinstance(result.error, EngineDeadError):
                self._raise_dead(result.error)
        return dataclasses.replace(outputs[0], results=results)

    def _raise_dead(self, error: Any) -> NoReturn:
        """Raise why a rank is gone, after `error` was reported for it by itself or by another."""
        exits = [worker.error for worker in self.workers if worker.error is not None]
        if not exits:  # all processes live, but their process group is broken
            self._fail(error)
        self._check_alive()
        raise (exits or [error])[0]

    def _fail(self, error: EngineDeadError) -> None:
        """A worker is gone or unusable: kill all, because the others may wait for it."""
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
        if self._closed:
            raise EngineDeadError("the executor was shut down")


def _part(scheduled: DiffusionSchedulerOutput, keys: Sequence[str]) -> DiffusionSchedulerOutput:
    """The part of a batch, or of a step, with these requests."""
    lists: dict[str, list[Any]] = {
        "requests": [request for request in scheduled.requests if request.request_id in keys]
    }
    if isinstance(scheduled, StepSchedulerOutput):
        for name in ("cached_request_ids", "aborted_request_ids"):
            lists[name] = [key for key in getattr(scheduled, name) if key in keys]
    return dataclasses.replace(scheduled, **lists)


def _united(outputs: Sequence[ModelRunnerOutput]) -> dict[str, DiffusionOutput]:
    """The results of all groups, by request id."""
    return {key: result for output in outputs for key, result in output.results.items()}


def _merged(by_rank: Sequence[Mapping[str, DiffusionOutput]]) -> dict[str, DiffusionOutput]:
    """The leader's results with the other ranks' errors, and what all ranks sent of its KV."""
    merged = dict(by_rank[0])
    for key, result in merged.items():
        rank_results = [results[key] for results in by_rank]
        error = next((result.error for result in rank_results if result.error is not None), None)
        if error is not None:
            merged[key] = DiffusionOutput(key, error=error, seconds=result.seconds)
        elif result.kv_sent is not None:
            sent = [r.kv_sent for r in rank_results if r.kv_sent is not None]
            nbytes, urls = max(one.nbytes for one in sent), [one.kv_sender_info for one in sent]
            result.kv_sent = dataclasses.replace(
                result.kv_sent, nbytes=nbytes, kv_sender_info=tuple(chain(*urls))
            )
    return merged


class MultiprocExecutor(DistributedExecutor):
    """Runs each rank of a stage, of either kind, in a process of its own.

    Messages travel over socket pairs, large tensors in shared memory. The processes end with this
    one, however it ends.
    """

    _rendezvous = ""

    def _start_workers(self) -> None:
        ranks = self.config.parallel_config.world_size
        url = self.config.distributed_init_method
        if ranks > 1 and not url:
            self._rendezvous = tempfile.mkdtemp(prefix="kvl-ranks-")
            url = f"file://{self._rendezvous}/rendezvous"
        threads = self.config.num_threads
        if ranks > 1 and not threads and self.config.device_of(0).type == "cpu":
            threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        config = dataclasses.replace(self.config, distributed_init_method=url, num_threads=threads)
        service, directory = "worker.service:WorkerService", self._rendezvous
        for rank in range(ranks):
            name = f"rank {rank} of the {config.stage} stage"
            self._add_worker(
                ProcessHandle(service, config, [rank, rank], name=name, directory=directory)
            )

    def shutdown(self) -> None:
        """Shut down the processes, and release their memory; a second call does nothing."""
        super().shutdown()
        if self._rendezvous:
            shutil.rmtree(self._rendezvous, ignore_errors=True)
