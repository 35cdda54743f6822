"""`GPUDiffusionWorker`: the device of a diffusion stage; runs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.outputs import BatchRunnerOutput
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.worker.base import WorkerBase
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import GPUDiffusionModelRunner


class GPUDiffusionWorker(WorkerBase[GPUDiffusionModelRunner]):
    """Infrastructure of one rank; see `WorkerBase`."""

    def __init__(self, local_rank: int, rank: int, od_config: OmniDiffusionConfig):
        super().__init__(local_rank, rank, od_config)
        self.od_config = od_config

    def execute_model(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Passes through to the runner.

        Raises:
            EngineAsleepError: wake up first.
        """
        self.check_awake()
        return self.runner.execute_model(requests)

    def _make_runner(self) -> GPUDiffusionModelRunner:
        return GPUDiffusionModelRunner(self.od_config, self.device, self.mates)
