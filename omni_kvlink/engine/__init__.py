"""The reference engine: schedulers, workers, runners and a KV manager, on the public library.

One request's path: scheduler → KV manager → executor → worker → runner → pipeline; drawn in
docs/engine.md.
"""

from .ar_engine import AREngine as AREngine
from .ar_scheduler import OmniARScheduler as OmniARScheduler
from .cache_backend import CacheBackend as CacheBackend
from .cache_backend import register_cache_backend as register_cache_backend
from .config import DiffusionParallelConfig as DiffusionParallelConfig
from .config import KVConfig as KVConfig
from .config import OmniARConfig as OmniARConfig
from .config import OmniDiffusionConfig as OmniDiffusionConfig
from .config import RayConfig as RayConfig
from .config import StageConfig as StageConfig
from .core import EngineCore as EngineCore
from .deploy import DeployConfig as DeployConfig
from .diffusion_engine import DiffusionEngine as DiffusionEngine
from .errors import EngineAsleepError as EngineAsleepError
from .errors import EngineDeadError as EngineDeadError
from .errors import EngineError as EngineError
from .errors import NoWorkersError as NoWorkersError
from .errors import RequestAborted as RequestAborted
from .errors import RequestFailed as RequestFailed
from .executor import Executor as Executor
from .executor import FailureCallback as FailureCallback
from .holding import KVState as KVState
from .kv_manager import DiffusionKVManager as DiffusionKVManager
from .kv_manager import KVManager as KVManager
from .model import DiffusionPipeline as DiffusionPipeline
from .model import ModelUtility as ModelUtility
from .model import model_utility as model_utility
from .model import register_model as register_model
from .omni_diffusion import OmniDiffusion as OmniDiffusion
from .outputs import ARSchedulerOutput as ARSchedulerOutput
from .outputs import BatchRunnerOutput as BatchRunnerOutput
from .outputs import DiffusionOutput as DiffusionOutput
from .outputs import DiffusionSchedulerOutput as DiffusionSchedulerOutput
from .outputs import KVSent as KVSent
from .outputs import ModelRunnerOutput as ModelRunnerOutput
from .outputs import RunnerOutput as RunnerOutput
from .remote_stage import RemoteStage as RemoteStage
from .request import DiffusionRequestBatch as DiffusionRequestBatch
from .request import OmniDiffusionRequest as OmniDiffusionRequest
from .request import Prompt as Prompt
from .sampling import OmniDiffusionSamplingParams as OmniDiffusionSamplingParams
from .sampling import SamplingParamsKey as SamplingParamsKey
from .scheduler import Scheduler as Scheduler
from .stage_actor import StageActor as StageActor
from .stage_engine import StageEngine as StageEngine
from .stage_process import StageProcess as StageProcess
from .sync_scheduler import SyncScheduler as SyncScheduler
