"""`OmniARScheduler`: schedules prompts and allocates their KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.ar_outputs import ARSchedulerOutput
from omni_kvlink.engine.kv.block_manager import BlockManager
from omni_kvlink.engine.sched.stepwise import StepwiseScheduler
from omni_kvlink.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.engine.config import OmniARConfig
    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.engine.sched.scheduler import RequestState

Blocks = dict[str, list[int]]


class OmniARScheduler(StepwiseScheduler):
    """First come, first served; a request begins once there are blocks for its whole prompt.

    Requests run together, one step after the other; each ends when its own KV is sent.

    `count_tokens` returns the most tokens of each branch of a request's cache.
    """

    def __init__(
        self, config: OmniARConfig, count_tokens: Callable[[OmniDiffusionRequest], dict[str, int]]
    ):
        super().__init__(config.max_num_seqs)
        self.blocks = BlockManager(config.num_blocks, config.block_size)
        self._count_tokens = count_tokens
        self._tables: dict[str, Blocks] = {}
        self._block_counts: dict[str, dict[str, int]] = {}  # counted once, by request id

    def stats(self) -> dict[str, Any]:
        """Queue lengths, the number of steps, and free blocks."""
        return {**super().stats(), "free_blocks": self.blocks.num_free}

    def _choose(self) -> list[RequestState]:
        chosen: list[RequestState] = []
        for state in list(self._waiting.values())[: self.max_num_seqs - len(self._running)]:
            try:
                needed = self._needed(state.request)
            except Exception as error:  # such as: a prompt that cannot be read
                self._end(state, error)
                continue
            if not self.blocks.can_allocate(sum(needed.values())):
                break
            self._tables[state.request_id] = {
                branch: self.blocks.allocate(count) for branch, count in needed.items()
            }
            chosen.append(state)
        return chosen

    def _needed(self, request: OmniDiffusionRequest) -> dict[str, int]:
        """How many blocks each branch needs; CapacityError if the pools never have as many."""
        if known := self._block_counts.get(request.request_id):
            return known
        tokens = self._count_tokens(request)
        needed = {branch: self.blocks.blocks_for(count) for branch, count in tokens.items()}
        total = sum(needed.values())
        if total > self.blocks.num_blocks:
            size, free = self.blocks.block_size, self.blocks.num_blocks
            text = f"request {request.request_id!r} needs {total} blocks of {size} tokens, "
            text += f"there are {free}: raise num_blocks"
            raise CapacityError(text, requested=total, free=free)
        self._block_counts[request.request_id] = needed
        return needed

    def _output(self, requests: list[OmniDiffusionRequest]) -> ARSchedulerOutput:
        tables = {key: self._tables[key] for key in (request.request_id for request in requests)}
        cached = [key for key in self._running if key not in tables]
        return ARSchedulerOutput(requests, tables, cached_request_ids=cached)

    def _release(self, request: OmniDiffusionRequest) -> None:
        self._block_counts.pop(request.request_id, None)
        for blocks in self._tables.pop(request.request_id, {}).values():
            self.blocks.free(blocks)
