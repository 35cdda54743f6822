"""Workers own a device; their model runners own a model and run it."""

from __future__ import annotations

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig, StageConfig
from omni_kvlink.engine.worker.gpu_ar_model_runner import GPUARModelRunner as GPUARModelRunner
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker as GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import (
    GPUDiffusionModelRunner as GPUDiffusionModelRunner,
)
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker as GPUDiffusionWorker


def make_worker(
    config: StageConfig, local_rank: int, rank: int
) -> GPUARWorker | GPUDiffusionWorker:
    """The worker for a stage's kind."""
    if isinstance(config, OmniARConfig):
        return GPUARWorker(local_rank, rank, config)
    assert isinstance(config, OmniDiffusionConfig)
    return GPUDiffusionWorker(local_rank, rank, config)
