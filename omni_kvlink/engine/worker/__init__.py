"""Workers have a device and nothing else; runners have a model and run it."""

from .gpu_ar_model_runner import GPUARModelRunner as GPUARModelRunner
from .gpu_ar_worker import GPUARWorker as GPUARWorker
from .gpu_diffusion_model_runner import GPUDiffusionModelRunner as GPUDiffusionModelRunner
from .gpu_diffusion_worker import GPUDiffusionWorker as GPUDiffusionWorker
