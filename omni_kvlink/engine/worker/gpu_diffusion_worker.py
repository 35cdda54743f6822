"""`GPUDiffusionWorker`: the device of a diffusion stage; its model runner does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.worker.base import WorkerBase
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import GPUDiffusionModelRunner
from omni_kvlink.engine.worker.parallel_model_runner import ParallelDiffusionModelRunner
from omni_kvlink.engine.worker.step_model_runner import StepDiffusionModelRunner

if TYPE_CHECKING:
    from omni_kvlink.engine.config import OmniDiffusionConfig
    from omni_kvlink.engine.outputs import (
        BatchRunnerOutput,
        ModelRunnerOutput,
        StepSchedulerOutput,
    )
    from omni_kvlink.engine.request import OmniDiffusionRequest


class GPUDiffusionWorker(WorkerBase[GPUDiffusionModelRunner]):
    """The worker of a diffusion stage; see `WorkerBase`."""

    def __init__(self, local_rank: int, rank: int, od_config: OmniDiffusionConfig):
        super().__init__(local_rank, rank, od_config)
        self.od_config = od_config

    def execute_model(self, requests: list[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Pass requests that make one batch on to the runner; EngineAsleepError while asleep."""
        if self.model_runner is None or self.weights.level:
            raise self._unready_error()
        return self.model_runner.execute_model(requests)

    def execute_stepwise(self, scheduler_output: StepSchedulerOutput) -> ModelRunnerOutput:
        """Pass one denoising step on to the runner; EngineAsleepError while asleep."""
        if self.model_runner is None or self.weights.level:
            raise self._unready_error()
        if not isinstance(self.model_runner, StepDiffusionModelRunner):
            raise EngineError("this worker runs whole batches: set step_execution")
        return self.model_runner.execute_stepwise(scheduler_output)

    def _make_runner(self) -> GPUDiffusionModelRunner:
        if self.od_config.step_execution:
            return StepDiffusionModelRunner(self.od_config, self.device, self.process_group)
        if self.process_group.is_alone:
            return GPUDiffusionModelRunner(self.od_config, self.device)
        return ParallelDiffusionModelRunner(self.od_config, self.device, self.process_group)
