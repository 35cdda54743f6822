"""`Scheduler`: the queues of every scheduler; `SyncScheduler`: a diffusion stage's."""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError, RequestAborted
from omni_kvlink.engine.kv.kv_state import KVState
from omni_kvlink.engine.outputs import DiffusionOutput, DiffusionSchedulerOutput, ModelRunnerOutput
from omni_kvlink.engine.request import OmniDiffusionRequest, not_cancelled
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.kv.kv_manager import KVManager


_MAX_TRANSFERRED_REQUESTS = 1024  # remembered until someone asks which were sent


@dataclasses.dataclass(eq=False)
class RequestState:
    """A request in a scheduler, and the times of its progress, in monotonic seconds or 0."""

    request: OmniDiffusionRequest
    queued_at: float
    ready_at: float = 0.0
    started_at: float = 0.0
    aborted: bool = False
    batch: int = 0  # the number of its batch

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id


class Scheduler(ABC):
    """Decides which requests run next, at most `max_num_seqs` at once; thread-safe.

    `max_num_running_reqs` is the same number by the name that vLLM-Omni's scheduler has for it.

    `schedule`, `update_from_output` and the waits are called by the engine's thread alone.
    """

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs = self.max_num_running_reqs = max_num_seqs
        self.max_concurrent_batches = 1
        self._changed = threading.Condition()
        self._waiting: dict[str, RequestState] = {}  # in order of arrival
        self._running: dict[str, RequestState] = {}
        self._ended: list[DiffusionOutput] = []
        self._transferred: deque[OmniDiffusionRequest] = deque(maxlen=_MAX_TRANSFERRED_REQUESTS)
        self._listeners: list[Callable[[], None]] = []
        self.is_stopped = self._is_woken = False
        self._steps = 0

    def schedule(self, *, start: bool = True) -> DiffusionSchedulerOutput:
        """Move the requests that run next from waiting to running; empty if none can run.

        With `start=False` no request begins, and those that run go on.
        """
        with self._changed:
            self._on_waiting()
            chosen = self._choose() if start and self._can_start() else []
            for state in chosen:
                self._running[state.request_id] = self._waiting.pop(state.request_id)
                state.started_at, state.batch = time.monotonic(), self._steps
            output = self._output([state.request for state in chosen])
            self._steps += not output.is_empty
            return output

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[DiffusionOutput]:
        """End the requests of a step: returns their outputs, and releases what they held."""
        with self._changed:  # a failure may have ended some of them meanwhile
            ids = self._ended_ids(scheduler_output, model_output)
            ids = [request_id for request_id in ids if request_id in self._running]
            return self._finish([model_output.result_of(request_id) for request_id in ids])

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait to run."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    def add_request(self, request: OmniDiffusionRequest) -> None:
        """Append a request to the queue; raises EngineError if its id is there or it stops."""
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
        """End a waiting request; True if it runs instead, so that its executor is to abort it."""
        with self._changed:
            if waiting := self._waiting.get(request_id):
                self._end(waiting, RequestAborted(f"request {request_id!r} was aborted, waiting"))
                self._on_waiting()
            if running := self._running.get(request_id):
                running.aborted = True
                running.request.is_cancelled = lambda: True  # for a runner that has not begun it
            return running is not None

    def fail_all(self, error: KVLinkError) -> list[DiffusionOutput]:
        """End all requests with an error."""
        with self._changed:
            for state in list(self._waiting.values()):
                self._end(state, error)
            return self.take_ended() + self._finish(
                [DiffusionOutput(key, error=error) for key in self._running]
            )

    def take_ended(self) -> list[DiffusionOutput]:
        """The outputs of requests that ended without running, since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def get_finished_requests_needing_kv_transfer(self) -> list[OmniDiffusionRequest]:
        """Requests whose KV was sent since the last call; the last 1,024 of them."""
        with self._changed:
            transferred = list(self._transferred)
            self._transferred.clear()
            return transferred

    def stats(self) -> dict[str, Any]:
        """Queue lengths and the number of steps, as JSON values."""
        with self._changed:
            waiting, running = len(self._waiting), len(self._running)
            return {"waiting": waiting, "running": running, "steps": self._steps}

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when requests may have ended without running."""
        self._listeners.append(callback)

    def wait(self, *, timeout: float, start: bool = True) -> bool:
        """Block until there may be something to do; False after `timeout` seconds.

        With `start=False` requests that wait are nothing to do.
        """
        with self._changed:
            has_work = self._changed.wait_for(lambda: self._has_work(start=start), timeout)
            self._is_woken = False
            return has_work

    def wait_for_batch(self, *, timeout: float, stable: float) -> None:
        """Block while requests arrive each `stable` seconds, until a batch is full or it stops."""
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
        self.is_stopped = True
        self.wake()

    # The lock is held.

    @abstractmethod
    def _choose(self) -> list[RequestState]:
        """The waiting requests that run next."""

    @abstractmethod
    def _release(self, request: OmniDiffusionRequest) -> None:
        """Release what a request that has ended held."""

    def _on_waiting(self) -> None:  # noqa: B027
        """Begin what can be begun for waiting requests; called whenever that may have changed."""

    def _can_start(self) -> bool:
        return len({state.batch for state in self._running.values()}) < self.max_concurrent_batches

    def _ended_ids(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[str]:
        """The requests that end with a step: all of it, if a step is a whole batch."""
        return scheduler_output.request_ids

    def _is_ready(self, state: RequestState) -> bool:
        return True

    def _num_ready(self) -> int:
        return sum(map(self._is_ready, self._waiting.values()))

    def _has_work(self, *, start: bool) -> bool:
        if self.is_stopped or self._is_woken or self._ended:
            return True
        return start and self._can_start() and self._num_ready() > 0

    def _output(self, requests: list[OmniDiffusionRequest]) -> DiffusionSchedulerOutput:
        return DiffusionSchedulerOutput(requests)

    def _end(self, state: RequestState, error: Exception) -> None:
        """End a request that waits."""
        del self._waiting[state.request_id]
        self._release(state.request)
        seconds = {"queued": time.monotonic() - state.queued_at}
        self._ended.append(DiffusionOutput(state.request_id, error=error, seconds=seconds))
        self._changed.notify_all()

    def _finish(self, outputs: list[DiffusionOutput]) -> list[DiffusionOutput]:
        """End requests that have run; an aborted one in RequestAborted, whatever its output."""
        for index, output in enumerate(outputs):
            state = self._running.pop(output.request_id)
            state.request.is_cancelled = not_cancelled
            self._release(state.request)
            if state.aborted and not isinstance(output.error, RequestAborted):
                error = RequestAborted(f"request {state.request_id!r} was aborted while it ran")
                outputs[index] = output = DiffusionOutput(state.request_id, error=error)
            if state.ready_at:
                output.seconds["kv_wait"] = state.ready_at - state.queued_at
            output.seconds["queued"] = state.started_at - state.queued_at
            if state.request.need_kv_transfer and output.error is None:
                self._transferred.append(state.request)
        self._on_waiting()  # memory is free again
        return outputs


class SyncScheduler(Scheduler):
    """First come, first served, in batches of requests with one `SamplingParamsKey`.

    A request is ready once its KV has come; requests behind it do not wait for that. Among ready
    requests order is kept: one that does not fit into the batch holds up those behind it. Without
    a KV manager no KV comes from another stage.
    """

    def __init__(self, config: OmniDiffusionConfig, kv_manager: KVManager[Any] | None = None):
        super().__init__(config.max_num_seqs)
        self.kv_manager = kv_manager
        self._prefetch = config.kv.prefetch
        if kv_manager is not None:
            kv_manager.listen(self._on_kv)

    def stats(self) -> dict[str, Any]:
        """Queue lengths, the number of steps, and the KV manager's."""
        kv = {} if self.kv_manager is None else {"kv": self.kv_manager.stats()}
        return {**super().stats(), **kv}

    def _on_kv(self) -> None:
        """Called in any thread, without the lock, when a receive has ended."""
        with self._changed:
            self._on_waiting()
            self._changed.notify_all()
        for callback in self._listeners:
            callback()

    def _choose(self) -> list[RequestState]:
        ready = list(filter(self._is_ready, self._waiting.values()))[: self.max_num_seqs]
        return list(takewhile(lambda state: state.request.key == ready[0].request.key, ready))

    def _on_waiting(self) -> None:
        """End requests whose KV did not come; receive for the others in order, within budget."""
        kv = self.kv_manager
        for state in [state for state in self._waiting.values() if state.request.need_kv_receive]:
            if kv is None:
                self._end(state, EngineError("this stage has no KV source: set kv.sources"))
            elif kv.state(state.request_id) is KVState.FAILED:
                self._end(state, kv.error(state.request_id) or EngineError("its KV was lost"))
            elif self._is_ready(state):
                state.ready_at = state.ready_at or time.monotonic()
        if kv is not None:
            self._begin_receives(kv)

    def _begin_receives(self, kv: KVManager[Any]) -> None:
        def is_held(request_id: str) -> bool:
            return kv.state(request_id) is not KVState.ABSENT

        request_ids, states = [*self._waiting, *self._running], list(self._waiting.values())
        if not self._prefetch:  # only for the next batch, and while nothing runs
            states = [] if self._running else states[: self.max_num_seqs]
        for state in states:
            if not state.request.need_kv_receive or is_held(state.request_id):
                continue
            try:
                if not kv.can_allocate(state.request) and any(map(is_held, request_ids)):
                    return  # no request behind it takes the memory that it waits for
                kv.allocate(state.request)
                kv.prefetch(state.request)
            except KVLinkError as error:  # such as: more than the whole budget
                self._end(state, error)

    def _is_ready(self, state: RequestState) -> bool:
        kv, request = self.kv_manager, state.request
        has_come = kv is not None and kv.state(request.request_id) is KVState.READY
        return has_come or not request.need_kv_receive

    def _release(self, request: OmniDiffusionRequest) -> None:
        if self.kv_manager is not None:
            self.kv_manager.free(request)
