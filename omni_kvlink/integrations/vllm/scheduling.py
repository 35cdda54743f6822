"""The scheduler's half: which prompts are sent, which are fetched, and when that ended."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from omni_kvlink.integrations.vllm.settings import VllmSettings
from omni_kvlink.integrations.vllm.step import Cache, Drop, Load, Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

SEND, FETCH = "do_remote_decode", "do_remote_prefill"
"""vLLM's own words in `kv_transfer_params`, so that its routers need not know this connector."""


class Scheduling:
    """What one engine's scheduler knows of its transfers; decides, and moves nothing.

    A request's `kv_transfer_params`:
        do_remote_decode: compute the prompt and send its cache. What comes back with the output is
            what the consumer's request needs.
        do_remote_prefill: fetch the prompt's cache.
        transfer_id: names the cache; the engine's request id where the producer is not given one.
            Whoever gives both sides one may send them at the same time.
        remote_url: which of the peers has it; the first if left out.
        readers: how many consumers will read it; 1.
    """

    def __init__(self, settings: VllmSettings, *, block_size: int, produces: bool, consumes: bool):
        self._settings, self._block_size = settings, block_size
        self._produces, self._consumes = produces, consumes
        self._step = Step()
        self._sending: dict[str, Request] = {}
        self._sent: dict[str, str] = {}
        self._asked: set[str] = set()
        self._loading: set[str] = set()

    @property
    def _is_async(self) -> bool:
        return self._settings.load == "async"

    def matched(self, request: Request, computed: int) -> tuple[int, bool]:
        """Tokens that a producer has beyond the `computed` first ones, and if they come later."""
        if not self._fetches(request) or request.request_id in self._asked:
            return 0, False
        more = max(0, self._reach(request) - computed)
        return more, self._is_async and more > 0

    def allocated(self, request: Request, block_ids: list[int], external: int) -> None:
        """The request has its blocks; `external` of its tokens are to be fetched into them."""
        has_tokens = request.prompt_token_ids is not None  # embeddings have no digest
        if self._sends(request) and has_tokens and request.request_id not in self._sent:
            self._sending[request.request_id] = request
        if not self._fetches(request) or request.request_id in self._asked:
            return
        self._asked.add(request.request_id)  # what is computed again is not fetched again
        if not external:
            self._drop(request, "everything but its last tokens is in the prefix cache here")
            return
        load = Load(
            **vars(self._cache(request, block_ids)),
            url=_url(request),
            skip=(self._reach(request) - external) // self._block_size,
            is_async=self._is_async,
        )
        self._step.loads.append(load)
        if load.is_async:
            self._loading.add(request.request_id)

    def step(self, output: SchedulerOutput) -> Step:
        """What the worker's half shall do in this step."""
        for request_id in output.num_scheduled_tokens.keys() & self._sending.keys():
            request = self._sending[request_id]
            done = request.num_computed_tokens + output.num_scheduled_tokens[request_id]
            if done >= request.num_prompt_tokens:
                del self._sending[request_id]
                state = output.kv_connector_block_state
                cache = self._cache(request, state.resolve_block_ids(request_id)[0])
                self._sent[request_id] = cache.key
                self._step.saves.append(cache)
        step, self._step = self._step, Step()
        return step

    def loaded(self, request_ids: set[str]) -> None:
        """The worker's half is done with these, however it ended."""
        self._loading -= request_ids

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay until the worker's half says so, and what the client gets."""
        name, params = request.request_id, _params(request)
        if self._fetches(request):
            if name not in self._asked:
                self._drop(request, "the request ended before it was scheduled")
            elif name in self._loading:
                self._loading.discard(name)
                self._drop(request, "the request ended while its cache was fetched")
            self._asked.discard(name)
        if not self._sends(request):
            return False, None
        self._sending.pop(name, None)
        key = self._sent.pop(name, None)
        if key is None or not _ended_well(request):
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
        wanted = self._consumes and bool(_params(request).get(FETCH))
        return wanted and request.prompt_token_ids is not None

    def _reach(self, request: Request) -> int:
        """Tokens to have before the request is computed; in step with it, as a local hit has."""
        tokens: int = request.num_prompt_tokens
        return tokens if self._is_async else (tokens - 1) // self._block_size * self._block_size

    def _drop(self, request: Request, reason: str) -> None:
        readers = _readers(_params(request))
        drop = Drop(request.request_id, _key(request), _url(request), readers, reason)
        self._step.drops.append(drop)

    def _cache(self, request: Request, block_ids: list[int]) -> Cache:
        return Cache(
            request.request_id,
            _key(request),
            prompt_digest(request),
            request.num_prompt_tokens,
            list(block_ids),
            _readers(_params(request)),
        )


def prompt_digest(request: Request) -> str:
    """What the cache depends on besides the weights: tokens, media, adapter; SHA-256."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    media = [feature.identifier for feature in request.mm_features]
    said = repr((list(request.prompt_token_ids or ()), media, adapter))
    return hashlib.sha256(said.encode()).hexdigest()


def _params(request: Request) -> dict[str, Any]:
    return request.kv_transfer_params or {}


def _key(request: Request) -> str:
    return str(_params(request).get("transfer_id") or request.request_id)


def _url(request: Request) -> str:
    return str(_params(request).get("remote_url") or "")


def _readers(params: dict[str, Any]) -> int:
    """What a client says may be anything; the link refuses what is no number of readers."""
    readers = params.get("readers", 1)
    return readers if isinstance(readers, int) else 0


def _ended_well(request: Request) -> bool:
    return str(request.get_finished_reason()) in ("stop", "length", "repetition")
