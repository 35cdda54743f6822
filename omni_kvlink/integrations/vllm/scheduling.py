"""The scheduler's part: decides which prompts are sent and loaded, and tracks their ends."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.integrations.vllm.step import CancelledLoad, Load, PromptCache, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from omni_kvlink.integrations.vllm.settings import VllmSettings

SEND, FETCH = "do_remote_decode", "do_remote_prefill"
"""vLLM's own keys in `kv_transfer_params`, so that its routers work with this connector."""


class TransferScheduler:
    """The transfers of one engine's scheduler. It decides; the worker's part moves the bytes.

    A request's `kv_transfer_params` may have these keys:

    - do_remote_decode: compute the prompt and send its cache. The output carries the params for
      the consumer's request.
    - do_remote_prefill: load the prompt's cache from a producer.
    - transfer_id: the cache's key; the producer's request id by default. A router that gives both
      requests the same id may send them at the same time.
    - remote_url: the peer that has the cache; the first of `peers` by default.
    - readers: the number of consumers that will read the cache; 1 by default.
    """

    def __init__(self, settings: VllmSettings, *, block_size: int, produces: bool, consumes: bool):
        self._settings, self._block_size = settings, block_size
        self._produces, self._consumes = produces, consumes
        self._step = StepMetadata()
        self._sending: dict[str, Request] = {}
        self._sent: dict[str, str] = {}
        self._requested: set[str] = set()
        self._loading: set[str] = set()

    @property
    def _is_async(self) -> bool:
        return self._settings.load == "async"

    def matched(self, request: Request, computed: int) -> tuple[int, bool]:
        """Tokens that a producer has beyond the first `computed`, and whether they load later."""
        if not self._fetches(request) or request.request_id in self._requested:
            return 0, False
        more = max(0, self._tokens_needed(request) - computed)
        return more, self._is_async and more > 0

    def allocated(self, request: Request, block_ids: list[int], external: int) -> None:
        """Plan the transfers of a request; `external` of its tokens are loaded into `block_ids`."""
        has_tokens = request.prompt_token_ids is not None  # prompt embeddings have no token digest
        if self._sends(request) and has_tokens and request.request_id not in self._sent:
            self._sending[request.request_id] = request
        if not self._fetches(request) or request.request_id in self._requested:
            return
        self._requested.add(
            request.request_id
        )  # a preempted request is recomputed, not loaded again
        if not external:
            self._cancel(request, "the local prefix cache holds everything but its last tokens")
            return
        load = Load(
            **vars(self._cache(request, block_ids)),
            url=_url(request),
            skip=(self._tokens_needed(request) - external) // self._block_size,
            is_async=self._is_async,
        )
        self._step.loads.append(load)
        if load.is_async:
            self._loading.add(request.request_id)

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """The metadata of a scheduled step for the worker's part."""
        for request_id in output.num_scheduled_tokens.keys() & self._sending.keys():
            request = self._sending[request_id]
            done = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            if done >= request.num_prompt_tokens:
                del self._sending[request_id]
                state = output.kv_connector_block_state
                cache = self._cache(request, state.resolve_block_ids(request_id)[0])
                self._sent[request_id] = cache.key
                self._step.saves.append(cache)
        step, self._step = self._step, StepMetadata()
        return step

    def loaded(self, request_ids: set[str]) -> None:
        """Record loads that have ended, with or without success."""
        self._loading -= request_ids

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept until the worker reports them, and the client's params."""
        name, params = request.request_id, _params(request)
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
        key = self._sent.pop(name, None)
        if key is None or not _finished_normally(request):
            reason = request.get_finished_reason()
            self._step.failed[_key(request)] = f"the request that computes it ended: {reason}"
            return False, None
        if self._settings.delay_free:
            self._step.held.add(name)
        return self._settings.delay_free, {
            FETCH: True,
            SEND: False,
            "transfer_id": key,
            "remote_url": self._settings.url,
            "readers": _readers(params),
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
        readers = _readers(_params(request))
        cancelled = CancelledLoad(request.request_id, _key(request), _url(request), readers, reason)
        self._step.cancelled.append(cancelled)

    def _cache(self, request: Request, block_ids: list[int]) -> PromptCache:
        return PromptCache(
            request.request_id,
            _key(request),
            prompt_digest(request),
            request.num_prompt_tokens,
            list(block_ids),
            _readers(_params(request)),
        )


def prompt_digest(request: Request) -> str:
    """SHA-256 of the inputs that a cache depends on besides the weights: tokens, media, LoRA."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = [feature.identifier for feature in request.mm_features]
    text = repr((list(request.prompt_token_ids or ()), media, adapter))
    return hashlib.sha256(text.encode()).hexdigest()


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params or {}


def _key(request: Request) -> str:
    return str(_params(request).get("transfer_id") or request.request_id)


def _url(request: Request) -> str:
    return str(_params(request).get("remote_url") or "")


def _readers(params: dict[str, Any]) -> int:
    """The number of readers; 0, which the link refuses, if the client's value is not an int."""
    readers = params.get("readers", 1)
    return readers if isinstance(readers, int) else 0


def _finished_normally(request: Request) -> bool:
    return str(request.get_finished_reason()) in ("stop", "length", "repetition")
