"""cache-dit behind the engine gives what it gives by hand on the same tiny Qwen-Image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.engine.diffusers_requests import SIZE, WAIT, executor, levels, request, run
from support.engine.tiny_pipelines import make_tiny_wan
from support.engine.tiny_qwen_image import make_tiny_qwen_image

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("cache_dit", reason="needs `pip install 'omni-kvlink[cache-dit]'`")

import cache_dit
from diffusers import DiffusionPipeline

from omni_kvlink import SchemaError
from omni_kvlink.engine import OmniDiffusion
from omni_kvlink.engine.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

# Reaches into _context_manager, _context_names: cache-dit tells its log alone which steps it has
# not computed.

STEPS = 12
LOOSE = {"max_warmup_steps": 2, "residual_diff_threshold": 0.5}
GUIDED = {"negative_prompt": "blur", "true_cfg_scale": 3.0}
BY_HAND: dict[str, Any] = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": 3,
    "max_warmup_steps": 4,
    "residual_diff_threshold": 0.24,
}
"""vLLM-Omni's defaults."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_qwen_image(tmp_path_factory.mktemp("qwen"))


def own(checkpoint: str, settings: Any, scm: Any = None, order: int = 0, **how: Any) -> Any:
    """The image of a pipeline of its own, and the steps that cache-dit counts; uncached if None."""
    pipe = DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if settings is not None:
        seer = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        cache_dit.enable_cache(
            pipe.transformer,
            cache_config=cache_dit.DBCacheConfig(**{**BY_HAND, **settings}),
            calibrator_config=seer,
        )
        fields = {"num_inference_steps": STEPS, **(scm or {})}
        changes = cache_dit.DBCacheConfig().reset(**fields)
        cache_dit.refresh_context(pipe.transformer, cache_config=changes)
    random = torch.Generator().manual_seed(0)
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS}
    image = levels(pipe(prompt="a fox", generator=random, output_type="np", **{**size, **how}))[0]
    if settings is None:
        return image, 0
    return image, counted_in(pipe)


def counted_in(pipe: Any) -> int:
    """As cache-dit's own log has it."""
    (name,) = pipe.transformer._context_names
    context = pipe.transformer._context_manager.get_context(name)
    return len(context.cached_steps) + len(context.cfg_cached_steps)


def cached(checkpoint: str, settings: Any, **fields: Any) -> Any:
    return executor(checkpoint, cache_backend="cache_dit", cache_config=settings, **fields)


def image_of(made: Any, **params: Any) -> tuple[torch.Tensor, int]:
    (output,) = run(made, request("a", num_inference_steps=STEPS, **params))
    return output.result()[0], output.cached_steps


@pytest.mark.parametrize("how", [{}, GUIDED])
def test_the_image_is_that_of_cache_dit_by_hand(checkpoint: str, how: dict[str, Any]) -> None:
    made = cached(checkpoint, LOOSE)
    image, steps = image_of(made, **how)
    expected, counted = own(checkpoint, LOOSE, **how)
    assert torch.equal(image, expected)
    assert steps == counted > 0
    assert not torch.equal(image, own(checkpoint, None, **how)[0])
    if how:  # with two passes a step, as cache-dit expects of the model
        stats = cache_dit.summary(made.pipeline.pipe.transformer, logging=False)[0]
        assert steps == len(stats.cached_steps) + len(stats.cfg_cached_steps)
    made.shutdown()


