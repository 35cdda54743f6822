"""Images at different steps, with different schedules, in one pass: each is what it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import DenoiseParams

from .conftest import SHAPE

if TYPE_CHECKING:
    from torch import Tensor

    from omni_kvlink.engine.models.bagel_pipeline import OmniBagelPipeline
    from omni_kvlink.models.bagel.denoise import DenoiseState

Seeded = Callable[[int], torch.Generator]
PARAMS = (
    DenoiseParams(num_timesteps=9, cfg_interval=(0.6, 1.0)),
    DenoiseParams(num_timesteps=4, timestep_shift=1.0, cfg_img_scale=1.5),
    DenoiseParams(num_timesteps=6, cfg_text_scale=1.0),
    DenoiseParams(num_timesteps=5, cfg_text_scale=2.0, cfg_renorm_type="channel"),
)


def begun(pipeline: OmniBagelPipeline, seeded: Seeded) -> list[DenoiseState]:
    """One image for each of `PARAMS`, whose prompts differ."""
    states = []
    for number, params in enumerate(PARAMS):
        prompt: Any = ["a fox " * (number + 1), "in the snow"]
        contexts = pipeline.prefill(prompt, image_shape=SHAPE)
        noise = pipeline.initial_noise(SHAPE, seeded(number))
        states.append(pipeline.begin_denoise(contexts, noise, params))
    return states


def advance(pipeline: OmniBagelPipeline, states: Sequence[DenoiseState]) -> None:
    for state, flow in zip(states, pipeline.guided_flows(states), strict=True):
        state.integrate(flow)


def alone(pipeline: OmniBagelPipeline, seeded: Seeded, number: int) -> Tensor:
    state = begun(pipeline, seeded)[number]
    noise = pipeline.initial_noise(SHAPE, seeded(number))
    return pipeline.denoise(state.contexts, noise, PARAMS[number])


def test_images_that_join_and_leave_are_what_they_are_alone(
    exact: OmniBagelPipeline, seeded: Seeded
) -> None:
    """One begins in each pass; the second is done before the first is."""
    waiting, running, done = begun(exact, seeded), list[Any](), list[Any]()
    while waiting or running:
        running += waiting[:1]
        del waiting[:1]
        advance(exact, running)
        done += [one for one in running if one.is_done]
        running = [one for one in running if not one.is_done]
    assert [PARAMS.index(one.params) for one in done] == [1, 2, 3, 0]
    for state in done:
        expected = alone(exact, seeded, PARAMS.index(state.params))
        assert (exact.latent(state) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_an_image_that_is_alone_has_the_bits_of_denoise(
    pipeline: OmniBagelPipeline, seeded: Seeded
) -> None:
    for number in range(len(PARAMS)):
        state = begun(pipeline, seeded)[number]
        while not state.is_done:
            advance(pipeline, [state])
        assert torch.equal(pipeline.latent(state), alone(pipeline, seeded, number))


def test_a_branch_is_one_pass_over_the_images_that_read_it(
    exact: OmniBagelPipeline, seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, passes = begun(exact, seeded), list[int]()
    velocity = exact.model.velocity

    def recorded(contexts: Sequence[Any], *args: Any) -> Any:
        passes.append(len(contexts))
        return velocity(contexts, *args)

    monkeypatch.setattr(exact.model, "velocity", recorded)
    advance(exact, states)
    assert passes == [4, 3, 1]  # gen of all, cfg_text of those with guidance, cfg_img of one
    while states[0].branches == ["gen", "cfg_text"]:
        advance(exact, states[:1])
    del passes[:]
    advance(exact, [states[0], states[1]])  # the first is past its guided interval
    assert passes == [2, 1, 1]


def test_what_is_computed_changes_no_state(exact: OmniBagelPipeline, seeded: Seeded) -> None:
    states = begun(exact, seeded)
    before = [(one.step, one.rows.clone()) for one in states]
    exact.guided_flows(states)
    for state, (step, rows) in zip(states, before, strict=True):
        assert state.step == step
        assert torch.equal(state.rows, rows)


def test_images_of_two_sizes_are_no_batch(exact: OmniBagelPipeline, seeded: Seeded) -> None:
    states = begun(exact, seeded)[:1]
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    noise = exact.initial_noise((8, 8), seeded(0))
    states.append(exact.begin_denoise(contexts, noise, PARAMS[0]))
    with pytest.raises(SchemaError, match="one size"):
        exact.guided_flows(states)
