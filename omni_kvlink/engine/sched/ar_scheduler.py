"""`OmniARScheduler`: schedules prompts and allocates their KV blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.kv.block_manager import BlockManager
from omni_kvlink.engine.outputs import ARSchedulerOutput
from omni_kvlink.engine.sched.prefix_cache import Prefix, PrefixCache
from omni_kvlink.engine.sched.scheduler import RequestState
from omni_kvlink.engine.sched.step_scheduler import StepwiseScheduler
from omni_kvlink.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.outputs import (
        DiffusionOutput,
        DiffusionSchedulerOutput,
        ModelRunnerOutput,
    )
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sched.scheduler import RequestState

Blocks = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class _Needed:
    """The number of blocks that a request needs, by branch; and its prefix."""

    counts: dict[str, int]
    prefix: Prefix


class OmniARScheduler(StepwiseScheduler):
    """First come, first served; a request begins once there are blocks for its whole prompt.

    Requests run together, one step after the other; each ends when its own KV is sent.

    Args:
        config: of the stage.
        count_tokens: returns the most tokens of each branch of a request's cache.
        prefix_tokens: for `enable_prefix_caching`, returns the token ids that the first branch
            begins with, as far as they alone decide its KV.
        count_computed: for the same, returns how many tokens of each running request are computed.
    """

    def __init__(
        self,
        config: OmniARConfig,
        count_tokens: Callable[[OmniDiffusionRequest], dict[str, int]],
        *,
        prefix_tokens: Callable[[OmniDiffusionRequest], list[int]] | None = None,
        count_computed: Callable[[], Mapping[str, int]] = dict,
    ):
        super().__init__(config.max_num_seqs)
        self._max_loras = config.lora_config.capacity
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self._count_tokens, self._prefix_tokens = count_tokens, prefix_tokens
        self._tables: dict[str, Blocks] = {}
        self._computed: dict[str, int] = {}  # tokens found for requests that run
        self._needs: dict[str, _Needed] = {}  # counted once, by request id
        self._prefixes: PrefixCache | None = None
        if config.enable_prefix_caching:
            if prefix_tokens is None:
                raise ValueError("enable_prefix_caching: the scheduler needs prefix_tokens")
            self._prefixes = PrefixCache(self.blocks, count_computed)

    def stats(self) -> dict[str, Any]:
        """Queue lengths, the number of steps, free blocks, and the "prefix_cache" if it is on."""
        with self._changed:
            stats = {**super().stats(), "free_blocks": self.blocks.num_free}
            if self._prefixes is not None:
                stats["prefix_cache"] = self._prefixes.stats()
            return stats

    def reset_prefix_cache(self) -> None:
        """Forget all blocks that could be shared; EngineError while requests run."""
        with self._changed:
            if self._running:
                raise EngineError(f"{', '.join(self._running)} run: reset the prefix cache later")
            self.blocks.forget()

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[DiffusionOutput]:
        """End the requests of a step; the blocks of their prefixes can be shared from now on."""
        with self._changed:
            for key, result in model_output.results.items():
                if self._prefixes is not None and result.error is None:
                    self._prefixes.computed(key)
            return super().update_from_output(scheduler_output, model_output)

    def _choose(self) -> list[RequestState]:
        chosen: list[RequestState] = []
        for state in list(self._waiting.values())[: self.max_num_seqs - len(self._running)]:
            try:
                needed = self._needed(state.request)
                if not self._has_lora_room([*self._running.values(), *chosen, state]):
                    break
                if not self._allocate(state.request_id, needed):
                    break
            except Exception as error:  # such as: a prompt that cannot be read
                self._end(state, error)
                continue
            chosen.append(state)
        return chosen

    def _allocate(self, request_id: str, needed: _Needed) -> bool:
        """Take a request's blocks, those of its prefix as they are; False if too few are free."""
        cache, counts = self._prefixes, needed.counts
        prefix_blocks = [] if cache is None else cache.find(needed.prefix)
        self.blocks.share(prefix_blocks)
        if not self.blocks.can_allocate(sum(counts.values()) - len(prefix_blocks)):
            self.blocks.free(prefix_blocks)
            return False
        table, begins = Blocks(), prefix_blocks
        for branch, count in counts.items():
            table[branch] = begins + self.blocks.allocate(count - len(begins))
            begins = []  # a prefix is in the first branch alone
        self._tables[request_id] = table
        self._computed[request_id] = len(prefix_blocks) * self.blocks.block_size
        if cache is not None:
            cache.begin(request_id, needed.prefix, next(iter(table.values())), len(prefix_blocks))
        return True

    def _needed(self, request: OmniDiffusionRequest) -> _Needed:
        """Count the blocks that a request needs; CapacityError if the pools never have as many."""
        if needed := self._needs.get(request.request_id):
            return needed
        tokens = self._count_tokens(request)
        counts = {branch: self.blocks.blocks_for(count) for branch, count in tokens.items()}
        total = sum(counts.values())
        if total > self.blocks.num_blocks:
            size, free = self.blocks.block_size, self.blocks.num_blocks
            text = f"request {request.request_id!r} needs {total} blocks of {size} tokens, "
            text += f"there are {free}: raise num_blocks"
            raise CapacityError(text, requested=total, free=free)
        ids = self._prefix_tokens(request) if self._prefixes and self._prefix_tokens else []
        needed = _Needed(counts, Prefix.of(ids, self.blocks.block_size))
        self._needs[request.request_id] = needed
        return needed

    def _has_lora_room(self, states: Sequence[RequestState]) -> bool:
        """Whether requests that run together name no more adapters than are held."""
        named = {state.request.sampling_params.lora_int_id for state in states} - {None}
        return len(named) <= self._max_loras

    def _ended_ids(
        self, scheduler_output: DiffusionSchedulerOutput, model_output: ModelRunnerOutput
    ) -> list[str]:
        for key, hidden in zip(model_output.req_ids, model_output.pooler_output, strict=True):
            if hidden is not None and key in model_output.results:
                model_output.results[key].hidden_states = hidden
        return list(model_output.results)

    def _output(self, requests: list[OmniDiffusionRequest]) -> ARSchedulerOutput:
        tables = {key: self._tables[key] for key in (request.request_id for request in requests)}
        cached = [key for key in self._running if key not in tables]
        computed = {key: self._computed[key] for key in tables if self._computed[key]}
        return ARSchedulerOutput(requests, tables, computed, cached_request_ids=cached)

    def _release(self, request: OmniDiffusionRequest) -> None:
        self._needs.pop(request.request_id, None)
        self._computed.pop(request.request_id, None)
        if self._prefixes is not None:
            self._prefixes.end(request.request_id)
        for blocks in self._tables.pop(request.request_id, {}).values():
            self.blocks.free(blocks)
