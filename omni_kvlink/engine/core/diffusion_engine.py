"""`DiffusionEngine`: the engine of a diffusion stage, from requests to images."""

from __future__ import annotations

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.core.stage_engine import StageEngine
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.sched.scheduler import SyncScheduler
from omni_kvlink.engine.sched.step_scheduler import StepScheduler


class DiffusionEngine(StageEngine[OmniDiffusionConfig]):
    """Generates images; requests whose KV another stage sends have `need_kv_receive` set."""

    def _make(self) -> tuple[SyncScheduler, Executor]:
        executor = Executor.get_class(self.config)(self.config)
        scheduler = StepScheduler if self.config.step_execution else SyncScheduler
        return scheduler(self.config, executor.kv_manager), executor
