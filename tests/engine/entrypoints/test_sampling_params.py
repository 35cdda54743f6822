"""Sampling params of `OmniDiffusion` that there are not, and noise of one's own for BAGEL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import (
    EmbedsPrompt,
    OmniDiffusion,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
)
from support.engine.fixtures import WAIT, checkpoint, pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

SINGLE = {"pipeline": "bagel_single_stage", "stages": [{"stage_id": 0}]}
RIGHT = {"height": 16, "width": 24, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def omni() -> Iterator[OmniDiffusion]:
    with OmniDiffusion(checkpoint(), SINGLE, dtype="float32") as made:
        yield made


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds", "hieght"])
def test_an_unknown_name_is_refused(omni: OmniDiffusion, name: str) -> None:
    wrong: dict[str, Any] = {**RIGHT, name: torch.zeros(2, 4)}
    with pytest.raises(SchemaError, match=f"^{name}: no sampling params here; .* height, width"):
        omni.submit("a fox", wrong, request_id="a")
    assert omni.submit("a fox", RIGHT, request_id="a").result(WAIT).error is None


def test_no_prompt_runs_if_the_params_of_one_are_wrong(omni: OmniDiffusion) -> None:
    before = omni.stats()[0]["steps"]
    with pytest.raises(SchemaError, match="latnets"):
        omni.generate(["a fox", "an owl"], [RIGHT, {"latnets": 1}], timeout=WAIT)
    (stats,) = omni.stats()
    assert (stats["steps"], stats["waiting"], stats["running"]) == (before, 0, 0)


def noise(seed: int, count: int = 1) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.stack([pipeline().initial_noise((16, 24), random) for _ in range(count)])


def test_latents_are_bagels_noise(omni: OmniDiffusion) -> None:
    """The seed's own noise gives the seed's image, and another noise another one."""
    params = {**RIGHT, "seed": 1, "num_outputs_per_prompt": 2}
    given: list[dict[str, Any]] = [
        params,
        {**params, "latents": noise(1, 2)},
        {**params, "latents": noise(2, 2)},
    ]
    drawn, same, other = omni.generate(["a fox"] * 3, given, timeout=WAIT, output_type="pt")
    assert torch.equal(drawn, same)
    assert not torch.equal(drawn, other)


def test_latents_reach_the_stage_that_denoises() -> None:
    params: dict[str, Any] = {**RIGHT, "seed": 1}
    with OmniDiffusion(checkpoint(), dtype="float32") as omni:
        images = omni.generate(
            ["a fox"] * 2, [params, {**params, "latents": noise(2)}], timeout=WAIT, output_type="pt"
        )
        assert not torch.equal(*images)
        embeds = omni.submit({"prompt_embeds": torch.ones(1, 2, 4)}, params, request_id="a")
        with pytest.raises(SchemaError, match="prompt_embeds: BAGEL reads texts"):
            embeds.result(WAIT).result()
    params["latents"] = noise(2)
    with OmniDiffusion(checkpoint(), SINGLE, dtype="float32") as omni:
        (one,) = omni.generate(["a fox"], params, timeout=WAIT, output_type="pt")
    assert torch.equal(images[1], one)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"latents": torch.ones(1, 5, 5)}, "the noise has shape"),
        ({"num_frames": 5}, "num_frames 5: BAGEL generates images"),
        ({"extra_args": {"sigmas": 1}}, "extra_args .*: BAGEL has no other params"),
    ],
)
def test_what_bagel_does_not_take(omni: OmniDiffusion, wrong: dict[str, Any], word: str) -> None:
    output = omni.submit("a fox", {**RIGHT, **wrong}, request_id="a").result(WAIT)
    with pytest.raises(SchemaError, match=word):
        output.result()


def key(prompt: Any = "a fox", **params: Any) -> object:
    return OmniDiffusionRequest(prompt, OmniDiffusionSamplingParams(seed=0, **params), "a").key


def test_tensors_and_maps_decide_what_shares_a_batch() -> None:
    """By their shapes, dtypes and values; a tensor's values do not."""
    assert key(latents=noise(1)) == key(latents=noise(2))
    embeds = [EmbedsPrompt({"prompt_embeds": torch.ones(1, size, 4)}) for size in (2, 2, 3)]
    assert key(embeds[0]) == key(embeds[1])
    apart = [
        key(),
        key(latents=noise(1)),
        key(latents=noise(1)[:, :2]),
        key(latents=noise(1).bfloat16()),
        key(extra_args={"sigmas": [1.0]}),
        key(extra_args={"sigmas": [0.5]}),
        key(num_frames=5),
        key(embeds[0]),
        key(embeds[2]),
    ]
    assert len(set(apart)) == len(apart)
