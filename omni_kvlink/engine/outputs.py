"""Outputs of a scheduler for an executor, and of an executor for its engine."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.request import OmniDiffusionRequest
from omni_kvlink.engine.tokens.outputs import KVSent, TextResult, TokenOutputs
from omni_kvlink.errors import without_frames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class DiffusionOutput(TextResult):
    """The result of one request: an output or an error, never both.

    `output` has images, uint8 [num_outputs_per_prompt, H, W, 3] on the CPU, or videos, uint8
    [num_outputs_per_prompt, frames, H, W, 3]; `text` is the answer, or what the model wrote in
    think mode; `seconds` are by phase, such as "queued", "execute".
    """

    request_id: str = ""
    output: torch.Tensor | None = None
    error: Exception | None = None
    text: str | None = None
    kv_sent: KVSent | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    stages: list[DiffusionOutput] = dataclasses.field(default_factory=list)  # each stage's
    cached_steps: int | None = None  # passes of its batch in which a cache backend reused anything

    def result(self) -> torch.Tensor:
        """The images or videos; raises the request's error if it has one."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise EngineError(f"request {self.request_id!r} has no image; its `text`: {self.text}")
        return self.output

    def clear_traceback(self) -> None:
        """Drop the frames of `error`, whose locals would keep the KV; logged at level DEBUG."""
        if self.error is not None:
            _log.debug("request %r ended in an error", self.request_id, exc_info=self.error)
            without_frames(self.error)


@dataclasses.dataclass
class RunnerOutput:
    """One request's result, as a worker returns it."""

    request_id: str
    result: DiffusionOutput


@dataclasses.dataclass
class BatchRunnerOutput:
    """The results of a batch, one for each of its requests."""

    runner_outputs: list[RunnerOutput]

    @classmethod
    def of(
        cls, request_ids: Sequence[str], outputs: Mapping[str, DiffusionOutput]
    ) -> BatchRunnerOutput:
        """Results in the order of `request_ids`; raises EngineError unless each has just one."""
        if set(request_ids) != set(outputs):
            raise EngineError(f"results of {sorted(outputs)} for a batch of {list(request_ids)}")
        return cls([RunnerOutput(key, outputs[key]) for key in request_ids])

    def as_model_output(self) -> ModelRunnerOutput:
        """The same as an executor returns it."""
        results = {output.request_id: output.result for output in self.runner_outputs}
        return ModelRunnerOutput(list(results), [r.output for r in results.values()], results)


@dataclasses.dataclass
class ModelRunnerOutput(TokenOutputs):
    """An executor's output of a step: images, or hidden states of an AR stage, if any.

    `results` has errors, texts and `kv_sent`; a request that has just an output may be missing.
    `req_id_to_index`, the position of each request, is made of `req_ids` if it is not given.
    """

    req_ids: list[str]
    pooler_output: list[torch.Tensor | None]
    results: dict[str, DiffusionOutput] = dataclasses.field(default_factory=dict)
    req_id_to_index: dict[str, int] = dataclasses.field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        index = {request_id: number for number, request_id in enumerate(self.req_ids)}
        if self.req_id_to_index not in ({}, index):
            raise ValueError(f"req_id_to_index {self.req_id_to_index}: req_ids say {index}")
        self.req_id_to_index = index

    @classmethod
    def failed(cls, request_ids: list[str], error: Exception) -> ModelRunnerOutput:
        """The same error for each of some requests."""
        results = {key: DiffusionOutput(key, error=error) for key in request_ids}
        return cls(request_ids, [None] * len(results), results)

    def result_of(self, request_id: str) -> DiffusionOutput:
        """The result of a scheduled request: an EngineError if there is none."""
        if request_id in self.results:
            return self.results[request_id]
        if request_id in self.req_ids:
            return DiffusionOutput(request_id, self.pooler_output[self.req_id_to_index[request_id]])
        text = f"no result for {request_id!r} among {', '.join(self.req_ids)}"
        return DiffusionOutput(request_id, error=EngineError(text))


@dataclasses.dataclass
class DiffusionSchedulerOutput:
    """The requests of a step; they make one batch."""

    requests: list[OmniDiffusionRequest]

    @property
    def request_ids(self) -> list[str]:
        """The ids, in the order of the requests."""
        return [request.request_id for request in self.requests]

    @property
    def is_empty(self) -> bool:
        """Whether nothing can run now."""
        return not self.request_ids


@dataclasses.dataclass
class StepSchedulerOutput(DiffusionSchedulerOutput):
    """A step: `requests` begin with it, `cached_request_ids` go on.

    `aborted_request_ids` are those of the latter that a diffusion stage ends before the step.
    """

    cached_request_ids: list[str] = dataclasses.field(default_factory=list, kw_only=True)
    aborted_request_ids: list[str] = dataclasses.field(default_factory=list, kw_only=True)

    @property
    def request_ids(self) -> list[str]:
        """The ids of all requests of the step, in the order of their arrival."""
        return [*self.cached_request_ids, *super().request_ids]


@dataclasses.dataclass
class ARSchedulerOutput(StepSchedulerOutput):
    """A step of an AR stage.

    `block_ids` has the blocks of each new request's KV, by branch, in token order. The first
    `num_computed_tokens` of the first branch are in them already; none if the request is missing.
    """

    block_ids: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
    num_computed_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
