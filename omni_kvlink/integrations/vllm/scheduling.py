"""The scheduler's part: decides which prompts are sent and loaded, and tracks their ends."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from omni_kvlink.errors import UnavailableError
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.step import CancelledLoad, Load, PromptCache, StepMetadata

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

SEND, FETCH = "do_remote_decode", "do_remote_prefill"
"""vLLM's own keys in `kv_transfer_params`, so that its routers work with this connector."""


class SchedulerCalls(KVConnectorBase_V1):
    """The methods that vLLM calls in the scheduler's process. They decide; the worker's move bytes.

    A request's `kv_transfer_params` may have these keys:

    - do_remote_decode: compute the prompt and send its cache. The output carries the params for
      the consumer's request.
    - do_remote_prefill: load the prompt's cache from a producer.
    - transfer_id: the cache's key; the producer's request id by default. A router that gives both
      requests the same id may send them at the same time.
    - remote_url: the peer that has the cache; the first of `peers` by default.
    - readers: the number of consumers that will read the cache; 1 by default.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        _check_single_rank(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._settings = VllmSettings.read(
            transfer.kv_connector_extra_config, produces=self._produces, consumes=self._consumes
        )
        self._is_async = self._settings.load == "async"
        self._block_size = vllm_config.cache_config.block_size
        self._planned = StepMetadata()
        self._sending: dict[str, Request] = {}
        self._sent: dict[str, str] = {}
        self._requested: set[str] = set()
        self._loading: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens to load beyond the computed ones, and whether the load is asynchronous."""
        if not self._fetches(request) or request.request_id in self._requested:
            return 0, False
        more = max(0, self._tokens_needed(request) - num_computed_tokens)
        return more, self._is_async and more > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the transfers of a request whose blocks were allocated."""
        (block_ids,) = blocks.get_block_ids()
        has_tokens = request.prompt_token_ids is not None  # prompt embeddings have no token digest
        if self._sends(request) and has_tokens and request.request_id not in self._sent:
            self._sending[request.request_id] = request
        if not self._fetches(request) or request.request_id in self._requested:
            return
        self._requested.add(request.request_id)  # if it is preempted, it is recomputed
        if not num_external_tokens:
            self._cancel(request, "the local prefix cache holds everything but its last tokens")
            return
        skip = (self._tokens_needed(request) - num_external_tokens) // self._block_size
        cache = vars(_cache(request, block_ids))
        self._planned.loads.append(
            Load(**cache, url=_url(request), skip=skip, is_async=self._is_async)
        )
        if self._is_async:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """The transfers of the step that was scheduled."""
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduled.keys() & self._sending.keys():
            request = self._sending[request_id]
            if request.num_computed_tokens + scheduled[request_id] >= request.num_prompt_tokens:
                del self._sending[request_id]
                state = scheduler_output.kv_connector_block_state
                cache = _cache(request, state.resolve_block_ids(request_id)[0])
                self._sent[request_id] = cache.key
                self._planned.saves.append(cache)
        step, self._planned = self._planned, StepMetadata()
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the loads that the worker reports as ended, with or without success."""
        self._loading.difference_update(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept until the worker reports them, and the consumer's params."""
        name = request.request_id
        if self._fetches(request):
            if name not in self._requested:
                self._cancel(request, "the request ended before it was scheduled")
            elif name in self._loading:
                self._loading.discard(name)
                self._cancel(request, "the request ended while its cache was loaded")
            self._requested.discard(name)
        if not self._sends(request):
            return False, None
        self._sending.pop(name, None)
        key, reason = self._sent.pop(name, None), str(request.get_finished_reason())
        if key is None or reason not in ("stop", "length", "repetition"):
            self._planned.failed[_key(request)] = f"the request that computes it ended: {reason}"
            return False, None
        if self._settings.delay_free:
            self._planned.held.add(name)
        return self._settings.delay_free, {
            FETCH: True,
            SEND: False,
            "transfer_id": key,
            "remote_url": self._settings.url,
            "readers": _readers(request),
        }

    def _sends(self, request: Request) -> bool:
        return self._produces and bool(_params(request).get(SEND))

    def _fetches(self, request: Request) -> bool:
        is_requested = self._consumes and bool(_params(request).get(FETCH))
        return is_requested and request.prompt_token_ids is not None

    def _tokens_needed(self, request: Request) -> int:
        """Tokens to load before the request runs; for "sync" whole blocks, as in a local hit."""
        tokens: int = request.num_prompt_tokens
        return tokens if self._is_async else (tokens - 1) // self._block_size * self._block_size

    def _cancel(self, request: Request, reason: str) -> None:
        load = (request.request_id, _key(request), _url(request), _readers(request))
        self._planned.cancelled.append(CancelledLoad(*load, reason))


def prompt_digest(request: Request) -> str:
    """SHA-256 of the inputs that a cache depends on besides the weights: tokens, media, LoRA."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = [feature.identifier for feature in request.mm_features]
    text = repr((list(request.prompt_token_ids or ()), media, adapter))
    return hashlib.sha256(text.encode()).hexdigest()


def _cache(request: Request, block_ids: list[int]) -> PromptCache:
    tokens, blocks = request.num_prompt_tokens, list(block_ids)
    digest, readers = prompt_digest(request), _readers(request)
    return PromptCache(request.request_id, _key(request), digest, tokens, blocks, readers)


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params or {}


def _key(request: Request) -> str:
    return str(_params(request).get("transfer_id") or request.request_id)


def _url(request: Request) -> str:
    return str(_params(request).get("remote_url") or "")


def _readers(request: Request) -> int:
    """The number of readers; 0, which the link refuses, if the client's value is not an int."""
    readers = _params(request).get("readers", 1)
    return readers if isinstance(readers, int) else 0


def _check_single_rank(vllm_config: VllmConfig) -> None:
    """Refuse an engine of several ranks: each rank would need a link of its own."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise UnavailableError(
            f"this engine has {parallel.world_size} ranks (tensor parallel "
            f"{parallel.tensor_parallel_size}, pipeline parallel "
            f"{parallel.pipeline_parallel_size}); this connector supports one: "
            "--tensor-parallel-size 1 --pipeline-parallel-size 1"
        )
