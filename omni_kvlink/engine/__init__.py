"""The reference engine: schedulers, a KV manager, executors, workers and model runners.

A request passes scheduler → executor → worker → runner → pipeline; docs/engine.md walks it.
"""

from omni_kvlink.engine.config import CompilationConfig as CompilationConfig
from omni_kvlink.engine.config import DiffusionParallelConfig as DiffusionParallelConfig
from omni_kvlink.engine.config import KVConfig as KVConfig
from omni_kvlink.engine.config import KVTransferConfig as KVTransferConfig
from omni_kvlink.engine.config import LoRAConfig as LoRAConfig
from omni_kvlink.engine.config import OmniARConfig as OmniARConfig
from omni_kvlink.engine.config import OmniDiffusionConfig as OmniDiffusionConfig
from omni_kvlink.engine.config import ProfilerConfig as ProfilerConfig
from omni_kvlink.engine.config import RayConfig as RayConfig
from omni_kvlink.engine.config import StageConfig as StageConfig
from omni_kvlink.engine.core.ar_engine import AREngine as AREngine
from omni_kvlink.engine.core.engine_core import EngineCore as EngineCore
from omni_kvlink.engine.core.stage_engine import DiffusionEngine as DiffusionEngine
from omni_kvlink.engine.core.stage_engine import StageEngine as StageEngine
from omni_kvlink.engine.entrypoints.deploy import DeployConfig as DeployConfig
from omni_kvlink.engine.entrypoints.omni_diffusion import OmniDiffusion as OmniDiffusion
from omni_kvlink.engine.errors import EngineAsleepError as EngineAsleepError
from omni_kvlink.engine.errors import EngineDeadError as EngineDeadError
from omni_kvlink.engine.errors import EngineError as EngineError
from omni_kvlink.engine.errors import NoWorkersError as NoWorkersError
from omni_kvlink.engine.errors import RequestAborted as RequestAborted
from omni_kvlink.engine.errors import RequestFailed as RequestFailed
from omni_kvlink.engine.executor import Executor as Executor
from omni_kvlink.engine.executor import FailureCallback as FailureCallback
from omni_kvlink.engine.executor.distributed import MultiprocExecutor as MultiprocExecutor
from omni_kvlink.engine.inputs.prompt import EmbedsPrompt as EmbedsPrompt
from omni_kvlink.engine.inputs.prompt import Prompt as Prompt
from omni_kvlink.engine.kv.block_manager import KVPools as KVPools
from omni_kvlink.engine.kv.kv_manager import DiffusionKVManager as DiffusionKVManager
from omni_kvlink.engine.kv.kv_manager import KVManager as KVManager
from omni_kvlink.engine.kv.kv_manager import KVState as KVState
from omni_kvlink.engine.kv.sequence_blocks import SequenceBlocks as SequenceBlocks
from omni_kvlink.engine.lora.request import LoRARequest as LoRARequest
from omni_kvlink.engine.models.diffusers_executor import (
    DiffusersPipelineExecutor as DiffusersPipelineExecutor,
)
from omni_kvlink.engine.outputs import ARSchedulerOutput as ARSchedulerOutput
from omni_kvlink.engine.outputs import BatchRunnerOutput as BatchRunnerOutput
from omni_kvlink.engine.outputs import DiffusionOutput as DiffusionOutput
from omni_kvlink.engine.outputs import DiffusionSchedulerOutput as DiffusionSchedulerOutput
from omni_kvlink.engine.outputs import ModelRunnerOutput as ModelRunnerOutput
from omni_kvlink.engine.outputs import RunnerOutput as RunnerOutput
from omni_kvlink.engine.outputs import StepSchedulerOutput as StepSchedulerOutput
from omni_kvlink.engine.parallel.guidance import RankHooks as RankHooks
from omni_kvlink.engine.ray.stage_actor import StageActor as StageActor
from omni_kvlink.engine.request import DiffusionRequestBatch as DiffusionRequestBatch
from omni_kvlink.engine.request import OmniDiffusionRequest as OmniDiffusionRequest
from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams as OmniDiffusionSamplingParams
from omni_kvlink.engine.sampling import SamplingParamsKey as SamplingParamsKey
from omni_kvlink.engine.sched.ar_scheduler import OmniARScheduler as OmniARScheduler
from omni_kvlink.engine.sched.scheduler import Scheduler as Scheduler
from omni_kvlink.engine.sched.scheduler import SyncScheduler as SyncScheduler
from omni_kvlink.engine.sched.step_scheduler import StepScheduler as StepScheduler
from omni_kvlink.engine.stage.remote_stage import RemoteStage as RemoteStage
from omni_kvlink.engine.stage.remote_stage import StageProcess as StageProcess
from omni_kvlink.engine.step_cache.cache_backend import CacheBackend as CacheBackend
from omni_kvlink.engine.step_cache.cache_backend import (
    register_cache_backend as register_cache_backend,
)
from omni_kvlink.engine.step_cache.tea_cache import TeaCache as TeaCache
from omni_kvlink.engine.tokens.outputs import KVSent as KVSent
from omni_kvlink.engine.worker import GPUARModelRunner as GPUARModelRunner
from omni_kvlink.engine.worker import GPUARWorker as GPUARWorker
from omni_kvlink.engine.worker import GPUDiffusionModelRunner as GPUDiffusionModelRunner
from omni_kvlink.engine.worker import GPUDiffusionWorker as GPUDiffusionWorker
from omni_kvlink.engine.worker.model import DiffusionPipeline as DiffusionPipeline
from omni_kvlink.engine.worker.model import ModelUtility as ModelUtility
from omni_kvlink.engine.worker.model import model_utility as model_utility
from omni_kvlink.engine.worker.model import refuse_params as refuse_params
from omni_kvlink.engine.worker.model import register_model as register_model
from omni_kvlink.engine.worker.prefill_utility import PrefillSteps as PrefillSteps
from omni_kvlink.engine.worker.prefill_utility import TextPass as TextPass
from omni_kvlink.engine.worker.step_execution import SupportsStepExecution as SupportsStepExecution
from omni_kvlink.models.bagel.layers import IntermediateTensors as IntermediateTensors
