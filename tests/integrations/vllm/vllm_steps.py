"""vLLM's scheduler and both halves of the connector in this process; only the model is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_layers import BLOCK as BLOCK
from vllm_layers import AttentionLayer, full, layers_of

from omni_kvlink.testing.rig import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

BLOCKS = 48
GROUPS = (full("layer 0", "layer 1"),)
SAMPLED = 7
"""The token that every forward pass samples."""


class SteppedEngine:
    """An engine whose forward pass writes into the pools what `vllm_layers` says, and no more.

    Args:
        groups: the layers' caches; one group of two layers with full attention by default.
        batch: the most tokens of one forward pass.
    """

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        *,
        caching: bool = True,
        groups: Sequence[KVCacheGroupSpec] = GROUPS,
        batch: int = 512,
    ):
        config = VllmConfig(
            model_config=ModelConfig(model=model, max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=batch,
                max_model_len=512,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=False,
                enable_chunked_prefill=True,
            ),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = "LBHNC"
        for group in groups:
            if isinstance(group.kv_cache_spec, MambaSpec):
                config.cache_config.mamba_cache_mode = group.kv_cache_spec.mamba_cache_mode
        if len(groups) == 1:
            config.cache_config.block_size = groups[0].kv_cache_spec.block_size
        pools = KVCacheConfig(BLOCKS, [], [*groups])
        sizes = resolve_kv_cache_block_sizes(pools, config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(sizes[1], sha256)
        self.scheduler = Scheduler(
            config,
            generate_scheduler_kv_cache_config([pools]),
            StructuredOutputManager(config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        role = KVConnectorRole.WORKER
        self.worker: Any = KVConnectorFactory.create_connector(config, role, pools)
        self._layers = layers_of(groups, BLOCKS)
        names = enumerate(each.layer_names for each in groups)
        self._tables = {name: table for table, layers in names for name in layers}
        self.wrong: set[str] = set()  # requests that read other than they or theirs had written
        config.compilation_config.static_forward_context.update(self._layers)
        self.worker.register_kv_caches({name: self._layers[name].pool for name in self._tables})
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
        for each in self._layers.values():
            if isinstance(each, AttentionLayer):
                each.pool[plan.new_block_ids_to_zero or []] = 0.0
        self.worker.bind_connector_metadata(plan.kv_connector_metadata)
        if plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        names = list(plan.num_scheduled_tokens)
        wrong = set()
        for layer in self._layers if names else ():
            is_reported = isinstance(self._layers[layer], AttentionLayer)  # as in vLLM
            if is_reported:
                self.worker.wait_for_layer_load(layer)
            for name in names:
                if not self._compute(layer, name, plan.num_scheduled_tokens[name]):
                    wrong.add(name)
            if is_reported:
                self.worker.save_kv_layer(layer, self._layers[layer].pool, None)
        if not plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        if names:
            self.worker.wait_for_save()
        results = self.worker.get_transfer_results(plan.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        self.wrong |= {name for name in wrong if invalid.isdisjoint(self.blocks(name))}
        if stats := self.worker.get_kv_connector_stats():
            for key, value in stats.data.items():
                if isinstance(value, int):
                    self.counts[key] = self.counts.get(key, 0) + value
        self.worker.clear_connector_metadata()
        output = KVConnectorOutput(
            results.finished_sending,
            results.finished_recving,
            invalid_block_ids=invalid,
            failed_recving=results.failed_recving,
        )
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

    def blocks(self, name: str) -> list[int]:
        """The blocks of a request, in all groups."""
        return [block for table in self._block_ids(name) for block in table if block]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        assert not self.wrong

    def _block_ids(self, name: str) -> tuple[list[int], ...]:
        found: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return found

    def _compute(self, layer: str, name: str, scheduled: int) -> bool:
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens  # of the whole step
        table = self._block_ids(name)[self._tables[layer]]
        tokens = request.all_token_ids[:stop]
        return self._layers[layer].forward(tokens, stop - scheduled, table)

    def _is_computed(self, plan: Any, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)
