"""`AREngine`: the engine of an AR stage, from prompts to KV sent to the next stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from omni_kvlink.engine.config import OmniARConfig
from omni_kvlink.engine.core.stage_engine import StageEngine
from omni_kvlink.engine.executor import Executor
from omni_kvlink.engine.sched.ar_scheduler import OmniARScheduler

if TYPE_CHECKING:
    from omni_kvlink.engine.request import OmniDiffusionRequest

_ANSWER_SECONDS = 5.0  # to count tokens; nothing else is scheduled meanwhile


class AREngine(StageEngine[OmniARConfig]):
    """Reads prompts; each output describes the KV that was sent, as `kv_sent`."""

    def _make(self) -> tuple[OmniARScheduler, Executor]:
        executor = Executor.get_class(self.config)(self.config)

        def rpc(method: str, *args: Any) -> list[Any]:
            return executor.collective_rpc(method, timeout=_ANSWER_SECONDS, args=args)

        def count_tokens(request: OmniDiffusionRequest) -> dict[str, int]:
            return cast("dict[str, int]", rpc("count_tokens", request)[0])

        def prefix_tokens(request: OmniDiffusionRequest) -> list[int]:
            return cast("list[int]", rpc("prefix_tokens", request)[0])

        def count_computed() -> dict[str, int]:
            ranks: list[dict[str, int]] = rpc("num_computed_tokens")
            return {key: min(rank.get(key, 0) for rank in ranks) for key in ranks[0]}

        scheduler = OmniARScheduler(
            self.config, count_tokens, prefix_tokens=prefix_tokens, count_computed=count_computed
        )
        return scheduler, executor

    def stats(self) -> dict[str, Any]:
        """Return `StageEngine.stats`; with `kv_transfer`, its statistics, too."""
        stats = super().stats()
        if self.config.kv_transfer is not None:
            rank_stats = self.executor.collective_rpc("kv_transfer_stats", timeout=_ANSWER_SECONDS)
            stats["kv_transfer"] = rank_stats[0]
        return stats

    def sleep(self, level: int = 1, *, timeout: float = 60.0) -> bool:
        """Between batches, take weights and KV pools out of memory; the prefix cache is empty."""

        def sleep() -> bool:
            self._reset_prefixes()
            return self.executor.sleep(level)

        return bool(self.call(sleep, timeout=timeout))

    def reset_prefix_cache(self, *, timeout: float = 60.0) -> None:
        """Between batches, forget all blocks that could be shared."""
        self.call(self._reset_prefixes, timeout=timeout)

    def _reset_prefixes(self) -> None:
        assert isinstance(self.scheduler, OmniARScheduler)
        self.scheduler.reset_prefix_cache()
