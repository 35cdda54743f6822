"""`AREngine`: the engine of an AR stage, from prompts to KV sent to the next stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.config import OmniARConfig
from omni_kvlink.engine.core.stage_engine import StageEngine
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.sched.ar_scheduler import OmniARScheduler

if TYPE_CHECKING:
    from omni_kvlink.engine.request import OmniDiffusionRequest

_ANSWER = 5.0  # seconds to count a prompt's tokens, in which nothing else is scheduled


class AREngine(StageEngine[OmniARConfig]):
    """Reads prompts; each output describes the KV that was sent, as `kv_sent`."""

    def _make(self) -> tuple[OmniARScheduler, Executor]:
        executor = Executor.get_class(self.config)(self.config)

        def count_tokens(request: OmniDiffusionRequest) -> dict[str, int]:
            counted: list[dict[str, int]]
            counted = executor.collective_rpc("count_tokens", timeout=_ANSWER, args=(request,))
            return counted[0]

        return OmniARScheduler(self.config, count_tokens), executor
