"""`GPUDiffusionWorker`: the device of a diffusion stage; runs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import OmniDiffusionConfig
from ..outputs import BatchRunnerOutput
from ..request import OmniDiffusionRequest
from .base import WorkerBase
from .gpu_diffusion_model_runner import GPUDiffusionModelRunner


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
