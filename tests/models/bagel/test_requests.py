"""Requests of an engine: one by one, in a batch, and with hooks in the denoising loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from omni_kvlink.engine import (
    DiffusionRequestBatch,
    OmniDiffusionRequest,
    OmniDiffusionSamplingParams,
)
from omni_kvlink.engine.errors import RequestAborted, RequestFailed
from omni_kvlink.engine.models.bagel_pipeline import fill_params
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import BagelContexts, DenoiseParams

from .conftest import SHAPE

if TYPE_CHECKING:
    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
    from omni_kvlink.models.bagel.hooks import RunLayers

Seeded = Callable[[int], torch.Generator]
EDIT = DenoiseParams(num_timesteps=5, cfg_img_scale=2.0, cfg_interval=(0.8, 1.0))
RULES = ("global", "channel", "text_channel")


def request(name: str, prompt: Any = "a fox", seed: int = 0, **fields: Any) -> OmniDiffusionRequest:
    how = {"height": SHAPE[0], "width": SHAPE[1], "num_inference_steps": 5, "seed": seed}
    return OmniDiffusionRequest(prompt, OmniDiffusionSamplingParams(**{**how, **fields}), name)


def jobs(
    pipeline: OmniBagelPipeline, seeded: Seeded, count: int
) -> tuple[list[BagelContexts], list[Tensor]]:
    """Prompts of different lengths, one of them with an image."""
    contexts, noise = [], []
    for number in range(count):
        prompt: Any = ["a fox " * (number + 1), "in the snow"]
        contexts.append(pipeline.prefill(prompt, image_shape=SHAPE))
        noise.append(pipeline.initial_noise(SHAPE, seeded(number)))
    return contexts, noise


@pytest.mark.parametrize("rule", RULES)
def test_a_batch_is_what_each_would_be_alone(
    exact: OmniBagelPipeline, seeded: Seeded, rule: Any
) -> None:
    params = DenoiseParams(num_timesteps=8, cfg_img_scale=1.5, cfg_renorm_type=rule)
    contexts, noise = jobs(exact, seeded, 4)
    together = exact.denoise_batch(contexts, noise, params)
    for one, own, latent in zip(contexts, noise, together, strict=True):
        alone = exact.denoise(one, own, params)
        assert (latent - alone).abs().max() < 1e-5 * alone.abs().max()
    assert (together[0] - together[1]).abs().max() > 0.1


def test_a_batch_of_one_is_exact(pipeline: OmniBagelPipeline, seeded: Seeded) -> None:
    contexts, noise = jobs(pipeline, seeded, 1)
    assert torch.equal(
        pipeline.denoise_batch(contexts, noise, EDIT)[0],
        pipeline.denoise(contexts[0], noise[0], EDIT),
    )


def test_a_batch_has_images_of_one_size(exact: OmniBagelPipeline, seeded: Seeded) -> None:
    contexts = [exact.prefill("a fox", image_shape=shape) for shape in (SHAPE, (8, 8))]
    noise = [exact.initial_noise(one.image_shape, seeded(0)) for one in contexts]
    with pytest.raises(SchemaError, match="one size"):
        exact.denoise_batch(contexts, noise, EDIT)


def test_forward_is_generate(pipeline: OmniBagelPipeline, seeded: Seeded) -> None:
    assert pipeline.supports_request_batch
    (output,) = pipeline.forward(request("r", seed=4))
    expected = pipeline.generate(
        "a fox", DenoiseParams(num_timesteps=5), generator=seeded(4), image_shape=SHAPE
    )
    assert output.request_id == "r"
    assert torch.equal(output.result()[0], expected)
    assert pipeline.get_kv_metadata()["kv_lens"] == [7]
    pipeline.release_caches()


def test_what_a_batch_says_of_its_requests() -> None:
    one = DiffusionRequestBatch([request("a")])
    received = DiffusionRequestBatch([dataclasses.replace(request("a"), kv_sender_info=("u",))])
    several = DiffusionRequestBatch([request("a"), request("b", "two hats")])
    assert (one.request_id, one.request_ids, one.kv_sender_info) == ("a", ["a"], None)
    assert received.kv_sender_info == ("u",)
    assert (several.request_ids, several.prompts[1]) == (["a", "b"], "two hats")
    with pytest.raises(ValueError, match="a, b> has several ids: request_ids"):
        _ = several.request_id


def test_forward_of_a_batch_gives_each_its_own(exact: OmniBagelPipeline, seeded: Seeded) -> None:
    batch = DiffusionRequestBatch([request("a", seed=1), request("b", "two hats", seed=2)])
    assert batch.prompts == ["a fox", "two hats"]
    one, two = exact.forward(batch)
    assert [one.request_id, two.request_id] == ["a", "b"]
    for output, prompt, seed in ((one, "a fox", 1), (two, "two hats", 2)):
        expected = exact.generate(
            prompt, DenoiseParams(num_timesteps=5), generator=seeded(seed), image_shape=SHAPE
        )
        assert (output.result()[0].int() - expected.int()).abs().max() <= 1


def test_one_requests_error_fails_only_that_request(exact: OmniBagelPipeline) -> None:
    bad = request("bad")
    bad.need_kv_receive = True
    strange = request("strange")
    strange.past_key_values = {"key_cache": []}
    first, second, third = exact.forward(DiffusionRequestBatch([bad, request("good"), strange]))
    with pytest.raises(SchemaError, match="without its KV"):
        first.result()
    with pytest.raises(SchemaError, match="BagelContexts"):
        third.result()
    assert second.error is None


def test_an_unexpected_error_is_request_failed(exact: OmniBagelPipeline) -> None:
    with pytest.raises(RequestFailed, match="TypeError"):
        exact.forward(request("r", 7))[0].result()


def test_a_cancelled_request_changes_no_other_image(exact: OmniBagelPipeline) -> None:
    batch = [request(name, seed=seed) for seed, name in enumerate("abc")]
    before = exact.forward(DiffusionRequestBatch(batch))
    again = [request(name, seed=seed) for seed, name in enumerate("abc")]
    again[1].is_cancelled = lambda: True
    after = exact.forward(DiffusionRequestBatch(again))
    assert torch.equal(before[0].result(), after[0].result())
    assert torch.equal(before[2].result(), after[2].result())
    with pytest.raises(RequestAborted):
        after[1].result()


def test_defaults_are_those_of_the_prompt(photo: Tensor) -> None:
    text, edit = OmniDiffusionSamplingParams(), OmniDiffusionSamplingParams(guidance_scale=3.0)
    fill_params(text, "a fox")
    fill_params(edit, [photo, "blue"])
    assert (text.guidance_scale, text.guidance_scale_2, text.num_inference_steps) == (4.0, 1.0, 50)
    assert (edit.guidance_scale, edit.guidance_scale_2) == (3.0, 2.0)
    assert edit.cfg_renorm_type == "text_channel"


# ---- hooks


def latent(pipeline: OmniBagelPipeline, seeded: Seeded, count: int = 1) -> list[Tensor]:
    return pipeline.denoise_batch(*jobs(pipeline, seeded, count), EDIT)


@pytest.mark.parametrize("count", [1, 2])
def test_hooks_that_compute_everything_change_nothing(
    exact: OmniBagelPipeline, seeded: Seeded, count: int
) -> None:
    before = latent(exact, seeded, count)
    seen: set[tuple[object, ...]] = set()

    def layers(branch: str, step: int, rows: Tensor, run: RunLayers, total: int) -> Tensor:
        seen.add(("layers", branch, step))
        assert rows.ndim == (2 if count == 1 else 3)
        return run(run(rows, 0, 1), 1, total)

    def each_branch(
        branches: Sequence[str], compute: Callable[[str], Tensor], empty: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        seen.add(("branches", *branches))
        found = {name: compute(name) for name in reversed(branches)}
        for name, flow in found.items():
            assert (flow.shape, flow.dtype) == (empty(name).shape, empty(name).dtype)
        return found

    hooks = exact.hooks
    hooks.layers, hooks.branches = layers, each_branch
    try:
        after = latent(exact, seeded, count)
    finally:
        hooks.layers = hooks.branches = None
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert ("layers", "cfg_img", 0) in seen
    assert ("layers", "gen", 3) in seen
    assert ("branches", "gen", "cfg_text", "cfg_img") in seen
    assert ("branches", "gen") in seen  # outside the guided interval


def test_a_hook_decides_what_is_computed(exact: OmniBagelPipeline, seeded: Seeded) -> None:
    before = latent(exact, seeded)[0]
    exact.hooks.layers = lambda branch, step, rows, run, total: run(rows, 0, total - 1)
    try:
        assert not torch.equal(before, latent(exact, seeded)[0])
    finally:
        exact.hooks.layers = None
