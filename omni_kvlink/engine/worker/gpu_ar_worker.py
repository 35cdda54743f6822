"""`GPUARWorker`: the device of an AR stage; runs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import OmniARConfig
from ..errors import EngineError
from ..model import ModelUtility
from ..outputs import ARSchedulerOutput, ModelRunnerOutput
from ..request import OmniDiffusionRequest
from .base import WorkerBase
from .gpu_ar_model_runner import GPUARModelRunner


class GPUARWorker(WorkerBase):
    """Infrastructure of an AR stage; see `WorkerBase`.

    Attributes:
        model_runner: has the model and the paged KV; made by `init_device`.
    """

    def __init__(self, local_rank: int, rank: int, ar_config: OmniARConfig):
        super().__init__(local_rank, rank, ar_config)
        self.ar_config = ar_config
        self.model_runner: GPUARModelRunner | None = None

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = GPUARModelRunner(self.ar_config, self.device)

    @property
    def utility(self) -> ModelUtility:
        return self._runner().utility

    def execute_model(self, scheduler_output: ARSchedulerOutput) -> ModelRunnerOutput:
        """Passes through to the runner.

        Raises:
            EngineAsleepError: wake up first.
        """
        self.check_awake()
        return self._runner().execute_model(scheduler_output)

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens of each branch of a request: what the scheduler finds blocks for."""
        return self._runner().utility.count_tokens(request)

    def fail_kv(self, request_id: str, reason: str) -> None:
        """Tell the next stage that this request's KV will not come."""
        self._runner().handover.fail(request_id, reason)

    def sink_url(self) -> str:
        """What the next stage connects to."""
        return self._runner().handover.link.url

    def sink_stats(self) -> dict[str, Any]:
        """Of the link to the next stage."""
        return self._runner().handover.link.stats()

    def abort(self, request_id: str) -> None:
        """Passes through; may be called while `execute_model` runs."""
        self._runner().abort(request_id)

    def sleep(self, level: int = 1) -> bool:
        """Takes the KV pools out of memory, too: all blocks must be free."""
        slept = super().sleep(level)
        self._runner().pools.sleep()
        return slept

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        woke = super().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            self._runner().pools.wake_up()
        return woke

    def shutdown(self) -> None:
        super().shutdown()
        if self.model_runner is not None:
            self.model_runner.close()

    def _runner(self) -> GPUARModelRunner:
        if self.model_runner is None:
            raise EngineError("this worker has no runner yet: init_device() makes it")
        return self.model_runner
