"""Workers own a device; their model runners own a model and run it."""

from omni_kvlink.engine.worker.gpu_ar_model_runner import GPUARModelRunner as GPUARModelRunner
from omni_kvlink.engine.worker.gpu_ar_worker import GPUARWorker as GPUARWorker
from omni_kvlink.engine.worker.gpu_diffusion_model_runner import (
    GPUDiffusionModelRunner as GPUDiffusionModelRunner,
)
from omni_kvlink.engine.worker.gpu_diffusion_worker import GPUDiffusionWorker as GPUDiffusionWorker
