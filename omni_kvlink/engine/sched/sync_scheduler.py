"""`SyncScheduler`: schedules whole diffusion requests, each once its KV has come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_entry import KVState
from omni_kvlink.engine.sched.scheduler import RequestState, Scheduler
from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.kv.interface import KVManager
    from omni_kvlink.engine.outputs import DiffusionOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest


class SyncScheduler(Scheduler):
    """First come, first served, in batches of requests with one `SamplingParamsKey`.

    A request is ready once its KV has come; requests behind it do not wait for that. Among ready
    requests order is kept: one that does not fit into the batch holds up those behind it.

    Args:
        config: of the stage.
        kv_manager: the executor's; None if no KV comes from another stage.
    """

    def __init__(self, config: OmniDiffusionConfig, kv_manager: KVManager | None = None):
        super().__init__(config.max_num_seqs)
        self.kv_manager = kv_manager
        self._prefetch = config.kv.prefetch
        self._transferred: list[OmniDiffusionRequest] = []
        if kv_manager is not None:
            kv_manager.listen(self._on_kv)

    def get_finished_requests_needing_kv_transfer(self) -> list[OmniDiffusionRequest]:
        """Requests whose KV was sent to the next stage, since the last call."""
        with self._changed:
            transferred, self._transferred = self._transferred, []
            return transferred

    def stats(self) -> dict[str, Any]:
        """Queue lengths, the number of steps, and the KV manager's."""
        kv = {} if self.kv_manager is None else {"kv": self.kv_manager.stats()}
        return {**super().stats(), **kv}

    def _on_kv(self) -> None:
        """Called in any thread when a receive has ended."""
        with self._changed:
            self._on_waiting()
            self._changed.notify_all()
        for callback in self._listeners:
            callback()

    def _choose(self) -> list[RequestState]:
        chosen: list[RequestState] = []
        for state in self._waiting.values():
            if not self._is_ready(state):
                continue
            full = len(chosen) == self.max_num_seqs
            if full or (chosen and state.request.key != chosen[0].request.key):
                break
            chosen.append(state)
        return chosen

    def _on_waiting(self) -> None:
        """End requests whose KV did not come; receive for the others in order, within budget."""
        kv = self.kv_manager
        for state in [one for one in self._waiting.values() if one.request.need_kv_receive]:
            if kv is None:
                self._fail(state, EngineError("this stage has no KV source: set kv.sources"))
            elif kv.state(state.request_id) is KVState.FAILED:
                self._fail(state, kv.error(state.request_id) or EngineError("its KV was lost"))
            elif kv.state(state.request_id) is KVState.READY and not state.ready_at:
                state.ready_at = time.monotonic()
        if kv is not None:
            self._begin_receives(kv)

    def _begin_receives(self, kv: KVManager) -> None:
        states = list(self._waiting.values())
        if not self._prefetch:  # only for the next batch, and while nothing runs
            states = [] if self._running else states[: self.max_num_seqs]
        for state in states:
            is_absent = kv.state(state.request_id) is KVState.ABSENT
            if not (state.request.need_kv_receive and is_absent):
                continue
            try:
                if not kv.can_allocate(state.request) and self._holds_any(kv):
                    return  # no request behind it takes the memory that it waits for
                kv.allocate(state.request)
                kv.prefetch(state.request)
            except KVLinkError as error:  # such as: more than the whole budget
                self._fail(state, error)

    def _holds_any(self, kv: KVManager) -> bool:
        known = [*self._waiting, *self._running]
        return any(kv.state(request_id) is not KVState.ABSENT for request_id in known)

    def _fail(self, state: RequestState, error: Exception) -> None:
        del self._waiting[state.request_id]
        self._end(state, error)

    def _is_ready(self, state: RequestState) -> bool:
        if not state.request.need_kv_receive:
            return True
        kv = self.kv_manager
        return kv is not None and kv.state(state.request_id) is KVState.READY

    def _num_ready(self) -> int:
        return sum(self._is_ready(state) for state in self._waiting.values())

    def _next_deadline(self) -> float | None:
        return None if self.kv_manager is None else self.kv_manager.next_deadline()

    def _release(self, request: OmniDiffusionRequest) -> None:
        if self.kv_manager is not None:
            self.kv_manager.free(request)

    def _finish(self, request_id: str, output: DiffusionOutput) -> DiffusionOutput:
        request = self._running[request_id].request
        finished = super()._finish(request_id, output)
        if request.need_kv_transfer and finished.error is None:
            self._transferred.append(request)
        return finished
