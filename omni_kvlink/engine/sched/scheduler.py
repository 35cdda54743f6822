"""What schedulers have in common: requests that wait, run and end; thread-safe."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from omni_kvlink.engine.errors import EngineError, RequestAborted
from omni_kvlink.engine.outputs import DiffusionOutput, DiffusionSchedulerOutput, ModelRunnerOutput
from omni_kvlink.engine.request import OmniDiffusionRequest, always, never
from omni_kvlink.errors import KVLinkError


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request on its way through a scheduler.

    Attributes:
        queued_at, ready_at, started_at: on `time.monotonic`'s clock; 0 until then.
        aborted: it runs still, and its result will not be wanted.
    """

    request: OmniDiffusionRequest
    queued_at: float
    ready_at: float = 0.0
    started_at: float = 0.0
    aborted: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Scheduler(ABC):
    """Decides which requests run next. Requests and aborts come from any thread, steps from one.

    Args:
        max_num_seqs: requests that may run at once.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self._changed = threading.Condition()
        self._waiting: dict[str, RequestState] = {}  # in the order of their coming
        self._running: dict[str, RequestState] = {}
        self._ended: list[DiffusionOutput] = []
        self._listeners: list[Callable[[], None]] = []
        self._is_stopped = self._is_woken = False
        self._steps = 0

    # Asked.

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stats(self) -> dict[str, Any]:
        """Queues and steps, as JSON values."""
        with self._changed:
            return {
                "waiting": len(self._waiting),
                "running": len(self._running),
                "steps": self._steps,
            }

    # Told.

    def add_request(self, request: OmniDiffusionRequest) -> None:
        """Put a request behind those that wait.

        Raises:
            EngineError: one of this id waits or runs already, or the engine stops.
        """
        with self._changed:
            if self._is_stopped:
                raise EngineError("the engine stops: no request can be added")
            key = request.request_id
            if key in self._waiting or key in self._running:
                raise EngineError(f"request {key!r} waits or runs already: choose another id")
            self._waiting[key] = RequestState(request, time.monotonic())
            self._on_waiting()
            self._changed.notify_all()

    def abort_request(self, request_id: str) -> bool:
        """End a request: one that waits at once, one that runs as soon as it can.

        Returns:
            Whether it runs, so that its executor should be told.
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
            state.request.is_cancelled = always  # for whoever runs it, and has not begun
            return True

    def schedule(self) -> DiffusionSchedulerOutput:
        """What is to run now; empty if nothing can."""
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
        """The results of what was scheduled; its memory goes back."""
        with self._changed:
            finished = [
                self._finish(request_id, self._result(request_id, model_output))
                for request_id in scheduler_output.request_ids
                if request_id in self._running  # else a failure ended it meanwhile
            ]
            self._on_waiting()  # there is room again
            return finished

    def fail_running(self, error: KVLinkError) -> list[DiffusionOutput]:
        """End all that runs: nothing will come of it."""
        with self._changed:
            finished = [
                self._finish(request_id, DiffusionOutput(request_id, error=error))
                for request_id in list(self._running)
            ]
            self._on_waiting()
            return finished

    def fail_all(self, error: KVLinkError) -> list[DiffusionOutput]:
        """End everything."""
        with self._changed:
            for state in list(self._waiting.values()):
                del self._waiting[state.request_id]
                self._end(state, error)
            return self.take_ended() + self.fail_running(error)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when requests may have ended while others run."""
        self._listeners.append(callback)

    def take_ended(self) -> list[DiffusionOutput]:
        """Requests that ended without running."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def wait(self, *, timeout: float) -> bool:
        """Sleep until there may be something to do; False if `timeout` seconds brought nothing."""
        limit = time.monotonic() + timeout
        with self._changed:
            while not (self._is_stopped or self._is_woken or self._has_work()):
                now, deadline = time.monotonic(), self._next_deadline()
                if deadline is not None and deadline <= now:
                    return True
                end = limit if deadline is None else min(limit, deadline)
                if now >= limit:
                    return False
                self._changed.wait(end - now)
            self._is_woken = False
            return True

    def wait_for_companions(self, *, timeout: float, stable: float) -> None:
        """Where a request could run, sleep while more keep coming: at most `timeout` seconds.

        Ends at capacity, when none came for `stable` seconds, or when the engine stops.
        """
        limit = time.monotonic() + timeout
        with self._changed:
            ready, end = self._num_ready(), time.monotonic() + stable
            while 0 < ready < self.max_num_seqs and not self._is_stopped:
                now = time.monotonic()
                if now >= min(end, limit):
                    return
                self._changed.wait(min(end, limit) - now)
                if self._num_ready() != ready:
                    ready, end = self._num_ready(), time.monotonic() + stable

    def wake(self) -> None:
        """Let `wait` return: there is something to do besides requests."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no more requests, and wake who waits."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    # For subclasses; the lock is held.

    @abstractmethod
    def _choose(self) -> list[RequestState]:
        """Of those that wait, those that run next."""

    @abstractmethod
    def _on_waiting(self) -> None:
        """Requests wait: what can be begun for them is begun."""

    @abstractmethod
    def _release(self, request: OmniDiffusionRequest) -> None:
        """A request ended: what it held is given back."""

    def _num_ready(self) -> int:
        """How many could run now, were there nothing to hinder them."""
        return len(self._waiting)

    def _next_deadline(self) -> float | None:
        """When something happens of itself, on `time.monotonic`'s clock."""
        return None

    def _has_work(self) -> bool:
        return bool(self._ended) or self._num_ready() > 0

    def _output(self, requests: list[OmniDiffusionRequest]) -> DiffusionSchedulerOutput:
        return DiffusionSchedulerOutput(requests, self._steps, len(self._waiting))

    def _end(self, state: RequestState, error: Exception) -> None:
        """A request that has not run ends."""
        self._release(state.request)
        output = DiffusionOutput(state.request_id, error=error)
        output.seconds["queued"] = time.monotonic() - state.queued_at
        self._ended.append(output)
        self._changed.notify_all()

    def _finish(self, request_id: str, output: DiffusionOutput) -> DiffusionOutput:
        """A request that ran has ended."""
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

    def _result(self, request_id: str, model_output: ModelRunnerOutput) -> DiffusionOutput:
        try:
            return model_output.result_of(request_id)
        except EngineError as error:
            return DiffusionOutput(request_id, error=error)


def compatible(states: Sequence[RequestState], limit: int) -> list[RequestState]:
    """The first states that fit into one batch.

    In their order, up to the first that does not fit: nobody overtakes it.
    """
    chosen: list[RequestState] = []
    for state in states:
        if len(chosen) == limit or (chosen and state.request.key != chosen[0].request.key):
            break
        chosen.append(state)
    return chosen
