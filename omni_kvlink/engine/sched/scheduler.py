"""`Scheduler`: the queues that all schedulers share; thread-safe."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError, RequestAborted
from omni_kvlink.engine.outputs import DiffusionOutput, DiffusionSchedulerOutput, ModelRunnerOutput
from omni_kvlink.engine.request import OmniDiffusionRequest, always, never

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.errors import KVLinkError


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request in a scheduler.

    Attributes:
        request: the request.
        queued_at, ready_at, started_at: monotonic seconds; 0 until then.
        aborted: it is still running, and its output will be replaced by RequestAborted.
    """

    request: OmniDiffusionRequest
    queued_at: float
    ready_at: float = 0.0
    started_at: float = 0.0
    aborted: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id


class Scheduler(ABC):
    """Decides which requests run next.

    Requests and aborts may come from any thread; `schedule` and `update_from_output` are called by
    the engine's thread alone.

    Args:
        max_num_seqs: how many requests may run at once.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self._changed = threading.Condition()
        self._waiting: dict[str, RequestState] = {}  # in order of arrival
        self._running: dict[str, RequestState] = {}
        self._ended: list[DiffusionOutput] = []
        self._listeners: list[Callable[[], None]] = []
        self.is_stopped = self._is_woken = False
        self._steps = 0

    # One step: schedule, then update_from_output.

    def schedule(self) -> DiffusionSchedulerOutput:
        """Move the requests that run next from waiting to running; empty if none can run."""
        with self._changed:
            self._on_waiting()
            chosen = [] if self._running else self._choose()
            for state in chosen:
                del self._waiting[state.request_id]
                self._running[state.request_id] = state
                state.started_at = time.monotonic()
            self._steps += bool(chosen)
            return self._output([state.request for state in chosen])

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[DiffusionOutput]:
        """End the requests of a step: returns their outputs, and releases what they held."""
        with self._changed:
            finished = [
                self._finish(request_id, _result(request_id, model_output))
                for request_id in scheduler_output.request_ids
                if request_id in self._running  # else a failure has ended it meanwhile
            ]
            self._on_waiting()  # memory is free again
            return finished

    def fail_running(self, error: KVLinkError) -> list[DiffusionOutput]:
        """End all running requests with an error."""
        with self._changed:
            finished = [
                self._finish(request_id, DiffusionOutput(request_id, error=error))
                for request_id in list(self._running)
            ]
            self._on_waiting()
            return finished

    # From any thread.

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self._running)

    def add_request(self, request: OmniDiffusionRequest) -> None:
        """Append a request to the queue.

        Raises:
            EngineError: one of this id waits or runs already, or the engine stops.
        """
        with self._changed:
            if self.is_stopped:
                raise EngineError("the engine stops: no request can be added")
            key = request.request_id
            if key in self._waiting or key in self._running:
                raise EngineError(f"request {key!r} waits or runs already: choose another id")
            self._waiting[key] = RequestState(request, time.monotonic())
            self._on_waiting()
            self._changed.notify_all()

    def abort_request(self, request_id: str) -> bool:
        """End a request: one that waits at once, one that runs as soon as its executor can.

        Returns:
            Whether it is running, so that its executor is to abort it.
        """
        with self._changed:
            state = self._waiting.pop(request_id, None)
            if state is not None:
                self._end(state, RequestAborted(f"request {request_id!r} was aborted, waiting"))
                self._on_waiting()
                return False
            state = self._running.get(request_id)
            if state is None:
                return False
            state.aborted = True
            state.request.is_cancelled = always  # for a runner that has not begun it
            return True

    def fail_all(self, error: KVLinkError) -> list[DiffusionOutput]:
        """End all requests with an error."""
        with self._changed:
            for state in list(self._waiting.values()):
                del self._waiting[state.request_id]
                self._end(state, error)
            return self.take_ended() + self.fail_running(error)

    def take_ended(self) -> list[DiffusionOutput]:
        """The outputs of requests that ended without running, since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def stats(self) -> dict[str, Any]:
        """Queue lengths and the number of steps, as JSON values."""
        with self._changed:
            waiting, running = len(self._waiting), len(self._running)
            return {"waiting": waiting, "running": running, "steps": self._steps}

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when requests may have ended without running."""
        self._listeners.append(callback)

    def wait(self, *, timeout: float) -> bool:
        """Block until there may be something to do; False after `timeout` seconds."""
        limit = time.monotonic() + timeout
        with self._changed:
            while not (self.is_stopped or self._is_woken or self._has_work()):
                now, deadline = time.monotonic(), self._next_deadline()
                if deadline is not None and deadline <= now:
                    return True
                if now >= limit:
                    return False
                self._changed.wait(min(limit, deadline or limit) - now)
            self._is_woken = False
            return True

    def wait_for_batch(self, *, timeout: float, stable: float) -> None:
        """If a request can run, block while more arrive, for at most `timeout` seconds.

        Returns when a batch is full, when none arrived for `stable` seconds, or when the engine
        stops.
        """
        limit = time.monotonic() + timeout
        with self._changed:
            ready, end = self._num_ready(), time.monotonic() + stable
            while 0 < ready < self.max_num_seqs and not self.is_stopped:
                now = time.monotonic()
                if now >= min(end, limit):
                    return
                self._changed.wait(min(end, limit) - now)
                if self._num_ready() != ready:
                    ready, end = self._num_ready(), time.monotonic() + stable

    def wake(self) -> None:
        """Let `wait` return."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Refuse further requests, and let every wait return."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    # For subclasses; the lock is held.

    @abstractmethod
    def _choose(self) -> list[RequestState]:
        """The waiting requests that run next."""

    @abstractmethod
    def _on_waiting(self) -> None:
        """Begin what can be begun for waiting requests; called whenever that may have changed."""

    @abstractmethod
    def _release(self, request: OmniDiffusionRequest) -> None:
        """Release what a request that has ended held."""

    def _num_ready(self) -> int:
        """How many waiting requests could run now."""
        return len(self._waiting)

    def _next_deadline(self) -> float | None:
        """When `wait` is to return by itself, in monotonic seconds."""
        return None

    def _has_work(self) -> bool:
        return bool(self._ended) or self._num_ready() > 0

    def _output(self, requests: list[OmniDiffusionRequest]) -> DiffusionSchedulerOutput:
        return DiffusionSchedulerOutput(requests)

    def _end(self, state: RequestState, error: Exception) -> None:
        """End a request that has not run."""
        self._release(state.request)
        output = DiffusionOutput(state.request_id, error=error)
        output.seconds["queued"] = time.monotonic() - state.queued_at
        self._ended.append(output)
        self._changed.notify_all()

    def _finish(self, request_id: str, output: DiffusionOutput) -> DiffusionOutput:
        """End a request that has run."""
        state = self._running.pop(request_id)
        state.request.is_cancelled = never
        self._release(state.request)
        if state.aborted and not isinstance(output.error, RequestAborted):
            error = RequestAborted(f"request {request_id!r} was aborted while it ran")
            output = DiffusionOutput(request_id, error=error)
        if state.ready_at:
            output.seconds["kv_wait"] = state.ready_at - state.queued_at
        output.seconds["queued"] = state.started_at - state.queued_at
        return output


def _result(request_id: str, model_output: ModelRunnerOutput) -> DiffusionOutput:
    try:
        return model_output.result_of(request_id)
    except EngineError as error:
        return DiffusionOutput(request_id, error=error)
