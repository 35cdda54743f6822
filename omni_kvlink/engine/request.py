"""A request, and a batch of requests that a pipeline runs in one pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from omni_kvlink.engine.sampling import OmniDiffusionSamplingParams, SamplingParamsKey

Prompt: TypeAlias = str | torch.Tensor | Sequence[str | torch.Tensor]
"""A text, an image (uint8 [H, W, 3]), or several of them in order."""


def never() -> bool:
    """False."""
    return False


def always() -> bool:
    """True."""
    return True


@dataclasses.dataclass(eq=False)
class OmniDiffusionRequest:
    """A prompt with an id and sampling params.

    Attributes:
        prompt: texts and images.
        sampling_params: its seed is drawn here if it is None, so that all ranks have the same.
        request_id: unique among the requests that have not ended.
        need_kv_receive: its KV comes from the stage before; without that KV it fails.
        need_kv_transfer: its KV is sent to the next stage when it is done.
        kv_nbytes: size of the KV to come, the largest of any rank; None if it is unknown.
        kv_timeout: seconds until its KV must have come; `kv.timeout` if None.
        past_key_values: its KV in the model's form; set by the runner for one forward pass.
        is_cancelled: read when the runner begins, and between denoising steps.
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
        if self.sampling_params.seed is None:
            self.sampling_params.seed = random.getrandbits(31)

    @property
    def key(self) -> SamplingParamsKey:
        """Requests with equal keys may share a batch."""
        return SamplingParamsKey.of(self.sampling_params)


class DiffusionRequestBatch:
    """Requests with one `SamplingParamsKey`, for one forward pass.

    Raises:
        ValueError: no requests, two of one id, or keys that differ.
    """

    def __init__(self, requests: Sequence[OmniDiffusionRequest]):
        self.requests = list(requests)
        if not self.requests:
            raise ValueError("a batch has at least one request")
        if len(set(self.request_ids)) != len(self.requests):
            raise ValueError(f"two requests of one id in the batch {self.request_ids}")
        odd = [r.request_id for r in self.requests if r.key != self.requests[0].key]
        if odd:
            raise ValueError(f"{', '.join(odd)}: other sampling params than the batch's first")

    @property
    def request_ids(self) -> list[str]:
        """The ids, in the order of the requests."""
        return [request.request_id for request in self.requests]

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
