"""vLLM's scheduler and both halves of the encoder-cache connector; the model alone is left out."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    ECTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from omni_kvlink.testing.rig import until
from support.vllm.halves import link_of, sender_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Reaches into _EC_CONNECTOR_AGENT: vLLM has one connector a process, and no public name to exchange
# it.

BLOCK, BLOCKS, EMBEDS, WIDTH = 32, 24, 8, 16
SAMPLED = 7
"""The token that every forward pass samples."""


def encoded(item: str, embeds: int = EMBEDS) -> torch.Tensor:
    """What the encoder makes of an item."""
    seed = int.from_bytes(hashlib.sha256(item.encode()).digest()[:4], "little")
    return torch.randn(embeds, WIDTH, generator=torch.Generator().manual_seed(seed))


class SteppedEncoderEngine:
    """An engine whose forward pass encodes items, and reads what it then finds of them.

    `encodes` are the items that it encoded, and `inputs` what a request's forward passes read.
    """

    def __init__(self, model: str, role: str, extra: Mapping[str, Any], *, cache: int = 512):
        transfer = ECTransferConfig(
            ec_connector="OmniKVLinkECConnector",
            ec_connector_module_path="omni_kvlink.integrations.vllm",
            ec_role=f"ec_{role}",
            ec_connector_extra_config=dict(extra),
        )
        sizes = {"max_num_batched_tokens": 512, "max_model_len": 512}
        self.config = VllmConfig(
            model_config=ModelConfig(model=model, max_model_len=512, dtype="float32"),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=role != "producer"),
            scheduler_config=SchedulerConfig(max_num_seqs=8, is_encoder_decoder=False, **sizes),
            ec_transfer_config=transfer,
        )
        self.config.scheduler_config.encoder_cache_size = cache
        groups = []
        if role != "producer":  # one that only encodes has no KV cache
            spec = FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32
            )
            groups = [KVCacheGroupSpec(["layer"], spec)]
        pools = KVCacheConfig(BLOCKS if groups else 1, [], groups)
        self.config.cache_config.num_gpu_blocks = pools.num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256) if groups else None
        self.worker: Any = ECConnectorFactory.create_connector(self.config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        self.scheduler = Scheduler(
            self.config, pools, StructuredOutputManager(self.config), block_size=BLOCK
        )
        self.cache: dict[str, torch.Tensor] = {}  # the encoder cache
        self.encodes: list[str] = []
        self.inputs: dict[str, dict[str, torch.Tensor]] = {}
        self.ended: dict[str, tuple[str, Any]] = {}  # the reason, and the ec_transfer_params
        self._only_encodes = role == "producer"

    def add(
        self,
        name: str,
        items: Sequence[str],
        params: object = None,
        *,
        has_media: bool = True,
        embeds: int = EMBEDS,
        text: int = 3,
        tokens: int = 1,
    ) -> None:
        """Add a request: its items, each of `embeds` positions, and some text."""
        extra = {} if params is None else {"ec_transfer_params": params}
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        media = MultiModalKwargsItem.dummy() if has_media else None
        features = [
            MultiModalFeatureSpec(media, "image", item, PlaceholderRange(n * embeds, embeds), item)
            for n, item in enumerate(items)
        ]
        prompt = [5] * (len(items) * embeds) + list(range(10, 10 + text))
        request = Request(
            name, prompt, sampling, None, mm_features=features, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)

    def encode(self, name: str, *items: str, **given: Any) -> dict[str, Any]:
        """Encode items; what a consumer's request needs."""
        self.add(name, items, **given)
        assert self.run(name) == ["stop"]
        answer: dict[str, Any] = self.ended[name][1]
        return answer

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step, in the order of vLLM's first model runner, with its own calls."""
        plan = self.scheduler.schedule()
        for item in plan.free_encoder_mm_hashes:
            self.cache.pop(item, None)
        names, output = list(plan.num_scheduled_tokens), None
        if names or self._only_encodes:
            with (
                self._as_the_connector(),
                ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(
                    plan, encoder_cache=self.cache
                ) as output,
            ):
                self._encode(plan)
                if not self._only_encodes:
                    for name in names:
                        self._read(name, plan.num_scheduled_tokens[name])
        sampled = [[SAMPLED] if self._samples(name) else [] for name in names]
        numbers = {name: number for number, name in enumerate(names)}
        answers = self.scheduler.update_from_output(
            plan, ModelRunnerOutput(names, numbers, sampled, ec_connector_output=output)
        )
        for answer in (one for each in answers.values() for one in each.outputs):
            if answer.finish_reason is not None:
                self.ended[answer.request_id] = str(answer.finish_reason), answer.ec_transfer_params

    def step_until(self, condition: Callable[[], object]) -> None:
        def stepped() -> bool:
            self.step()
            return bool(condition())

        until(stepped, "the engine came so far", timeout=60)

    def run(self, *names: str) -> list[str]:
        """Step until these requests have ended; how each did."""
        self.step_until(lambda: all(name in self.ended for name in names))
        return [self.ended[name][0] for name in names]

    def settle(self) -> None:
        """Step until the scheduler has nothing left to wait for."""
        self.step_until(lambda: not self.scheduler.has_requests())

    @property
    def plans(self) -> Any:
        """The scheduler's half."""
        return self.scheduler.ec_connector

    @property
    def live(self) -> int:
        """Payloads that this producer keeps for readers."""
        count: int = link_of(sender_of(self.worker)).stats()["transfers"]["live"]
        return count

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    @contextmanager
    def _as_the_connector(self) -> Iterator[None]:
        """Make this engine's worker half the process's, as it is in a worker of its own."""
        before = ec_transfer_state._EC_CONNECTOR_AGENT
        ec_transfer_state._EC_CONNECTOR_AGENT = self.worker
        try:
            yield
        finally:
            ec_transfer_state._EC_CONNECTOR_AGENT = before

    def _encode(self, plan: Any) -> None:
        for name, indices in plan.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self.scheduler.requests[name].mm_features[index]
                if feature.data is None:  # as the model runner
                    continue
                item = feature.identifier
                self.encodes.append(item)
                self.cache[item] = encoded(item, feature.mm_position.length)
                ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(self.cache, item)

    def _read(self, name: str, scheduled: int) -> None:
        """Read the outputs at the positions of this step; one that is missing is a KeyError."""
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens  # of the whole step
        for feature in request.mm_features:
            start, length = feature.mm_position.offset, feature.mm_position.length
            if start < stop and start + length > stop - scheduled:
                found = self.inputs.setdefault(name, {})
                found[feature.identifier] = self.cache[feature.identifier]

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens
        return bool(is_computed and not self._only_encodes)