def test_each_generation_begins_anew(checkpoint: str) -> None:
    """And another number of steps is that of the next call."""
    made = cached(checkpoint, LOOSE)
    first = image_of(made)
    run(made, request("b", "an owl", num_inference_steps=5))
    again = image_of(made)
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1]
    made.shutdown()


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        ({"Bn_compute_blocks": 1}, 0),
        ({"max_warmup_steps": 6}, 0),
        ({"max_cached_steps": 2}, 0),
        ({"max_continuous_cached_steps": 1}, 0),
        ({"residual_diff_threshold": 0.01}, 0),
        ({"enable_separate_cfg": True}, 0),
        ({"enable_taylorseer": True, "taylorseer_order": 2}, 2),
    ],
)
def test_each_setting_is_cache_dits(checkpoint: str, settings: dict[str, Any], order: int) -> None:
    one_pass = {**LOOSE, "enable_separate_cfg": False}
    made = cached(checkpoint, {**one_pass, **settings})
    image, steps = image_of(made)
    by_hand = {} if order else settings
    expected, counted = own(checkpoint, {**one_pass, **by_hand}, order=order)
    plain, least = own(checkpoint, one_pass)
    assert torch.equal(image, expected)
    assert steps == counted
    assert (steps, torch.equal(image, plain)) != (least, True)  # the setting has an effect
    made.shutdown()


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_a_mask_of_steps(checkpoint: str, policy: str) -> None:
    settings = {**LOOSE, "residual_diff_threshold": 0.02}
    own_fields = {"scm_steps_mask_policy": "fast", "scm_steps_policy": policy}
    made = cached(checkpoint, {**settings, **own_fields})
    image, steps = image_of(made)
    scm = {
        "steps_computation_mask": cache_dit.steps_mask(mask_policy="fast", total_steps=STEPS),
        "steps_computation_policy": policy,
    }
    expected, counted = own(checkpoint, settings, scm)
    assert torch.equal(image, expected)
    assert steps == counted
    if policy == "static":
        assert steps > 0
    with pytest.raises(
        SchemaError, match="num_inference_steps 3 with scm_steps_mask_policy 'fast'"
    ):
        run(made, request("b", num_inference_steps=3))[0].result()
    made.shutdown()


def test_without_it_nothing_is_cached(checkpoint: str) -> None:
    made = executor(checkpoint)
    image, steps = image_of(made)
    assert steps is None
    assert torch.equal(image, own(checkpoint, None)[0])
    strict = cached(checkpoint, {"residual_diff_threshold": 0})
    assert torch.equal(image_of(strict)[0], image)
    assert image_of(strict)[1] == 0
    strict.shutdown()
    made.shutdown()


def test_after_sleep_it_is_enabled_again(checkpoint: str) -> None:
    made = cached(checkpoint, LOOSE)
    before = image_of(made)
    assert made.sleep(2)
    assert made.wake_up()
    after = image_of(made)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1] > 0
    made.shutdown()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rel_l1_thresh": 0.2}, "rel_l1_thresh: no such setting; there are Fn_compute_blocks"),
        ({"force_refresh_step_hint": 2}, "force_refresh_step_hint: no such setting"),
        ({"Fn_compute_blocks": 0}, "Fn_compute_blocks=0: wanted a whole number from 1 on"),
        ({"max_warmup_steps": True}, "max_warmup_steps=True: wanted a whole number from 0 on"),
        (
            {"residual_diff_threshold": "0.1"},
            "residual_diff_threshold='0.1': wanted a number from 0 on",
        ),
        ({"enable_taylorseer": 1}, "enable_taylorseer=1: wanted true or false"),
        ({"scm_steps_mask_policy": "quick"}, "scm_steps_mask_policy='quick': wanted 'slow' or"),
        ({"scm_steps_policy": None}, "scm_steps_policy=None: wanted 'dynamic' or 'static'"),
    ],
)
def test_a_wrong_setting_is_refused(checkpoint: str, settings: Any, word: str) -> None:
    with pytest.raises(EngineError, match=word):
        cached(checkpoint, settings)


def test_what_is_no_number_is_no_configuration(checkpoint: str) -> None:
    with pytest.raises(SchemaError, match="residual_diff_threshold=nan: wanted a value of JSON"):
        cached(checkpoint, {"residual_diff_threshold": float("nan")})


def test_two_transformers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="one transformer, and WanPipeline has two"):
        cached(make_tiny_wan(tmp_path, two=True), {})


@pytest.mark.parametrize(
    ("name", "word"), [("tea_cache", "hooks.layers"), ("tea", "'tea'; there are")]
)
def test_another_backend_is_refused(checkpoint: str, name: str, word: str) -> None:
    with pytest.raises(EngineError, match=f"cache_backend '{name}': .*{word}"):
        executor(checkpoint, cache_backend=name)


def test_in_a_deploy_file(checkpoint: str) -> None:
    stage = {"stage_id": 0, "cache_backend": "cache_dit", "cache_config": LOOSE}
    how = {"pipeline": "QwenImagePipeline", "stages": [stage]}
    params = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS, "seed": 0}
    with OmniDiffusion(checkpoint, how, dtype="float32") as omni:
        (output,) = omni.generate(["a fox"], params, timeout=WAIT, on_error="return")
    expected, counted = own(checkpoint, LOOSE)
    assert torch.equal(output.result()[0], expected)
    assert output.cached_steps == counted
