"""A tiny Qwen-Image behind the engine gives what diffusers' own call gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.engine.diffusers_requests import SIZE, WAIT, config, executor, request, result, run
from support.engine.tiny_qwen_image import make_tiny_qwen_image

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")

from diffusers import DiffusionPipeline

from omni_kvlink import SchemaError
from omni_kvlink.engine import DiffusionEngine, OmniDiffusion
from omni_kvlink.engine.models.qwen_image import ASPECT_RATIOS, QwenImageExecutor, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = f"{QwenImageExecutor.__module__}:{QwenImageExecutor.__name__}"
STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_qwen_image(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def pipe(checkpoint: str) -> Any:
    """The pipeline itself: what everything is compared with."""
    loaded = DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> Iterator[Any]:
    made = executor(checkpoint, max_num_seqs=4)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def recipe(checkpoint: str) -> Iterator[Any]:
    made = executor(checkpoint, max_num_seqs=4, distributed_executor_backend=RECIPE)
    yield made
    made.shutdown()


def own(pipe: Any, prompt: str, seed: int = 0, **how: Any) -> torch.Tensor:
    """The pipeline's own image, uint8 [H, W, 3]."""
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS}
    random = torch.Generator().manual_seed(seed)
    images = pipe(prompt, generator=random, output_type="np", **{**size, **how}).images
    return torch.from_numpy(images[0]).mul(255).round().to(torch.uint8)


GUIDED: dict[str, Any] = {"true_cfg_scale": 4.0, "negative_prompt": "blur"}


def test_a_negative_prompt_and_its_scale_reach_the_pipeline(plain: Any, pipe: Any) -> None:
    image = result(plain, request("a", **GUIDED))
    assert torch.equal(image, own(pipe, "a fox", **GUIDED))
    for other in ({**GUIDED, "true_cfg_scale": 2.0}, {**GUIDED, "negative_prompt": "dark"}):
        assert not torch.equal(image, own(pipe, "a fox", **other))
    assert torch.equal(
        result(plain, request("b", negative_prompt="dark")),
        own(pipe, "a fox", negative_prompt="dark"),
    )
    assert torch.equal(result(plain, request("c")), own(pipe, "a fox"))


def test_several_guided_prompts_in_one_call(plain: Any, pipe: Any) -> None:
    prompts = ["a fox", "an owl and a longer text", "一只狐狸"]
    batch = run(plain, *(request(str(n), each, n, **GUIDED) for n, each in enumerate(prompts)))
    for seed, (prompt, output) in enumerate(zip(prompts, batch, strict=True)):
        alone = own(pipe, prompt, seed, **GUIDED)
        # float32 sums differ in their last bits in a batch
        assert (output.result()[0].int() - alone.int()).abs().max() <= 1
    assert not torch.equal(batch[0].result(), batch[1].result())


def test_other_negative_prompts_are_another_batch(checkpoint: str, pipe: Any) -> None:
    how: list[dict[str, Any]] = [
        GUIDED,
        {**GUIDED, "negative_prompt": "dark"},
        {**GUIDED, "true_cfg_scale": 2.0},
    ]
    requests = [request(str(n), **each) for n, each in enumerate(how)]
    assert len({each.key for each in requests}) == len(how)
    with DiffusionEngine(config(checkpoint, max_num_seqs=4)) as engine:
        outputs = engine.generate(requests, timeout=WAIT)
    for each, output in zip(how, outputs, strict=True):
        assert torch.equal(output.result()[0], own(pipe, "a fox", **each))


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"true_cfg_scale": 4.0}, "true_cfg_scale has no effect without a negative_prompt"),
        ({"true_cfg_scale": 1.0, "negative_prompt": "blur"}, "no effect with true_cfg_scale 1:"),
    ],
)
def test_what_has_no_effect_is_refused(
    plain: Any, recipe: Any, params: dict[str, Any], word: str
) -> None:
    """The pipeline itself would warn, and make another image."""
    wrong = [plain, recipe] if "negative_prompt" in params else [plain]
    for made in wrong:
        (output,) = run(made, request("a", **params))
        with pytest.raises(SchemaError, match=word):
            output.result()


def test_guidance_can_be_off(plain: Any, recipe: Any, pipe: Any) -> None:
    assert torch.equal(result(plain, request("a", true_cfg_scale=1.0)), own(pipe, "a fox"))
    magic = "a fox, Ultra HD, 4K, cinematic composition."
    assert torch.equal(result(recipe, request("a", true_cfg_scale=1.0)), own(pipe, magic))


@pytest.mark.parametrize(
    ("prompt", "magic"),
    [
        ("a fox", ", Ultra HD, 4K, cinematic composition."),
        ("一只狐狸", ", 超清，4K，电影级构图."),
    ],
)
def test_the_recipe(recipe: Any, pipe: Any, prompt: str, magic: str) -> None:
    expected = own(pipe, prompt + magic, negative_prompt=" ", true_cfg_scale=4.0)
    assert torch.equal(result(recipe, request("a", prompt)), expected)
    assert not torch.equal(own(pipe, prompt, negative_prompt=" ", true_cfg_scale=4.0), expected)


def test_what_a_request_sets_replaces_the_recipes_defaults(recipe: Any, pipe: Any) -> None:
    magic = "a fox, Ultra HD, 4K, cinematic composition."
    each: list[dict[str, Any]] = [{"true_cfg_scale": 2.0}, GUIDED]
    for params in each:
        expected = own(pipe, magic, **{"negative_prompt": " ", **params})
        assert torch.equal(result(recipe, request("a", **params)), expected)


def test_the_recipe_in_a_deploy_file(checkpoint: str, pipe: Any) -> None:
    size = {"height": SIZE[0], "width": SIZE[1]}
    stage: dict[str, Any] = {"stage_id": 0, "distributed_executor_backend": RECIPE}
    stage["default_sampling_params"] = {**size, "num_inference_steps": STEPS, **GUIDED, "seed": 0}
    how = {"pipeline": "bagel_single_stage", "stages": [stage]}
    with OmniDiffusion(checkpoint, how, dtype="float32") as omni:
        images = omni.generate(["a fox"], timeout=WAIT, output_type="pt")
    magic = "a fox, Ultra HD, 4K, cinematic composition."
    assert torch.equal(images[0][0], own(pipe, magic, **GUIDED))


def test_sizes_by_aspect_ratio() -> None:
    assert size_of("16:9") == {"width": 1664, "height": 928}
    assert all(side % 16 == 0 for size in ASPECT_RATIOS.values() for side in size)
    with pytest.raises(SchemaError, match="'16:10': one of 1:1, 16:9"):
        size_of("16:10")
