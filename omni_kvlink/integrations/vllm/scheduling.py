"""The scheduler's part: decides which prompts are sent and loaded, and tracks their ends."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from omni_kvlink.errors import SchemaError
from omni_kvlink.integrations.vllm.adapters import AdapterIdentities
from omni_kvlink.integrations.vllm.groups import CacheGroups, KeptBlocks
from omni_kvlink.integrations.vllm.identity import prompt_identity
from omni_kvlink.integrations.vllm.params import FETCH, SEND, TransferParams, is_answered
from omni_kvlink.integrations.vllm.ranks import EngineRank, engine_url
from omni_kvlink.integrations.vllm.reads import PayloadReads, ReadEnd
from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.step import (
    CancelledLoad,
    FailedLoads,
    FailedSave,
    Load,
    PromptCache,
    StepMetadata,
)
from omni_kvlink.integrations.vllm.versions import (
    cache_hit_sources,
    supports_invalid_blocks_of_groups,
    warn_if_untested,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(f"vllm.{__name__}")

_NO_TRANSFER = TransferParams()


class Prompt(NamedTuple):
    """A prompt as its client sent it."""

    tokens: int
    inputs: dict[str, str]  # see `prompt_identity`


class SchedulerCalls(KVConnectorBase_V1, SupportsHMA):
    """The methods that vLLM calls in the scheduler's process. They decide; the worker's move bytes.

    A request's `kv_transfer_params` may have these keys:

    - do_remote_decode: compute the prompt and send its cache. The output carries the params for
      the consumer's request.
    - do_remote_prefill: load the prompt's cache from a producer.
    - transfer_id: the cache's key; the producer's request id by default. A router that gives both
      requests the same id may send them at the same time.
    - remote_url: the peer that has the cache; the first URL of `peers` by default.
    - readers: the number of requests that will read the cache; 1 by default.
    - remote_request_id, remote_num_tokens: with do_remote_decode, an earlier turn's cache, which
      a decode engine offers (`offer_decoded`): loaded from remote_url before the rest is computed.

    A wrong value is the error of its request alone: a consumer reports its load as failed, a
    producer does not send its cache.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        warn_if_untested()
        self._rank = EngineRank.of(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._produces, self._consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        settings = VllmSettings.of(
            transfer.kv_connector_extra_config, produces=self._produces, consumes=self._consumes
        )
        url = engine_url(settings.url, vllm_config)
        self._settings = dataclasses.replace(settings, url=url)
        self._settings.check_ranks(self._rank, produces=self._produces, consumes=self._consumes)
        self._adapters = AdapterIdentities(settings.adapters, vllm_config)
        self._is_async = self._settings.load == "async"
        self._groups = CacheGroups.of(kv_cache_config)
        if self._consumes and not self._is_async:
            _check_sync(self._groups, transfer.kv_load_failure_policy)
        self._planned = StepMetadata()
        self._params: dict[str, TransferParams] = {}
        self._reads: dict[tuple[str, str], PayloadReads] = {}
        self._shortened: dict[str, Prompt] = {}
        self._kept = KeptBlocks(self._groups)
        self._sending: dict[str, Request] = {}
        self._sent: dict[str, str] = {}
        self._requested: set[str] = set()
        self._loading: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        """Read what the request wants, before it is scheduled."""
        params = TransferParams.read(request, produces=self._produces, consumes=self._consumes)
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None  # vLLM 0.32 reads it next, and would end
        adapter, error = "", params.error
        try:
            lora = request.lora_request if params.sends or params.fetches else None
            adapter = self._adapters.identify(lora)
        except SchemaError as unknown:
            error = error or str(unknown)
        error = error or self._refusal(request, params)
        url = params.url or self._settings.default_peer
        params = dataclasses.replace(params, url=url, adapter=adapter, error=error)
        self._params[request.request_id] = params
        if params.sends and self._groups.has_state and not error:
            self._shorten(request, adapter)
        if params.fetches and not error:
            reads = self._reads.setdefault((url, params.source), PayloadReads())
            reads.add(request, params.source_readers)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to load beyond the computed ones, and whether the load is asynchronous.

        None: the request waits for another one, which loads the cache that both name.
        """
        params = self._params_of(request)
        if not params.fetches or request.request_id in self._requested:
            return 0, False
        num_external_tokens = max(0, self._tokens_needed(request) - num_computed_tokens)
        reads = self._reads_of(request)
        if num_external_tokens and reads is not None and not reads.unused:
            if any(map(_is_loading, reads.taken.values())):
                return None, False
            prefix = self._groups.prefix(self._source_tokens(request))  # of the longest local hit
            if num_computed_tokens >= prefix:  # the others' blocks are here
                return 0, False
        return num_external_tokens, self._loads_async(request) and num_external_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the transfers of a request whose blocks were allocated."""
        name, params = request.request_id, self._params_of(request)
        if params.sends and not params.error and name not in self._sent:
            self._sending[name] = request
        if not params.fetches or name in self._requested:
            return
        self._requested.add(name)  # if it is preempted, it is recomputed
        if not num_external_tokens:
            self._give_up(request, "the local prefix cache holds everything but its last tokens")
            return
        error, is_async, reads = params.error, self._loads_async(request), self._reads_of(request)
        if reads is not None and not reads.take(request):
            error = (
                f"it has readers={reads.readers}, which are other requests of this engine "
                f"({', '.join(map(repr, reads.taken)):.200}), and their blocks are not in the "
                "prefix cache: send each request's cache, or readers= so many"
            )
        local = self._tokens_needed(request) - num_external_tokens
        cache = vars(self._source(request, blocks.get_block_ids()))
        self._planned.loads.append(
            Load(**cache, url=params.url, local=local, is_async=is_async, error=error)
        )
        if is_async:
            self._loading.add(name)
        if params.error:
            self._give_up(request, params.error)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Loaded tokens by their source, for vLLM's metrics: all come from another engine."""
        return cache_hit_sources(num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """The transfers of the step that was scheduled."""
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduled.keys() & self._sending.keys():
            request = self._sending[request_id]
            computed = request.num_computed_tokens + scheduled[request_id]
            tables = scheduler_output.kv_connector_block_state.resolve_block_ids(request_id)
            if cache := self._cache_after(request, computed, tables):
                del self._sending[request_id]
                self._sent[request_id] = cache.key
                self._planned.saves.append(cache)
        self._planned.preempted |= self._sent.keys() & (scheduler_output.preempted_req_ids or ())
        step, self._planned = self._planned, StepMetadata()
        return step

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take references to the pool's blocks from now on; see `KeptBlocks`."""
        self._kept.pool = gpu_block_pool

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Record the transfers that all ranks report as ended; end the loads that one failed at."""
        self._loading.difference_update(connector_output.finished_recving or ())
        for request_id in connector_output.finished_sending or ():
            self._kept.release(request_id)
        failed = connector_output.kv_connector_worker_meta
        if isinstance(failed, FailedLoads):
            for name in failed.request_ids & self._loading:
                self._end_load(name)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished_all_groups`, for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept until the worker reports them, and the consumer's params."""
        name, params = request.request_id, self._params_of(request)
        if params.fetches:
            if name not in self._requested:
                self._give_up(request, "the request ended before it was scheduled")
            elif name in self._loading and not _has_failed(request, params):
                self._give_up(request, "the request ended while its cache was loaded")
            elif name in self._loading and not params.error:
                self._end_load(name)
            self._loading.discard(name)
            self._requested.discard(name)
        reads = self._reads_of(request)
        if reads is not None and reads.remove(request):
            del self._reads[params.url, params.source]
        self._params.pop(name, None)
        self._shortened.pop(name, None)
        is_held, answer = False, None
        if params.sends:
            is_held, answer = self._end_save(request, params)
        elif params.fetches and self._settings.offer_decoded:
            is_held, answer = self._offer(request, params.adapter, block_ids)
        if not is_held:
            self._kept.release(name)
        return is_held, answer

    def _end_save(
        self, request: Request, params: TransferParams
    ) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self._sending.pop(name, None)
        key = self._sent.pop(name, None)
        if key is None or not is_answered(request):
            ending = str(request.get_finished_reason())
            reason = params.error or f"the request that computes it ended: {ending}"
            if params.error:
                log.error("the cache of request %.200r is not sent: %s", name, reason)
            if params.key:
                self._planned.failed.append(FailedSave(name, params.key, reason))
            return False, None
        if self._settings.delay_free:
            self._planned.held.add(name)
        return self._settings.delay_free, {
            FETCH: True,
            SEND: False,
            "transfer_id": key,
            "remote_url": self._settings.url,
            "readers": params.readers,
        }

    def _offer(
        self, request: Request, adapter: str, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the whole blocks of a prompt and its answer to the next turn's prefill."""
        name, size = request.request_id, self._groups.alignment
        tokens = (request.num_tokens - 1) // size * size  # the last one was not computed
        can_offer = self._produces and self._groups.is_whole
        can_offer &= request.prompt_embeds is None  # the next prompt's are more
        if not (tokens and can_offer and is_answered(request)):
            return False, None
        inputs = prompt_identity(request, adapter, tokens)
        cache = PromptCache(name, name, inputs, tokens, [[*table] for table in block_ids], 1)
        self._planned.offers.append(cache)
        self._planned.held.add(name)
        return True, {
            SEND: True,
            FETCH: False,
            "remote_request_id": name,
            "remote_url": self._settings.url,
            "remote_num_tokens": tokens,
        }

    def _refusal(self, request: Request, params: TransferParams) -> str:
        """Why the caches of this engine's model do not allow the transfers, or ""."""
        if params.sends and params.fetches and self._groups.has_state:
            return "a request that loads a recurrent state cannot send one; use two requests"
        if params.sends and request.prompt_embeds is not None and self._groups.has_state:
            return "a recurrent state of a prompt of embeddings is not sent; send its tokens"
        if params.tokens and not self._groups.is_whole:
            return "remote_num_tokens needs a model with full attention in all layers"
        return ""

    def _params_of(self, request: Request) -> TransferParams:
        return self._params.get(request.request_id, _NO_TRANSFER)

    def _reads_of(self, request: Request) -> PayloadReads | None:
        """The reads of the cache that a request names; None if it names none."""
        params = self._params_of(request)
        named = params.fetches and not params.error
        return self._reads.get((params.url, params.source)) if named else None

    def _loads_async(self, request: Request) -> bool:
        """Wrong params end in an asynchronous load that fails: the engine's policy decides then."""
        return self._is_async or bool(self._params_of(request).error)

    def _tokens_needed(self, request: Request) -> int:
        """Tokens to load before the request runs; for "sync" those of a local hit."""
        is_async = self._loads_async(request)
        return self._groups.position(self._source_tokens(request), is_async=is_async)

    def _source_tokens(self, request: Request) -> int:
        """Tokens of the cache that a request loads: its prompt's, or an earlier turn's."""
        return self._params_of(request).tokens or int(request.num_prompt_tokens)

    def _shorten(self, request: Request, adapter: str) -> None:
        """Leave the prompt's last token to the consumer, which computes it from the state before.

        vLLM's own connector for recurrent states does the same; the token that is sampled here has
        no use, and there is only one.
        """
        self._shortened[request.request_id] = _prompt(request, adapter)
        if request.num_prompt_tokens > 1:
            request.prompt_token_ids = request.prompt_token_ids[:-1]  # the list may be the client's
            request._all_token_ids.pop()
            request.num_prompt_tokens -= 1
        request.max_tokens = 1

    def _give_up(self, request: Request, reason: str) -> None:
        """Plan what becomes of the read of a request that does not need its cache any more."""
        reads, params = self._reads_of(request), self._params_of(request)
        if reads is not None:
            end = reads.give_up(request)
        else:
            end = ReadEnd.DECLINE if params.error and params.source else ReadEnd.NONE
        if end is not ReadEnd.NONE:
            self._cancel(request.request_id, reason, declines=end is ReadEnd.DECLINE)

    def _end_load(self, name: str) -> None:
        """End a load that one rank failed at on the others; a rank that has ended it ignores it."""
        if self._rank.world_size > 1:
            self._cancel(name, "another rank could not load its part", declines=True)

    def _cancel(self, name: str, reason: str, *, declines: bool) -> None:
        params = self._params[name]
        load = (name, params.source, params.url, params.source_readers, reason)
        self._planned.cancelled.append(CancelledLoad(*load, declines))

    def _cache_after(
        self, request: Request, computed: int, tables: tuple[list[int], ...]
    ) -> PromptCache | None:
        """The cache of a prompt, once the pass that ends after `computed` tokens computes it."""
        shortened = self._shortened.get(request.request_id)
        tokens = shortened.tokens if shortened else request.num_prompt_tokens
        prefix, is_over = self._groups.prefix(tokens), computed >= request.num_prompt_tokens
        positions = [prefix] if computed >= prefix else []
        if is_over:
            positions.append(self._groups.position(tokens, is_async=True))
        blocks = self._kept.keep(request.request_id, tables, positions)
        return self._cache(request, blocks) if is_over else None

    def _source(self, request: Request, block_ids: Sequence[Sequence[int]]) -> PromptCache:
        """The cache that a request loads, and its blocks here."""
        params, cache = self._params_of(request), self._cache(request, block_ids)
        if not params.tokens:
            return cache
        inputs, tokens = prompt_identity(request, params.adapter, params.tokens), params.tokens
        return dataclasses.replace(
            cache, key=params.source, inputs=inputs, tokens=tokens, readers=params.source_readers
        )

    def _cache(self, request: Request, block_ids: Sequence[Sequence[int]]) -> PromptCache:
        name, params = request.request_id, self._params_of(request)
        prompt = self._shortened.get(name) or _prompt(request, params.adapter)
        blocks = [[*table] for table in block_ids]
        return PromptCache(name, params.key, prompt.inputs, prompt.tokens, blocks, params.readers)


def _prompt(request: Request, adapter: str) -> Prompt:
    return Prompt(request.num_prompt_tokens, prompt_identity(request, adapter))


def _has_failed(request: Request, params: TransferParams) -> bool:
    """Whether the request ends because its load failed; the worker has handled that."""
    return bool(params.error) or request.status == RequestStatus.FINISHED_ERROR


def _is_loading(request: Request) -> bool:
    """Whether an asynchronous load of the request has not ended, for the scheduler."""
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


def _check_sync(groups: CacheGroups, policy: str) -> None:
    """Refuse the synchronous loads that vLLM cannot take up, or not recover from."""
    if groups.has_state:
        raise SchemaError(
            'kv_connector_extra_config: load "sync": vLLM copies a recurrent state (MambaSpec) '
            'before it is loaded; set "load": "async"'
        )
    if groups.tables > 1 and not supports_invalid_blocks_of_groups():
        raise SchemaError(
            'kv_connector_extra_config: load "sync": this version of vLLM ends when a synchronous '
            'load fails in an engine with several groups of caches; set "load": "async", or start '
            "both engines with --disable-hybrid-kv-cache-manager"
        )
    if policy == "recompute" and not groups.is_whole:
        raise SchemaError(
            'kv_connector_extra_config: load "sync": after a failed load vLLM would compute a '
            "request without the blocks before its window; set kv_load_failure_policy to "
            '"fail", or "load": "async"'
        )
