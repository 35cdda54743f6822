"""Prompt embeddings and latents of one's own reach a pipeline of diffusers unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.engine.diffusers_requests import (
    SIZE,
    WAIT,
    config,
    executor,
    levels,
    request,
    result,
    run,
)
from support.engine.fixtures import close_to
from support.engine.tiny_qwen_image import make_tiny_qwen_image

pytest.importorskip("diffusers", reason="needs `pip install 'omni-kvlink[diffusers]'`")
pytest.importorskip("transformers", reason="needs `pip install 'omni-kvlink[diffusers]'`")

from diffusers import DiffusionPipeline

from omni_kvlink import SchemaError
from omni_kvlink.engine import DiffusionEngine, EmbedsPrompt, OmniDiffusion, RequestFailed
from omni_kvlink.engine.ipc.codec import pack, unpack
from omni_kvlink.engine.models.qwen_image import QwenImageExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator

RECIPE = f"{QwenImageExecutor.__module__}:{QwenImageExecutor.__name__}"


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


def own(pipe: Any, seed: int = 0, **how: Any) -> torch.Tensor:
    """The pipeline's own image, uint8 [H, W, 3]."""
    random = torch.Generator().manual_seed(seed)
    size = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 3}
    return levels(pipe(generator=random, output_type="np", **{**size, **how}))[0]


def embeds(seed: int, tokens: int = 6, prefix: str = "") -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, -1] = 0  # another image than without it
    drawn = torch.randn(1, tokens, 16, generator=random)
    return {f"{prefix}prompt_embeds": drawn, f"{prefix}prompt_embeds_mask": mask}


