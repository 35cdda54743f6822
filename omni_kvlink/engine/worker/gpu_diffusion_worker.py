"""`GPUDiffusionWorker`: the device of a diffusion stage; runs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import OmniDiffusionConfig
from ..errors import EngineError
from ..kv_manager import DiffusionKVManager
from ..model import ModelUtility
from ..outputs import BatchRunnerOutput
from ..request import OmniDiffusionRequest
from .base import WorkerBase
from .gpu_diffusion_model_runner import GPUDiffusionModelRunner


class GPUDiffusionWorker(WorkerBase):
    """Infrastructure of one rank; see `WorkerBase`.

    Attributes:
        model_runner: has the pipeline; made by `init_device`.
    """

    def __init__(self, local_rank: int, rank: int, od_config: OmniDiffusionConfig):
        super().__init__(local_rank, rank, od_config)
        self.od_config = od_config
        self.model_runner: GPUDiffusionModelRunner | None = None

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = GPUDiffusionModelRunner(self.od_config, self.device)

    @property
    def utility(self) -> ModelUtility:
        return self._runner().utility

    @property
    def kv_manager(self) -> DiffusionKVManager | None:
        return self._runner().kv_manager

    def execute_model(self, requests: Sequence[OmniDiffusionRequest]) -> BatchRunnerOutput:
        """Passes through to the runner.

        Raises:
            EngineAsleepError: wake up first.
        """
        self.check_awake()
        return self._runner().execute_model(requests)

    def abort(self, request_id: str) -> None:
        """Passes through; may be called while `execute_model` runs."""
        self._runner().abort(request_id)

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage that this request's KV will not come."""
        handover = self._runner().handover
        if handover is not None:
            handover.fail(request_id, reason)

    def sink_url(self) -> str:
        """What the next stage connects to; empty if there is none."""
        handover = self._runner().handover
        return "" if handover is None else handover.link.url

    def sink_stats(self) -> dict[str, Any]:
        """Of the link to the next stage; empty if there is none."""
        handover = self._runner().handover
        return {} if handover is None else handover.link.stats()

    def shutdown(self) -> None:
        super().shutdown()
        if self.model_runner is not None:
            self.model_runner.close()

    def _runner(self) -> GPUDiffusionModelRunner:
        if self.model_runner is None:
            raise EngineError("this worker has no runner yet: init_device() makes it")
        return self.model_runner
