"""A request, and a batch of requests that a pipeline runs in one pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from omni_kvlink.engine.inputs.prompt import EmbedsPrompt, Prompt
from omni_kvlink.engine.lora.adapter import ActiveLoRA
from omni_kvlink.engine.sampling import (
    STEP_KEY_FIELDS,
    OmniDiffusionSamplingParams,
    SamplingParamsKey,
)


def not_cancelled() -> bool:
    """Return False, the answer of requests that nothing can cancel."""
    return False


@dataclasses.dataclass(eq=False)
class OmniDiffusionRequest:
    """A prompt with sampling params, and an id that no other request has meanwhile.

    A seed that is None is drawn here, so that all ranks have the same.
    """

    prompt: Prompt
    sampling_params: OmniDiffusionSamplingParams
    request_id: str
    need_kv_receive: bool = False  # its KV comes from the stage before; without that KV it fails
    need_kv_transfer: bool = False  # its KV is sent to the next stage when it is done
    kv_nbytes: int | None = None  # size of the KV to come, the largest of any rank; if known
    kv_timeout: float | None = None  # seconds until its KV must have come; `kv.timeout` if None
    need_hidden_receive: bool = False  # so do its hidden states
    hidden_states: torch.Tensor | None = None  # [tokens, hidden]; set by the runner for one pass
    emit: Any = None  # takes its events; set where it runs
    token_log: Any = None  # the `TokenLog` of its text; set by the runner
    past_key_values: Any = None  # its KV in the model's form; set by the runner for one pass
    kv_stream: Any = None  # the `KVStream` that sends its KV; set by an AR stage's runner
    lora: ActiveLoRA | None = None  # the adapter of its pass; set by the runner
    is_cancelled: Callable[[], bool] = not_cancelled  # read before a batch and between steps

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError("request_id: a string that is not empty")
        if self.sampling_params.seed is None:
            self.sampling_params.seed = random.getrandbits(31)

    @property
    def key(self) -> SamplingParamsKey:
        """Requests with equal keys may share a batch."""
        layout = self.prompt.layout if isinstance(self.prompt, EmbedsPrompt) else ()
        return SamplingParamsKey((*SamplingParamsKey.of(self.sampling_params), *layout))

    @property
    def step_key(self) -> SamplingParamsKey:
        """Requests with equal keys may share a denoising step."""
        return SamplingParamsKey.of(self.sampling_params, STEP_KEY_FIELDS)


class DiffusionRequestBatch:
    """Requests of different ids with one `SamplingParamsKey`, for one forward pass."""

    kv_sender_info: None = None  # no address of a sender: a request's KV is found by its id

    def __init__(self, requests: Sequence[OmniDiffusionRequest]):
        self.requests = list(requests)
        if not self.requests:
            raise ValueError("a batch has at least one request")
        if len(set(self.request_ids)) != len(self.requests):
            raise ValueError(f"two requests of one id in the batch {self.request_ids}")
        if odd := [r.request_id for r in self.requests if r.key != self.requests[0].key]:
            raise ValueError(f"{', '.join(odd)}: other sampling params than the batch's first")

    @property
    def request_ids(self) -> list[str]:
        """The ids, in the order of the requests."""
        return [request.request_id for request in self.requests]

    @property
    def request_id(self) -> str:
        """The only request's id; ValueError if there are several."""
        if len(self) > 1:
            raise ValueError(f"{self!r} has several ids: request_ids")
        return self.requests[0].request_id

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, in the order of the requests."""
        return [request.prompt for request in self.requests]

    @property
    def sampling_params(self) -> OmniDiffusionSamplingParams:
        """The first request's; those of its key are the same in all requests, seeds are not."""
        return self.requests[0].sampling_params

    def __iter__(self) -> Iterator[OmniDiffusionRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"<DiffusionRequestBatch {', '.join(self.request_ids)}>"
