"""`EngineCore`: the loop schedule → execute → update, and a future for every request."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineDeadError, EngineError
from omni_kvlink.errors import ClosedError, KVLinkError, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.executor import Executor
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sched.scheduler import Scheduler

_STABLE = 0.25
"""Share of `max_wait` for which no request must arrive until a batch counts as complete."""
_IDLE = 60.0
"""Seconds after which an idle loop runs once; nothing depends on it."""


class EngineCore:
    """A scheduler, an executor, and the thread that drives them; thread-safe.

    Attributes:
        scheduler: decides what runs.
        executor: runs it.
    """

    scheduler: Scheduler
    executor: Executor

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: dict[str, Future[DiffusionOutput]] = {}
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._dead: EngineError | None = None
        self._closed = False

    def start(self, scheduler: Scheduler, executor: Executor, *, max_wait: float = 0.0) -> None:
        """Start the thread.

        Args:
            scheduler: decides what runs.
            executor: runs it.
            max_wait: seconds that a first request may wait for a full batch.
        """
        self.scheduler, self.executor, self._max_wait = scheduler, executor, max_wait
        self._dead = None
        scheduler.listen(self._resolve_ended)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: OmniDiffusionRequest) -> Future[DiffusionOutput]:
        """Queue a request; its future has the output, which may hold the request's error.

        Raises:
            EngineError: this id is in use.
            EngineDeadError: a worker is gone: `restart` first.
            ClosedError: the engine is closed.
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
        """Run one batch, if one is ready; returns the outputs of all requests that have ended.

        Raises no request's error: each is in its output. If the workers are gone, that is the error
        of all requests that ran.
        """
        if self._max_wait:
            stable = self._max_wait * _STABLE
            self.scheduler.wait_for_batch(timeout=self._max_wait, stable=stable)
        scheduled = self.scheduler.schedule()
        ended = self._take_ended()
        if scheduled.is_empty:
            return ended
        try:
            results = self.executor.execute_model(scheduled)
        except EngineError as error:
            return ended + self.scheduler.fail_running(error)
        except Exception as error:
            failure = EngineDeadError(f"the executor failed: {error!r}")
            failure.__cause__ = error
            return ended + self.scheduler.fail_running(failure)
        return ended + self.scheduler.update_from_output(scheduled, results)

    def abort(self, request_id: str) -> None:
        """End a request, whether it waits or runs; unknown ids are ignored."""
        if self.scheduler.abort_request(request_id):
            self.executor.abort(request_id)
        self._resolve_ended()

    def call(self, call: Callable[[], Any], *, timeout: float) -> Any:
        """Run a call in the engine's thread, between two batches; returns what it returns.

        Raises:
            TransferTimeout: a batch runs for more than `timeout` seconds.
            EngineDeadError, ClosedError: as `submit`.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._check_alive()
            self._calls.append((call, answer))
        self.scheduler.wake()
        if not wait([answer], timeout).done:
            raise TransferTimeout(f"the engine is busy since {timeout:g} s", waited=timeout)
        return answer.result()

    def fail(self, error: KVLinkError) -> None:
        """End all requests with an error; a future is resolved once."""
        self._resolve(self.scheduler.fail_all(error))

    # In the engine's thread.

    def _run(self) -> None:
        scheduler = self.scheduler
        while not scheduler.is_stopped:
            self._run_calls()
            if scheduler.wait(timeout=_IDLE):
                self._resolve(self.step())
        self._run_calls()

    def _run_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call, answer in calls:
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: PERF203 - each call has its own error
                answer.set_exception(error)

    # In any thread.

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
