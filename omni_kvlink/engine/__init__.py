"""The reference engine: schedulers, a KV manager, executors, workers and model runners.

A request passes scheduler → executor → worker → runner → pipeline; docs/engine.md walks it. These
are the names that the RFC has and those that every deployment needs; a name of another module of
the engine raises ImportError here, with its import line.
"""

from typing import TYPE_CHECKING

from omni_kvlink.engine.config import OmniARConfig, OmniDiffusionConfig
from omni_kvlink.engine.core.ar_engine import AREngine
from omni_kvlink.engine.core.engine_core import EngineCore
from omni_kvlink.engine.core.stage_engine import DiffusionEngine
from omni_kvlink.engine.entrypoints.deploy import DeployConfig
from omni_kvlink.engine.entrypoints.omni_diffusion import OmniDiffusion
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.executor.distributed import MultiprocExecutor
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager, KVManager
from omni_kvlink.engine.models.diffusers_executor import DiffusersPipelineExecutor
from omni_kvlink.engine.outputs import BatchRunnerOutput, ModelRunnerOutput
from omni_kvlink.engine.request import DiffusionRequestBatch, OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams
from omni_kvlink.engine.sched.ar_scheduler import OmniARScheduler
from omni_kvlink.engine.sched.scheduler import SyncScheduler
from omni_kvlink.engine.step_cache.cache_backend import CacheBackend, register_cache_backend
from omni_kvlink.engine.step_cache.tea_cache import TeaCache
from omni_kvlink.engine.worker import (
    GPUARModelRunner,
    GPUARWorker,
    GPUDiffusionModelRunner,
    GPUDiffusionWorker,
)
from omni_kvlink.engine.worker.model import ModelUtility
from omni_kvlink.models.bagel.layers import IntermediateTensors

__all__ = [
    "AREngine",
    "BatchRunnerOutput",
    "CacheBackend",
    "DeployConfig",
    "DiffusersPipelineExecutor",
    "DiffusionEngine",
    "DiffusionKVManager",
    "DiffusionRequestBatch",
    "EngineCore",
    "Executor",
    "GPUARModelRunner",
    "GPUARWorker",
    "GPUDiffusionModelRunner",
    "GPUDiffusionWorker",
    "IntermediateTensors",
    "KVManager",
    "ModelRunnerOutput",
    "ModelUtility",
    "MultiprocExecutor",
    "OmniARConfig",
    "OmniARScheduler",
    "OmniDiffusion",
    "OmniDiffusionConfig",
    "OmniDiffusionRequest",
    "OmniDiffusionSamplingParams",
    "SyncScheduler",
    "TeaCache",
    "register_cache_backend",
]

_ELSEWHERE = {
    "config": "CompilationConfig DiffusionParallelConfig KVConfig KVTransferConfig "
    "LoRAConfig ProfilerConfig RayConfig StageConfig",
    "core.stage_engine": "StageEngine",
    "errors": "EngineAsleepError EngineDeadError EngineError "
    "NoWorkersError RequestAborted RequestFailed",
    "executor": "FailureCallback",
    "inputs.prompt": "EmbedsPrompt Prompt",
    "kv.block_manager": "KVPools",
    "kv.kv_state": "KVState",
    "kv.sequence_blocks": "SequenceBlocks",
    "lora.request": "LoRARequest",
    "outputs": "ARSchedulerOutput DiffusionOutput "
    "DiffusionSchedulerOutput RunnerOutput StepSchedulerOutput",
    "parallel.guidance": "RankHooks",
    "ray.stage_actor": "StageActor",
    "sampling": "SamplingParamsKey",
    "sched.scheduler": "Scheduler",
    "sched.step_scheduler": "StepScheduler",
    "stage.remote_stage": "RemoteStage StageProcess",
    "tokens.outputs": "KVSent",
    "worker.model": "DiffusionPipeline model_utility refuse_params register_model",
    "worker.prefill_utility": "PrefillSteps TextPass",
    "worker.step_execution": "SupportsStepExecution",
}
"""Public names that other modules of the engine have, by module: `__getattr__` says the line."""

if not TYPE_CHECKING:  # a type checker reports these names by itself

    def __getattr__(name: str) -> object:
        for module, names in _ELSEWHERE.items():
            if name in names.split():  # not AttributeError, whose text `from … import` replaces
                raise ImportError(f"{name}: from omni_kvlink.engine.{module} import {name}")
        raise AttributeError(f"module 'omni_kvlink.engine' has no attribute {name!r}")