def latents(seed: int, count: int = 1) -> torch.Tensor:
    """Noise in the pipeline's packed form."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, (SIZE[0] // 16) * (SIZE[1] // 16), 16, generator=random)


BOTH = {**embeds(1), **embeds(2, prefix="negative_")}


def test_embeddings_are_the_prompt(plain: Any, pipe: Any) -> None:
    for tensors in (embeds(1), BOTH):
        image = result(plain, request("a", EmbedsPrompt(tensors)))
        assert torch.equal(image, own(pipe, **tensors))
    without_mask: dict[str, Any] = {"prompt_embeds": BOTH["prompt_embeds"]}
    images = [own(pipe, **each) for each in (embeds(1), BOTH, embeds(3), without_mask)]
    assert all(not torch.equal(images[0], other) for other in images[1:])


def test_embeddings_of_a_text_are_that_text(plain: Any, pipe: Any) -> None:
    tensors = dict(
        zip(("prompt_embeds", "prompt_embeds_mask"), pipe.encode_prompt("a fox"), strict=True)
    )
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    image = result(plain, request("a", EmbedsPrompt(kept)))
    assert torch.equal(image, result(plain, request("b", "a fox")))


def test_a_negative_text_may_go_with_embeddings(plain: Any, pipe: Any) -> None:
    guided: dict[str, Any] = {"negative_prompt": "blur", "true_cfg_scale": 3.0}
    image = result(plain, request("a", EmbedsPrompt(embeds(1)), **guided))
    assert torch.equal(image, own(pipe, **embeds(1), **guided))
    image = result(plain, request("b", EmbedsPrompt(BOTH), true_cfg_scale=3.0))
    assert torch.equal(image, own(pipe, **BOTH, true_cfg_scale=3.0))


def test_the_recipe_guides_embeddings(checkpoint: str, pipe: Any) -> None:
    made = executor(checkpoint, distributed_executor_backend=RECIPE)
    each: list[tuple[Any, dict[str, Any]]] = [(embeds(1), {"negative_prompt": " "}), (BOTH, {})]
    for tensors, own_how in each:
        expected = own(pipe, **tensors, **own_how, true_cfg_scale=4.0)
        assert torch.equal(result(made, request("a", EmbedsPrompt(tensors))), expected)
    made.shutdown()


def test_latents_are_the_noise(plain: Any, pipe: Any) -> None:
    noise = latents(7)
    image = result(plain, request("a", seed=1, latents=noise))
    assert torch.equal(image, own(pipe, prompt="a fox", latents=noise))
    assert torch.equal(image, result(plain, request("b", seed=2, latents=noise)))
    assert not torch.equal(image, result(plain, request("c", seed=1)))
    assert not torch.equal(image, result(plain, request("d", seed=1, latents=latents(8))))


def test_a_batch_has_each_requests_tensors(plain: Any, pipe: Any) -> None:
    """Of embeddings with one layout, and latents for two images each."""
    each = [(embeds(seed), latents(seed, 2)) for seed in range(3)]
    how: dict[str, Any] = {"num_outputs_per_prompt": 2}
    batch = run(
        plain,
        *(
            request(str(n), EmbedsPrompt(tensors), latents=noise, **how)
            for n, (tensors, noise) in enumerate(each)
        ),
    )
    for (tensors, noise), output in zip(each, batch, strict=True):
        for image, row in zip(output.result(), noise, strict=True):
            assert close_to(image, own(pipe, **tensors, latents=row[None]))
    assert not close_to(batch[0].result()[0], batch[0].result()[1])


def test_other_layouts_are_other_batches(checkpoint: str, pipe: Any) -> None:
    prompts: list[Any] = ["a fox", *(EmbedsPrompt(one) for one in (embeds(1), embeds(2, 9), BOTH))]
    noise = [None, None, None, latents(1)]
    given = [
        request(str(n), prompt, latents=one)
        for n, (prompt, one) in enumerate(zip(prompts, noise, strict=True))
    ]
    assert len({one.key for one in given}) == 4
    assert request("a", EmbedsPrompt(embeds(3))).key == given[1].key
    with DiffusionEngine(config(checkpoint, max_num_seqs=4)) as engine:
        outputs = engine.generate(given, timeout=WAIT)
    expected = [
        own(pipe, prompt="a fox"),
        own(pipe, **embeds(1)),
        own(pipe, **embeds(2, 9)),
        own(pipe, **BOTH, latents=latents(1)),
    ]
    assert all(map(torch.equal, [output.result()[0] for output in outputs], expected))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"prompt_embeds_mask": torch.ones(1, 6)}, "prompt_embeds is missing"),
        ({"prompt_embeds": torch.ones(2, 6, 16)}, r"prompt_embeds: a tensor of one prompt"),
        ({"prompt_embeds": "a fox"}, "prompt_embeds: a tensor of one prompt, .* not str"),
        ({"prompt_embeds": torch.ones(1, 6, 16), "latents": torch.ones(1, 6)}, "latents: no embed"),
    ],
)
def test_what_is_no_embedding(tensors: Any, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        EmbedsPrompt(tensors)


def test_what_the_pipeline_does_not_take(plain: Any) -> None:
    pooled = {**embeds(1), "pooled_prompt_embeds": torch.ones(1, 16)}
    with pytest.raises(SchemaError, match="takes no pooled_prompt_embeds"):
        result(plain, request("a", EmbedsPrompt(pooled)))
    with pytest.raises(SchemaError, match="negative_prompt_embeds: give one of them"):
        result(plain, request("b", EmbedsPrompt(BOTH), negative_prompt="blur"))
    photo = torch.zeros(4, 4, 3, dtype=torch.uint8)
    with pytest.raises(SchemaError, match="takes no images"):
        result(plain, request("c", EmbedsPrompt(embeds(1), [photo])))
    with pytest.raises(SchemaError, match="true_cfg_scale has no effect without"):
        result(plain, request("d", EmbedsPrompt(embeds(1)), true_cfg_scale=3.0))
    with pytest.raises(RequestFailed):
        result(plain, request("e", latents=latents(1)[:, :, :5]))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (torch.ones(1, 6, dtype=torch.int64), "floating-point numbers, not torch.int64"),
        (1, "latents=1: wanted a Tensor"),
        (latents(1, 2), "for num_outputs_per_prompt 1"),
    ],
)
def test_what_is_no_latent(wrong: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        request("a", latents=wrong)


def test_tensors_are_decoded_unchanged() -> None:
    photo = torch.arange(48, dtype=torch.uint8).reshape(4, 4, 3)
    prompt = EmbedsPrompt({**BOTH, "prompt_embeds": embeds(1)["prompt_embeds"].bfloat16()}, [photo])
    one = request("a", prompt, latents=latents(1), extra_args={"sigmas": [1.0, 0.5]})
    two = unpack(pack(one))
    assert two.key == one.key
    assert all(torch.equal(two.prompt.tensors[name], prompt.tensors[name]) for name in BOTH)
    assert torch.equal(two.prompt.images[0], photo)
    assert torch.equal(two.sampling_params.latents, latents(1))
    assert two.sampling_params.extra_args == {"sigmas": [1.0, 0.5]}


def test_tensors_reach_a_stage_in_another_process(checkpoint: str, pipe: Any) -> None:
    """Those of 64 KiB and more in shared memory."""
    tensors, noise = embeds(1, 1100), latents(1, 2)
    tensors["prompt_embeds_mask"] = torch.ones(1, 1100, dtype=torch.long)
    assert tensors["prompt_embeds"].nbytes > 64 << 10
    stage = {"stage_id": 0, "distributed_executor_backend": "diffusers", "own_process": True}
    how = {"pipeline": "bagel_single_stage", "stages": [stage]}
    params = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": 3, "seed": 0}
    with OmniDiffusion(checkpoint, how, dtype="float32", num_threads=1) as omni:
        images = omni.generate(
            [tensors, "a fox"],
            [params, {**params, "latents": noise, "num_outputs_per_prompt": 2}],
            timeout=WAIT,
            output_type="pt",
        )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = own(pipe, **tensors), own(pipe, prompt="a fox", latents=noise[:1])
    torch.set_num_threads(before)
    assert torch.equal(images[0][0], expected[0])
    assert close_to(images[1][0], expected[1])
    assert not close_to(images[1][0], images[1][1])
