"""`StepwiseScheduler`: the common part of schedulers whose requests run step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from omni_kvlink.engine.outputs import DiffusionSchedulerOutput, ModelRunnerOutput


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
