"""One request, and the batch that a pipeline runs at once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams, SamplingParamsKey

Prompt: TypeAlias = str | torch.Tensor | Sequence[str | torch.Tensor]
"""Texts and images (uint8 [H, W, 3]) in their order."""


def never() -> bool:
    return False


def always() -> bool:
    return True


@dataclasses.dataclass(eq=False)
class OmniDiffusionRequest:
    """One prompt, one id, one set of wishes.

    Attributes:
        need_kv_receive: its KV comes from the stage before; without it nothing is painted.
        need_kv_transfer: its KV goes on to the next stage when it is done.
        kv_nbytes: of the KV to come, at the most to one rank, where the stage before said it.
        kv_timeout: seconds until its KV must be there; the engine's choice if None.
        past_key_values: its KV in the model's own form; put there by the runner for one forward.
        is_cancelled: asked when the runner begins; then between denoising steps, of the runner.
    """

    prompt: Prompt
    sampling_params: OmniDiffusionSamplingParams
    request_id: str
    need_kv_receive: bool = False
    need_kv_transfer: bool = False
    kv_nbytes: int | None = None
    kv_timeout: float | None = None
    past_key_values: Any = None
    is_cancelled: Callable[[], bool] = never

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError("request_id: a string that is not empty")
        if self.sampling_params.seed is None:  # here, so that all ranks draw the same noise
            self.sampling_params.seed = random.getrandbits(31)

    @property
    def key(self) -> SamplingParamsKey:
        """Which requests it may share a batch with."""
        return SamplingParamsKey.of(self.sampling_params)


class DiffusionRequestBatch:
    """Requests with one `SamplingParamsKey`, for one forward pass.

    Raises:
        ValueError: none, two of one id, or keys that differ.
    """

    def __init__(self, requests: Sequence[OmniDiffusionRequest]):
        self.requests = list(requests)
        if not self.requests:
            raise ValueError("a batch has at least one request")
        if len(set(self.request_ids)) != len(self.requests):
            raise ValueError(f"a request stands twice in the batch {self.request_ids}")
        odd = [r.request_id for r in self.requests if r.key != self.requests[0].key]
        if odd:
            raise ValueError(f"{', '.join(odd)}: other sampling params than the batch's first")

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def prompts(self) -> list[Prompt]:
        return [request.prompt for request in self.requests]

    @property
    def sampling_params(self) -> OmniDiffusionSamplingParams:
        """What all of them share is the same in the first; seeds are not shared."""
        return self.requests[0].sampling_params

    @property
    def sampling_params_list(self) -> list[OmniDiffusionSamplingParams]:
        return [request.sampling_params for request in self.requests]

    def __iter__(self) -> Iterator[OmniDiffusionRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"<DiffusionRequestBatch {', '.join(self.request_ids)}>"
