"""vLLM's scheduler and both halves of the connector in this process; only the model is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BLOCK, BLOCKS, HEADS, ROW = 32, 24, 2, 8
LAYERS = ("layer 0", "layer 1")
SAMPLED = 7
"""The token that every forward pass samples."""


class SteppedEngine:
    """An engine whose forward pass writes each token's number into the pools, and nothing more."""

    def __init__(self, model: str, transfer: Mapping[str, Any], *, caching: bool = True):
        config = VllmConfig(
            model_config=ModelConfig(model=model, max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=512,
                max_model_len=512,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=True,
            ),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = "LBHNC"
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=HEADS, head_size=ROW // 2, dtype=torch.float32
        )
        pools = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            config, pools, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        role = KVConnectorRole.WORKER
        self.worker: Any = KVConnectorFactory.create_connector(config, role, pools)
        self.pools = {name: torch.zeros(BLOCKS, HEADS, BLOCK, ROW) for name in LAYERS}
        self.worker.register_kv_caches(self.pools)
        self.ended: dict[str, tuple[str, Any]] = {}  # the reason, and the kv_transfer_params
        self.cached: dict[str, int] = {}  # tokens that were not computed
        self.counts: dict[str, int] = {}

    def add(
        self, name: str, prompt: list[int], params: object, *, tokens: int = 1, **inputs: Any
    ) -> None:
        """Add a request; `inputs` are those of vLLM's `Request`, such as `cache_salt`."""
        extra = {} if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        hasher = self._hasher
        request = Request(name, prompt, sampling, None, block_hasher=hasher, **inputs)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step, in the order of vLLM's model runner."""
        plan = self.scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens
        self.worker.bind_connector_metadata(plan.kv_connector_metadata)
        if plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        names = list(plan.num_scheduled_tokens)
        for layer in LAYERS if names else ():
            self.worker.wait_for_layer_load(layer)
            for name in names:
                self._compute(layer, name, plan.num_scheduled_tokens[name])
            self.worker.save_kv_layer(layer, self.pools[layer], None)
        if not plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        if names:
            self.worker.wait_for_save()
        sent, received = self.worker.get_finished(plan.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        if stats := self.worker.get_kv_connector_stats():
            for key, value in stats.data.items():
                if isinstance(value, int):
                    self.counts[key] = self.counts.get(key, 0) + value
        self.worker.clear_connector_metadata()
        output = KVConnectorOutput(sent, received, invalid_block_ids=invalid)
        sampled = [[SAMPLED] if self._is_computed(plan, name) else [] for name in names]
        numbers = {name: number for number, name in enumerate(names)}
        answers = self.scheduler.update_from_output(
            plan, ModelRunnerOutput(names, numbers, sampled, kv_connector_output=output)
        )
        for answer in (one for each in answers.values() for one in each.outputs):
            if answer.finish_reason is not None:
                params = answer.kv_transfer_params
                self.ended[answer.request_id] = (str(answer.finish_reason), params)

    def step_until(self, condition: Callable[[], object]) -> None:
        def stepped() -> bool:
            self.step()
            return bool(condition())

        until(stepped, "the engine came so far", timeout=60)

    def run(self, *names: str) -> list[str]:
        """Step until these requests have ended; how each did."""
        self.step_until(lambda: all(name in self.ended for name in names))
        return [self.ended[name][0] for name in names]

    def prefill(
        self, name: str, prompt: list[int], *, inputs: Mapping[str, Any] = {}, **params: Any
    ) -> dict[str, Any]:
        """Compute a prompt and send its cache; what the consumer's request needs."""
        self.add(name, prompt, {"do_remote_decode": True, **params}, **inputs)
        self.run(name)
        answer: dict[str, Any] = self.ended[name][1]
        return answer

    def settle(self) -> None:
        """Step until the scheduler has nothing left to wait for."""
        self.step_until(lambda: not self.scheduler.has_requests())

    @property
    def used_blocks(self) -> int:
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return BLOCKS - 1 - free  # one is vLLM's null block

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _compute(self, layer: str, name: str, scheduled: int) -> None:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        stop = request.num_computed_tokens  # of the whole step
        for position in range(stop - scheduled, stop):
            block, row = blocks[position // BLOCK], position % BLOCK
            self.pools[layer][block, :, row] = request.all_token_ids[position]

    def _is_computed(self, plan: Any, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)
