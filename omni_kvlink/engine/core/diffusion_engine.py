"""`DiffusionEngine`: a diffusion stage, from requests to images."""

from __future__ import annotations

from omni_kvlink.engine.config import OmniDiffusionConfig
from omni_kvlink.engine.core.stage_engine import StageEngine
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.sched.sync_scheduler import SyncScheduler


class DiffusionEngine(StageEngine[OmniDiffusionConfig]):
    """Paints requests; those whose KV another stage sends say `need_kv_receive`."""

    def _make(self) -> tuple[SyncScheduler, Executor]:
        executor = Executor.get_class(self.config)(self.config)
        return SyncScheduler(self.config, executor.kv_manager), executor

    def _prepare(self, request: OmniDiffusionRequest) -> None:
        self.executor.prepare(request)

    def take_handed_on(self) -> list[OmniDiffusionRequest]:
        """Requests whose KV went to the next stage since this was asked last."""
        assert isinstance(self.scheduler, SyncScheduler)
        return self.scheduler.get_finished_requests_needing_kv_transfer()
