"""`GPUARWorker`: the device of an AR stage; its model runner does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.worker.base import WorkerBase
from omni_kvlink.engine.worker.gpu_ar_model_runner import GPUARModelRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.engine.ar_outputs import ARSchedulerOutput
    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.outputs import ModelRunnerOutput
    from omni_kvlink.engine.request import OmniDiffusionRequest


class GPUARWorker(WorkerBase[GPUARModelRunner]):
    """The worker of an AR stage; see `WorkerBase`."""

    def __init__(self, local_rank: int, rank: int, ar_config: OmniARConfig):
        super().__init__(local_rank, rank, ar_config)
        self.ar_config = ar_config

    def execute_model(self, scheduler_output: ARSchedulerOutput) -> ModelRunnerOutput:
        """Pass prompts on to the runner; EngineAsleepError while asleep."""
        if self.model_runner is None or self.weights.level:
            raise self._unready_error()
        return self.model_runner.execute_model(scheduler_output)

    def count_tokens(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """The most tokens that a request can put into each branch of its cache."""
        return self.runner.utility.count_tokens(request)

    def prefix_tokens(self, request: OmniDiffusionRequest) -> list[int]:
        """Token ids of the beginning of a request's cache, as far as they alone decide it."""
        return self.runner.utility.prefix_tokens(request)

    def num_computed_tokens(self) -> dict[str, int]:
        """Count the first tokens of each running request that are in its blocks, at least."""
        return self.runner.num_computed_tokens()

    def kv_transfer_stats(self) -> dict[str, int]:
        """Statistics of the links to prefill or decode stages; empty without."""
        transfer = self.runner.kv_transfer
        return {} if transfer is None else transfer.stats()

    def sleep(self, level: int = 1) -> bool:
        """Release the KV pools, too: all blocks must be free.

        EngineError for level 2 with `kv_transfer`: the weights may be others after it.
        """
        if level > 1 and self.ar_config.kv_transfer is not None:
            raise EngineError("sleep level 2 with kv_transfer: K and V of the weights are in use")
        slept = super().sleep(level)
        self.runner.release_caches()
        self.runner.pools.sleep()
        return slept

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Bring back what `sleep` took; the pools are uninitialized."""
        woke = super().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            self.runner.pools.wake_up()
        return woke

    def sleeping_tags(self) -> list[str]:
        """Return what `sleep` has taken and `wake_up` has not brought back."""
        return super().sleeping_tags() + ([] if self.runner.pools.is_awake else ["kv_cache"])

    def _make_runner(self) -> GPUARModelRunner:
        return GPUARModelRunner(self.ar_config, self.device, self.process_group)
