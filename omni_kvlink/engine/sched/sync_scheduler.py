"""`SyncScheduler`: which requests a diffusion stage paints next, and their KV before they run."""

from __future__ import annotations

import time
from typing import Any

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.kv_entry import KVState
from omni_kvlink.engine.kv.kv_manager import KVManager
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sched.scheduler import RequestState, Scheduler, compatible
from omni_kvlink.errors import KVLinkError


class SyncScheduler(Scheduler):
    """First come, first served, in batches of requests that fit together.

    A request is in the queue once its KV is there; until then nobody waits behind it. Of those
    whose KV is there, an incompatible one at the head holds up the compatible ones behind it.

    Args:
        kv_manager: owned; what the executor has. None where requests bring all they need.
    """

    def __init__(self, config: OmniDiffusionConfig, kv_manager: KVManager | None = None):
        super().__init__(config.max_num_seqs)
        self.kv_manager = kv_manager
        self._prefetch = config.kv.prefetch
        self._handed_on: list[OmniDiffusionRequest] = []
        if kv_manager is not None:
            kv_manager.listen(self._on_kv)

    def get_finished_requests_needing_kv_transfer(self) -> list[OmniDiffusionRequest]:
        """Requests that ran, and whose KV now waits for the next stage; each is named once."""
        with self._changed:
            handed_on, self._handed_on = self._handed_on, []
            return handed_on

    def stats(self) -> dict[str, Any]:
        kv = {} if self.kv_manager is None else {"kv": self.kv_manager.stats()}
        return {**super().stats(), **kv}

    def _on_kv(self) -> None:
        """A receive is over, in whichever thread."""
        with self._changed:
            self._on_waiting()
            self._changed.notify_all()
        for callback in self._listeners:
            callback()

    def _choose(self) -> list[RequestState]:
        ready = [state for state in self._waiting.values() if self._is_ready(state)]
        return compatible(ready, self.max_num_seqs)

    def _on_waiting(self) -> None:
        """End those whose KV did not come; receive for the others in order, as room allows."""
        kv = self.kv_manager
        states = [state for state in self._waiting.values() if state.request.need_kv_receive]
        for state in states:
            if kv is None:
                self._drop(state, EngineError("this stage has no KV source: set kv.sources"))
            elif kv.state(state.request_id) is KVState.FAILED:
                self._drop(state, kv.error(state.request_id))
            elif kv.state(state.request_id) is KVState.READY and not state.ready_at:
                state.ready_at = time.monotonic()
        if kv is not None:
            self._begin_receives(kv)

    def _begin_receives(self, kv: KVManager) -> None:
        for state in self._to_receive(kv):
            try:
                if not kv.can_allocate(state.request) and self._holds_any(kv):
                    return  # nobody behind it takes the room that it waits for
                kv.allocate(state.request)
                kv.prefetch(state.request)
            except KVLinkError as error:  # such as: more than all the room there is
                self._drop(state, error)

    def _to_receive(self, kv: KVManager) -> list[RequestState]:
        """Without prefetching, only what could run next, and nothing while something runs."""
        states = list(self._waiting.values())
        if not self._prefetch:
            states = [] if self._running else states[: self.max_num_seqs]
        return [
            state
            for state in states
            if state.request.need_kv_receive and kv.state(state.request_id) is KVState.ABSENT
        ]

    def _holds_any(self, kv: KVManager) -> bool:
        known = [*self._waiting, *self._running]
        return any(kv.state(request_id) is not KVState.ABSENT for request_id in known)

    def _drop(self, state: RequestState, error: Exception | None) -> None:
        del self._waiting[state.request_id]
        self._end(state, error or EngineError("its KV was lost"))

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
            self._handed_on.append(request)
        return finished
