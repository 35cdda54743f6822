"""Workers own a device; their model runners own a model and run it."""

from __future__ import annotations

from typing import Any

from omni_kvlink.engine.config import OmniARConfig, StageConfig, load_class
from omni_kvlink.engine.worker.base import WorkerBase as WorkerBase
from omni_kvlink.engine.worker.gpu_ar_model_runner import GPUARModelRunner as GPUARModelRunner
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker as GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import (
    GPUDiffusionModelRunner as GPUDiffusionModelRunner,
)
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker as GPUDiffusionWorker

_WORKERS = {
    "ar": "omni_kvlink.engine.worker.gpu_ar_worker:GPUARWorker",
    "diffusion": "omni_kvlink.engine.worker.gpu_diffusion_worker:GPUDiffusionWorker",
}


def worker_class(config: StageConfig) -> type[WorkerBase[Any]]:
    """The worker class that a configuration names, or that of the stage's kind.

    Raises ValueError if it is no `WorkerBase` or one of the other kind, ImportError if there is no
    such module, and AttributeError if that has no such class.
    """
    kind = "ar" if isinstance(config, OmniARConfig) else "diffusion"
    other, its_stage = (
        (GPUDiffusionWorker, "a diffusion") if kind == "ar" else (GPUARWorker, "an AR")
    )
    named_class = load_class("worker", config.worker_cls or kind, _WORKERS)
    if not (isinstance(named_class, type) and issubclass(named_class, WorkerBase)):
        raise ValueError(f"worker_cls {config.worker_cls} is no WorkerBase")
    if issubclass(named_class, other):
        raise ValueError(f"worker_cls {config.worker_cls} is the worker of {its_stage} stage")
    return named_class


def make_worker(config: StageConfig, local_rank: int, rank: int) -> WorkerBase[Any]:
    """A rank's worker; raises as `worker_class`."""
    return worker_class(config)(local_rank, rank, config)
