"""The schedule and the guidance formulas."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from omni_kvlink.models.bagel import DenoiseParams
from omni_kvlink.models.bagel.sampling import guide, schedule


@pytest.fixture
def flows() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return tuple(torch.randn(6, 4, generator=made) for _ in range(3))  # type: ignore[return-value]


def test_published_defaults() -> None:
    assert DenoiseParams.for_text_to_image() == DenoiseParams(
        4.0, 1.0, (0.4, 1.0), 0.0, "global", 3.0, 50
    )
    assert DenoiseParams.for_edit() == DenoiseParams(
        4.0, 2.0, (0.0, 1.0), 0.0, "text_channel", 3.0, 50
    )


def test_schedule_runs_from_one_to_zero_shifted_to_high_noise() -> None:
    times, spans = schedule(DenoiseParams(num_timesteps=5, timestep_shift=3.0))
    expected = [3 * t / (1 + 2 * t) for t in (1.0, 0.75, 0.5, 0.25, 0.0)]
    assert times.tolist() == pytest.approx(expected[:4])
    assert spans.tolist() == pytest.approx([a - b for a, b in itertools.pairwise(expected)])
    assert (times.dtype, spans.dtype, len(times)) == (torch.float32, torch.float32, 4)


@pytest.mark.parametrize(("t", "inside"), [(0.4, False), (0.41, True), (1.0, True), (0.1, False)])
def test_the_interval_excludes_its_low_end(t: float, inside: bool) -> None:
    assert DenoiseParams(cfg_interval=(0.4, 1.0)).guided_at(torch.tensor(t)) is inside


def test_image_guidance_rests_on_text_guidance() -> None:
    assert not DenoiseParams(cfg_text_scale=1.0, cfg_img_scale=2.0).needs_cfg_img
    assert DenoiseParams(cfg_text_scale=1.5, cfg_img_scale=2.0).needs_cfg_img
    assert not DenoiseParams(cfg_text_scale=1.0).needs_cfg_text


def _shrunk(v: Tensor, w: Tensor, low: float) -> Tensor:
    return w * min(max(float(v.norm()) / (float(w.norm()) + 1e-8), low), 1.0)


def test_global_renorm_comes_after_both_guidances(flows: tuple[Tensor, Tensor, Tensor]) -> None:
    v, text, image = flows
    params = DenoiseParams(4.0, 2.0, cfg_renorm_type="global")
    w = text + 4 * (v - text)
    assert torch.allclose(guide(v, text, None, params), _shrunk(v, w, 0.0))
    w = image + 2 * (w - image)
    assert torch.allclose(guide(v, text, image, params), _shrunk(v, w, 0.0))


def test_channel_renorm_is_per_row(flows: tuple[Tensor, Tensor, Tensor]) -> None:
    v, text, image = flows
    params = DenoiseParams(3.0, 2.0, cfg_renorm_type="channel", cfg_renorm_min=0.4)
    w = image + 2 * (text + 3 * (v - text) - image)
    expected = torch.stack([_shrunk(v[i], w[i], 0.4) for i in range(6)])
    assert torch.allclose(guide(v, text, image, params), expected)


def test_text_channel_renorm_comes_before_image_guidance(
    flows: tuple[Tensor, Tensor, Tensor],
) -> None:
    v, text, image = flows
    params = DenoiseParams(3.0, 2.0, cfg_renorm_type="text_channel", cfg_renorm_min=0.3)
    w = text + 3 * (v - text)
    w = torch.stack([_shrunk(v[i], w[i], 0.3) for i in range(6)])
    assert torch.allclose(guide(v, text, None, params), w)
    assert torch.allclose(guide(v, text, image, params), image + 2 * (w - image))


def test_renorm_never_enlarges(flows: tuple[Tensor, Tensor, Tensor]) -> None:
    v = flows[0]
    params = DenoiseParams(2.0, cfg_renorm_type="global")
    guided = guide(v, v * 1.5, None, params)  # 1.5 v + 2 (v - 1.5 v) = 0.5 v
    assert torch.allclose(guided, 0.5 * v)


def test_minimum_one_switches_renorm_off(flows: tuple[Tensor, Tensor, Tensor]) -> None:
    v, text, _ = flows
    params = DenoiseParams(4.0, cfg_renorm_min=1.0)
    assert torch.allclose(guide(v, text, None, params), text + 4 * (v - text))


def test_bfloat16_norms_are_taken_in_float32() -> None:
    v = torch.full((300, 4), 0.1, dtype=torch.bfloat16)
    guided = guide(v, -v, None, DenoiseParams(2.0, cfg_renorm_type="channel"))
    # Per-row factors are float32 and widen the flow, the global factor is a scalar and does not.
    assert guided.dtype == torch.float32
    assert guide(v, -v, None, DenoiseParams(2.0)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "wrong",
    [
        {"cfg_renorm_type": "local"},
        {"cfg_text_scale": -1.0},
        {"cfg_img_scale": float("nan")},
        {"cfg_interval": (1.0, 0.4)},
        {"cfg_interval": (1.0,)},
        {"cfg_renorm_min": 1.5},
        {"timestep_shift": 0.0},
        {"num_timesteps": 1},
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(DenoiseParams(), **wrong)  # type: ignore[arg-type]
