"""What the tests of diffusers' pipelines start from: requests, and what they should give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omni_kvlink.engine import (
    DiffusionSchedulerOutput,
    Executor,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "diffusers_executor.py"
WAIT = 60.0
SIZE = (32, 48)


def alone(pipe: Any, prompt: str, seed: int, steps: int = 3) -> torch.Tensor:
    """The pipeline's own image, uint8 [H, W, 3]."""
    generator = torch.Generator().manual_seed(seed)
    images = pipe(
        prompt,
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=steps,
        generator=generator,
        output_type="np",
    ).images
    return torch.from_numpy(images[0]).mul(255).round().to(torch.uint8)


def levels(output: Any) -> torch.Tensor:
    """What a pipeline made with `output_type="np"`, as uint8 [n, …, H, W, 3]."""
    made = output.images if hasattr(output, "images") else output.frames
    return torch.from_numpy(made).mul(255).round().to(torch.uint8)


def config(checkpoint: str, **fields: Any) -> OmniDiffusionConfig:
    how = {"dtype": "float32", "distributed_executor_backend": "diffusers", **fields}
    return OmniDiffusionConfig(checkpoint, **how)


def request(name: str, prompt: Any = "a fox", seed: int = 0, **params: Any) -> OmniDiffusionRequest:
    own = {key: params.pop(key) for key in list(params) if key.startswith("need_")}
    how = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 3, "seed": seed, **params}
    return OmniDiffusionRequest(prompt, OmniDiffusionSamplingParams(**how), name, **own)


def executor(checkpoint: str, **fields: Any) -> Any:
    made = config(checkpoint, **fields)
    return Executor.get_class(made)(made)


def run(executor: Any, *requests: OmniDiffusionRequest) -> list[Any]:
    output = executor.execute_model(DiffusionSchedulerOutput(list(requests)))
    assert output.req_ids == [request.request_id for request in requests]
    return [output.result_of(name) for name in output.req_ids]


def result(executor: Any, one: OmniDiffusionRequest) -> torch.Tensor:
    image: torch.Tensor = run(executor, one)[0].result()[0]
    return image
