"""vLLM's scheduler and both halves of the connector in this process; only the model is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from omni_kvlink.testing.rig import until
from support.vllm.cache_layers import BLOCK as BLOCK
from support.vllm.cache_layers import full
from support.vllm.rank import SteppedRank, cache_config

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
        tensor, pipeline: the number of ranks by heads and by layers; they run one after the other.
        layout: vLLM's name of the pools' layout.
        drafts: tokens that a draft model drafts in each step; see `SteppedRank`.
    """

    def __init__(
        self,
        model: str,
        transfer: Mapping[str, Any],
        *,
        caching: bool = True,
        groups: Sequence[KVCacheGroupSpec] = GROUPS,
        batch: int = 512,
        tensor: int = 1,
        pipeline: int = 1,
        layout: str = "LBHNC",
        drafts: int = 0,
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
            parallel_config=ParallelConfig(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                distributed_executor_backend="mp",
            ),
            kv_transfer_config=KVTransferConfig(**transfer),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.kv_cache_layout = layout
        for group in groups:
            if isinstance(group.kv_cache_spec, MambaSpec):
                config.cache_config.mamba_cache_mode = group.kv_cache_spec.mamba_cache_mode
        if len(groups) == 1:
            config.cache_config.block_size = groups[0].kv_cache_spec.block_size
        world = range(tensor * pipeline)
        pools = [cache_config(groups, each, tensor, pipeline, BLOCKS) for each in world]
        sizes = resolve_kv_cache_block_sizes(pools[0], config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(sizes[1], sha256)
        self.scheduler = Scheduler(
            config,
            generate_scheduler_kv_cache_config(pools),
            StructuredOutputManager(config),
            block_size=sizes[0],
            hash_block_size=sizes[1],
            log_stats=True,
        )
        self.ranks = [SteppedRank(config, groups, each, BLOCKS, drafts) for each in world]
        self._aggregator = KVOutputAggregator(len(world))
        self.ended: dict[str, tuple[str, Any]] = {}  # the reason, and the kv_transfer_params
        self.cached: dict[str, int] = {}  # tokens that were not computed
        self.counts: dict[str, int] = {}
        self.reported: list[Any] = []  # by the scheduler, for vLLM's metrics

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
        names = list(plan.num_scheduled_tokens)
        numbers = {name: number for number, name in enumerate(names)}
        sampled = [[SAMPLED] if self._is_computed(plan, name) else [] for name in names]
        requests, outputs = self.scheduler.requests, []
        for rank in self.ranks:
            made = rank.execute(plan, requests, self._block_ids)
            outputs.append(ModelRunnerOutput(names, numbers, sampled, kv_connector_output=made))
        output = self._aggregator.aggregate(outputs)
        assert output is not None
        assert output.kv_connector_output is not None
        if stats := output.kv_connector_output.kv_connector_stats:
            for key, value in stats.data.items():
                if isinstance(value, int):
                    self.counts[key] = self.counts.get(key, 0) + value
        answers = self.scheduler.update_from_output(plan, output)
        reports = (each.scheduler_stats for each in answers.values())
        self.reported += [
            report.kv_connector_stats for report in reports if report and report.kv_connector_stats
        ]
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

    @property
    def worker(self) -> Any:
        """The connector of the first rank."""
        return self.ranks[0].connector

    @property
    def wrong(self) -> set[str]:
        """Requests that read other than they or theirs had written."""
        return set().union(*(rank.wrong for rank in self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()
        assert not self.wrong

    def _block_ids(self, name: str) -> tuple[list[int], ...]:
        found: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(name)
        return found

    def _is_computed(self, plan: Any, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)
