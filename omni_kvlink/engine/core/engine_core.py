"""`EngineCore`: the loop schedule → execute → update, and a future for every request."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.engine.ipc.rpc import set_result_of
from omni_kvlink.engine.outputs import ModelRunnerOutput
from omni_kvlink.errors import ClosedError, TransferTimeout, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.executor import Executor
    from omni_kvlink.engine.outputs import DiffusionOutput, DiffusionSchedulerOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sched.scheduler import Scheduler

_STABLE_SHARE = 0.25  # the part of `max_wait` without a new request after which a batch is complete
_IDLE_SECONDS = 60.0  # after which an idle loop runs once; nothing depends on it


class EngineCore:
    """A scheduler, an executor, and the thread that drives them; thread-safe."""

    scheduler: Scheduler
    executor: Executor

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[DiffusionOutput]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._dead: EngineError | None = None
        self._closed = False

    def start(self, scheduler: Scheduler, executor: Executor, *, max_wait: float = 0.0) -> None:
        """Start the thread; a first request may wait `max_wait` seconds for a full batch."""
        self.scheduler, self.executor, self._max_wait = scheduler, executor, max_wait
        self._dead = None
        self._batches: list[tuple[DiffusionSchedulerOutput, Future[ModelRunnerOutput]]] = []
        scheduler.max_concurrent_batches = executor.max_concurrent_batches
        scheduler.listen(self._resolve_ended)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request; its future has the output, which may hold the request's error.

        Raises EngineError if the id is in use, EngineDeadError if a worker is gone: `restart`.
        """
        self.executor.prepare(request)
        future: Future[DiffusionOutput] = Future()
        future.set_running_or_notify_cancel()  # callers end it by `abort` alone
        with self._lock:
            self._check_alive()
            if request.request_id in self._futures:
                raise EngineError(f"request {request.request_id!r} is here already")
            self._futures[request.request_id] = future
        try:
            self.scheduler.add_request(request)
        except BaseException:
            self._futures.pop(request.request_id, None)
            raise
        return future

    def step(self) -> list[DiffusionOutput]:
        """Begin a batch, if one is ready; returns the outputs, or errors, of what has ended.

        Where the executor runs one batch at a time, the batch has ended, too.
        """
        if ended := self._end_batches():
            return ended  # their callers do not wait for what comes next
        if (longest := self._max_wait) and not self.scheduler.num_running:
            self.scheduler.wait_for_batch(timeout=longest, stable=longest * _STABLE_SHARE)
        scheduled = self.scheduler.schedule(start=not self._calls)
        ended = self._take_ended()
        if scheduled.is_empty:
            return ended
        try:
            result = self.executor.execute_model(scheduled)
        except Exception as error:
            result = _failed(scheduled, error)
        if not isinstance(result, Future):
            return ended + self._update(scheduled, result)
        self._batches.append((scheduled, result))
        result.add_done_callback(lambda _: self.scheduler.wake())
        return ended

    def _end_batches(self) -> list[DiffusionOutput]:
        """The outputs of the batches sent ahead that have ended, in whatever order they did."""
        batches, self._batches = self._batches, []
        outputs: list[DiffusionOutput] = []
        for scheduled, answer in batches:
            if not answer.done():
                self._batches.append((scheduled, answer))
                continue
            error: Any = answer.exception()
            results = answer.result() if error is None else _failed(scheduled, error)
            outputs += self._update(scheduled, results)
        return outputs

    def _update(
        self, scheduled: DiffusionSchedulerOutput, results: ModelRunnerOutput
    ) -> list[DiffusionOutput]:
        outputs = self.scheduler.update_from_output(scheduled, results)
        for output in outputs:
            if output.error and results.result_of(output.request_id).kv_sent:  # aborted too late
                self.executor.fail_kv(output.request_id, str(output.error))
        return outputs

    def abort(self, request_id: str) -> None:
        """End a request, whether it waits or runs; unknown ids are ignored."""
        if self.scheduler.abort_request(request_id):
            self.executor.abort(request_id)
        self._resolve_ended()

    def call(self, call: Callable[[], Any], *, timeout: float) -> Any:
        """Run a call in the engine's thread while no request runs; returns what it returns."""
        answer: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            self._calls.append(partial(set_result_of, answer, call))
        self.scheduler.wake()
        if not wait([answer], timeout).done:
            raise TransferTimeout(
                f"the engine is busy since {format_seconds(timeout)}", waited=timeout
            )
        return answer.result()

    def _run(self) -> None:
        """Runs in the engine's thread."""
        while not self.scheduler.is_stopped:
            if self.scheduler.wait(timeout=_IDLE_SECONDS, start=not self._calls):
                self._resolve(EngineCore.step(self))
            if not self.scheduler.num_running:
                self._run_calls()
        while self._batches:  # their requests were aborted
            wait([answer for _, answer in self._batches])
            self._resolve(self._end_batches())
        self._run_calls()  # one that came while the loop stopped has a caller that waits

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _take_ended(self) -> list[DiffusionOutput]:
        """Outputs of requests that ended without running; the next stage is told of them."""
        ended = self.scheduler.take_ended()
        for output in ended:
            self.executor.fail_kv(output.request_id, str(output.error))
        return ended

    def _resolve_ended(self) -> None:
        self._resolve(self._take_ended())

    def _resolve(self, outputs: Sequence[DiffusionOutput]) -> None:
        for output in outputs:
            with self._lock:
                future = self._futures.pop(output.request_id, None)
            if future is not None:
                future.set_result(output)

    def _check_alive(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        if self._dead is not None:
            raise EngineDeadError(f"{self._dead}: restart() first")


def _failed(scheduled: DiffusionSchedulerOutput, error: Exception) -> ModelRunnerOutput:
    """Build the output of a step whose executor raised: every request has failed."""
    failure = error
    if not isinstance(error, EngineError):
        failure = EngineDeadError(f"the executor failed: {error!r}")
        failure.__cause__ = error
    return ModelRunnerOutput.failed(scheduled.request_ids, failure)
