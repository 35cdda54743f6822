"""What comes back: from a pipeline, a worker, a runner; and what a scheduler hands out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.request import OmniDiffusionRequest


@dataclasses.dataclass(frozen=True)
class KVSent:
    """A request's KV that went to the next stage.

    Attributes:
        nbytes: the most that one rank of that stage gets, as `OmniDiffusionRequest.kv_nbytes` wants
            it.
        image_shape: (height, width) in pixels of the image to be made of it.
        tokens: of its longest context.
    """

    nbytes: int
    image_shape: tuple[int, int] | None = None
    tokens: int = 0


@dataclasses.dataclass
class DiffusionOutput:
    """What became of one request: an output or an error, never both.

    Attributes:
        output: images, uint8 [num_outputs_per_prompt, H, W, 3] on the CPU.
        error: why there is none.
        text: what the model wrote, in think mode.
        kv_sent: its KV went to the next stage.
        seconds: by phase, such as "queued", "kv_wait", "execute".
        stages: what each stage gave, where there are several.
    """

    request_id: str = ""
    output: torch.Tensor | None = None
    error: Exception | None = None
    text: str | None = None
    kv_sent: KVSent | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    stages: list[DiffusionOutput] = dataclasses.field(default_factory=list)

    def result(self) -> torch.Tensor:
        """The images; raises the request's error if it has one."""
        if self.error is not None:
            raise self.error
        if self.output is None:
            raise EngineError(f"request {self.request_id!r} has no image: no stage was to paint it")
        return self.output


@dataclasses.dataclass
class RunnerOutput:
    """One request's result, on its way from a worker."""

    request_id: str
    result: DiffusionOutput


@dataclasses.dataclass
class BatchRunnerOutput:
    """The results of a batch, one for each request that was in it."""

    runner_outputs: list[RunnerOutput]

    @classmethod
    def of(
        cls, request_ids: Sequence[str], outputs: Mapping[str, DiffusionOutput]
    ) -> BatchRunnerOutput:
        """Results in the batch's order.

        Raises:
            EngineError: a request has none, or one came that was not in the batch.
        """
        if set(request_ids) != set(outputs):
            raise EngineError(f"results of {sorted(outputs)} for a batch of {list(request_ids)}")
        return cls([RunnerOutput(key, outputs[key]) for key in request_ids])

    def as_model_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            req_ids=[output.request_id for output in self.runner_outputs],
            pooler_output=[output.result.output for output in self.runner_outputs],
            results={output.request_id: output.result for output in self.runner_outputs},
        )


@dataclasses.dataclass
class ModelRunnerOutput:
    """What `EngineCore` sees of a step, whichever stage ran it.

    Attributes:
        req_ids: of the scheduled requests.
        pooler_output: images of a diffusion stage, hidden states of an AR stage; None where there
            are none.
        results: errors, texts and what was sent on; a request may be missing that has just an
            output.
    """

    req_ids: list[str]
    pooler_output: list[torch.Tensor | None]
    results: dict[str, DiffusionOutput] = dataclasses.field(default_factory=dict)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {request_id: index for index, request_id in enumerate(self.req_ids)}

    def result_of(self, request_id: str) -> DiffusionOutput:
        """The result of a scheduled request.

        Raises:
            EngineError: there is none for it.
        """
        if request_id in self.results:
            return self.results[request_id]
        index = self.req_id_to_index.get(request_id)
        if index is None:
            raise EngineError(f"no result for {request_id!r} among {', '.join(self.req_ids)}")
        return DiffusionOutput(request_id, self.pooler_output[index])


@dataclasses.dataclass
class DiffusionSchedulerOutput:
    """What is to run now: requests that fit into one batch."""

    requests: list[OmniDiffusionRequest]
    step_id: int = 0
    num_waiting: int = 0

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    @property
    def is_empty(self) -> bool:
        return not self.requests


@dataclasses.dataclass
class ARSchedulerOutput(DiffusionSchedulerOutput):
    """The same for the AR stage, with the blocks that each request's KV goes to.

    Attributes:
        block_ids: by request, then by branch of its cache, in the order of the tokens.
    """

    block_ids: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)
