"""`StepScheduler`: schedules requests of a diffusion stage between denoising steps."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from omni_kvlink.engine.outputs import StepSchedulerOutput
from omni_kvlink.engine.sched.scheduler import RequestState, Scheduler, SyncScheduler

if TYPE_CHECKING:
    from omni_kvlink.engine.outputs import DiffusionSchedulerOutput, ModelRunnerOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest


class StepwiseScheduler(Scheduler):
    """Requests run together, one step after the other; each ends with its own last step."""

    def _can_start(self) -> bool:
        return len(self._running) < self.max_num_seqs

    def _has_work(self, *, start: bool) -> bool:
        return bool(self._running) or super()._has_work(start=start)

    def _ended_ids(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[str]:
        return model_output.req_ids


class StepScheduler(StepwiseScheduler, SyncScheduler):
    """First come, first served: requests join those that run, and leave them one by one.

    A request that is ready, see `SyncScheduler`, begins with the next step, if there is a place and
    its `step_key` is that of the requests that run. One with another key begins when those have
    ended; until then it holds up the ready requests behind it, so that none waits forever. An
    aborted request ends with the next step, which another one begins in its place.
    """

    def _active(self) -> list[RequestState]:
        return [state for state in self._running.values() if not state.aborted]

    def _can_start(self) -> bool:
        return len(self._active()) < self.max_num_seqs

    def _choose(self) -> list[RequestState]:
        active = self._active()
        ready = list(filter(self._is_ready, self._waiting.values()))
        keys = [state.request.step_key for state in [*active, *ready][:1]]
        free = ready[: self.max_num_seqs - len(active)]
        return list(takewhile(lambda state: state.request.step_key in keys, free))

    def _output(self, requests: list[OmniDiffusionRequest]) -> StepSchedulerOutput:
        new = {request.request_id for request in requests}
        cached = [key for key in self._running if key not in new]
        aborted = [key for key in cached if self._running[key].aborted]
        return StepSchedulerOutput(requests, cached_request_ids=cached, aborted_request_ids=aborted)
