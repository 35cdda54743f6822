"""Whole requests: the two halves, what an image depends on, text, stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import BagelContexts, BagelPipeline, DenoiseParams, NaiveCache
from omni_kvlink.models.bagel.token_sampler import TokenSampler
from omni_kvlink.models.bagel.tokenizer import written_text

from .conftest import SHAPE

if TYPE_CHECKING:
    from pathlib import Path

    from omni_kvlink.models.bagel import Prompt

Seeded = Callable[[int], torch.Generator]
FEW = DenoiseParams(num_timesteps=5)


def draw(pipeline: BagelPipeline, prompt: str, seed: int, seeded: Seeded) -> Tensor:
    return pipeline.generate(prompt, FEW, generator=seeded(seed), image_shape=SHAPE)


def test_an_image_is_uint8_and_not_flat(pipeline: BagelPipeline, seeded: Seeded) -> None:
    image = draw(pipeline, "a fox", 0, seeded)
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (*SHAPE, 3))
    assert image.is_contiguous()
    assert image.float().std() > 20
    assert ((image > 0) & (image < 255)).float().mean() > 0.5


def test_the_same_request_gives_the_same_bytes(pipeline: BagelPipeline, seeded: Seeded) -> None:
    assert torch.equal(draw(pipeline, "a fox", 0, seeded), draw(pipeline, "a fox", 0, seeded))


def test_an_image_depends_on_the_prompt_and_on_the_noise(
    pipeline: BagelPipeline, seeded: Seeded
) -> None:
    image = draw(pipeline, "a fox", 0, seeded).int()
    assert (image - draw(pipeline, "two hats", 0, seeded).int()).abs().float().mean() > 2
    assert (image - draw(pipeline, "a fox", 1, seeded).int()).abs().float().mean() > 20


def test_an_edit_depends_on_the_image(exact: BagelPipeline, photo: Tensor, seeded: Seeded) -> None:
    one = exact.generate([photo, "blue"], FEW, generator=seeded(0))
    two = exact.generate([255 - photo, "blue"], FEW, generator=seeded(0))
    assert one.shape == photo.shape
    assert (one.int() - two.int()).abs().float().mean() > 1


def _nudged(contexts: BagelContexts, branch: str, kind: str, layer: int) -> BagelContexts:
    nudged = getattr(contexts, branch).snapshot()
    layers = getattr(nudged.past_key_values, kind)
    layers[layer] = layers[layer] + 0.1
    made = BagelContexts(contexts.gen, contexts.cfg_text, contexts.cfg_img, contexts.image_shape)
    setattr(made, branch, nudged)
    return made


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("kind", ["key_cache", "value_cache"])
@pytest.mark.parametrize("branch", ["gen", "cfg_text", "cfg_img"])
def test_the_latent_depends_on_every_layer_of_every_branch(
    exact: BagelPipeline, seeded: Seeded, branch: str, kind: str, layer: int
) -> None:
    contexts = exact.prefill(["a fox", "in the snow"], image_shape=(8, 8))
    noise = exact.initial_noise((8, 8), seeded(0))
    params = DenoiseParams(cfg_img_scale=2.0, num_timesteps=3)
    latent = exact.denoise(contexts, noise, params)
    other = exact.denoise(_nudged(contexts, branch, kind, layer), noise, params)
    assert (latent - other).abs().max() > 1e-4


@pytest.mark.parametrize("branch", ["gen", "cfg_text", "cfg_img"])
def test_the_latent_depends_on_each_branchs_position(
    exact: BagelPipeline, seeded: Seeded, branch: str
) -> None:
    contexts = exact.prefill(["a fox", "in the snow"], image_shape=(8, 8))
    noise = exact.initial_noise((8, 8), seeded(0))
    params = DenoiseParams(cfg_img_scale=2.0, num_timesteps=3)
    latent = exact.denoise(contexts, noise, params)
    moved = getattr(contexts, branch).snapshot()
    moved.ropes[0] += 1
    setattr(contexts, branch, moved)
    assert not torch.equal(exact.denoise(contexts, noise, params), latent)


def test_guidance_is_applied_only_in_its_interval(exact: BagelPipeline, seeded: Seeded) -> None:
    contexts = exact.prefill(["a fox", "in the snow"], image_shape=(8, 8))
    noise = exact.initial_noise((8, 8), seeded(0))

    def latent(**options: object) -> Tensor:
        return exact.denoise(contexts, noise, DenoiseParams(num_timesteps=5, **options))  # type: ignore[arg-type]

    plain = latent(cfg_text_scale=1.0)
    assert torch.equal(latent(cfg_text_scale=1.0, cfg_img_scale=3.0), plain)
    assert torch.equal(latent(cfg_text_scale=4.0, cfg_interval=(2.0, 3.0)), plain)
    assert not torch.equal(latent(cfg_text_scale=4.0), plain)
    assert not torch.equal(
        latent(cfg_text_scale=4.0), latent(cfg_text_scale=4.0, cfg_interval=(0.8, 1.0))
    )


def test_one_step_is_noise_minus_velocity_times_the_span(
    pipeline: BagelPipeline, seeded: Seeded
) -> None:
    contexts = pipeline.prefill("a fox", image_shape=(8, 8))
    noise = pipeline.initial_noise((8, 8), seeded(0))
    params = DenoiseParams(cfg_text_scale=1.0, num_timesteps=2)
    latent = pipeline.denoise(contexts, noise, params)
    assert latent.dtype == torch.float32
    special_tokens = pipeline.special_tokens
    with torch.no_grad():
        ends = pipeline.model.embed([special_tokens.start_of_image, special_tokens.end_of_image])
        rows = pipeline.model.latent_rows(noise, 2, 2, torch.ones(1))
        flow = pipeline.model.velocity(contexts.gen, torch.cat([ends[:1], rows, ends[1:]]))
    cells = (noise - flow.float()).view(2, 2, 2, 2, 4)  # h, w, p, q, c
    assert torch.equal(latent, cells.permute(4, 0, 2, 1, 3).reshape(4, 4, 4))


def test_every_step_is_reported(exact: BagelPipeline) -> None:
    seen: list[tuple[int, int]] = []
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    exact.render(contexts, FEW, noise=torch.zeros(4, 16), on_step=lambda *step: seen.append(step))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("kind", ["text", "edit", "think", "sampled"])
def test_generate_is_prefill_and_render(
    pipeline: BagelPipeline, photo: Tensor, seeded: Seeded, kind: str
) -> None:
    inputs: Prompt = [photo, "blue"] if kind == "edit" else "a fox"
    options: dict[str, Any] = {"image_shape": SHAPE}
    if kind in ("think", "sampled"):
        options |= {"think": True, "max_think_tokens": 6, "do_sample": kind == "sampled"}
    whole = pipeline.generate(inputs, FEW, generator=seeded(7), **options)
    generator = seeded(7)
    contexts = pipeline.prefill(inputs, generator=generator, **options)
    elsewhere = torch.Generator()
    elsewhere.set_state(generator.get_state())
    assert torch.equal(pipeline.render(contexts, FEW, generator=elsewhere), whole)
    noise = pipeline.initial_noise(contexts.image_shape, generator)
    assert torch.equal(pipeline.render(contexts, FEW, noise=noise), whole)
    if kind in ("edit", "sampled"):
        # The seed alone is not enough: prefill has consumed random numbers.
        again = pipeline.render(contexts, FEW, generator=seeded(7))
        assert not torch.equal(again, whole)


def test_two_stages_give_the_image_of_one(
    checkpoint: Path, pipeline: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    ar, dit = (
        BagelPipeline.from_pretrained(checkpoint, dtype=pipeline.dtype, stage=stage)
        for stage in ("ar", "dit")
    )
    generator = seeded(4)
    contexts = ar.prefill([photo, "blue"], generator=generator)
    params = DenoiseParams(cfg_img_scale=2.0, num_timesteps=4)
    image = dit.render(contexts, params, generator=generator)
    assert torch.equal(image, pipeline.generate([photo, "blue"], params, generator=seeded(4)))


def test_a_stage_names_the_part_that_it_lacks(checkpoint: Path, exact: BagelPipeline) -> None:
    ar, dit = (
        BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32, stage=stage)
        for stage in ("ar", "dit")
    )
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    for call, message in (
        (lambda: ar.denoise(contexts, torch.zeros(4, 16), FEW), "stage='ar': no flow head"),
        (lambda: ar.decode(torch.zeros(4, 4, 4)), "stage='ar': no autoencoder's decoder"),
        (lambda: dit.encode_image(torch.zeros(3, 8, 8)), "stage='dit': no autoencoder's encoder"),
        (lambda: dit.append_vit_image(contexts.gen, torch.zeros(3, 8, 8)), "stage='dit': no ViT"),
        (lambda: dit.generate_text(contexts.gen), "stage='dit': no text head"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    names = set(dit.model.state_dict())
    assert not [n for n in names if n.startswith(("vit", "connector")) or "lm_head" in n]
    assert not [n for n in dit.autoencoder.state_dict() if n.startswith("encoder")]
    assert not [n for n in ar.autoencoder.state_dict() if n.startswith("decoder")]
    assert "llm2vae.weight" not in ar.model.state_dict()


def test_the_last_requests_caches_are_returned(exact: BagelPipeline, checkpoint: Path) -> None:
    fresh = BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="no request"):
        fresh.get_kv_metadata()
    contexts = fresh.prefill("a fox", image_shape=SHAPE)
    n = len(fresh.encode_prompt("a fox"))
    assert fresh.get_past_key_values() is contexts.gen.past_key_values
    assert isinstance(fresh.get_past_key_values(), NaiveCache)
    assert fresh.get_kv_metadata() == {
        "kv_lens": [n],
        "ropes": [n],
        "num_layers": 3,
        "image_shape": SHAPE,
    }
    other = exact.prefill("another", image_shape=(8, 8))
    fresh.render(other, FEW, noise=torch.zeros(4, 16))
    assert fresh.get_past_key_values() is other.gen.past_key_values
    fresh.release_caches()
    with pytest.raises(RuntimeError, match="no request"):
        fresh.get_past_key_values()


def test_defaults_follow_the_prompt(
    exact: BagelPipeline, photo: Tensor, seeded: Seeded, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[DenoiseParams] = []

    def render(contexts: BagelContexts, params: DenoiseParams, **_: object) -> Tensor:
        used.append(params)
        return torch.zeros(tuple(contexts.image_shape or ()))

    monkeypatch.setattr(exact, "render", render)
    assert exact.generate("a fox").shape == (64, 64)
    assert exact.generate([Image.fromarray(photo.numpy()), "blue"]).shape == (40, 56)
    assert exact.generate(photo).shape == (40, 56)
    edit = DenoiseParams.for_edit()
    assert used == [DenoiseParams.for_text_to_image(), edit, edit]


def test_text_is_written_by_the_und_expert_until_its_end(exact: BagelPipeline) -> None:
    context = exact.prefill("say it", understanding=True).gen
    text = exact.generate_text(context, max_length=12)
    assert text == exact.generate_text(context, max_length=12)
    # The slow way: the whole text again for every token.
    ids = [exact.special_tokens.bos]
    while len(ids) < 12 and ids[-1] != exact.special_tokens.eos:
        with torch.no_grad():
            _, hidden = exact.model.extend(context, exact.model.embed(ids), mode="und", causal=True)
            ids.append(int(exact.model.language_model.lm_head(hidden[-1]).argmax()))
    assert text == exact.tokenizer.decode([i for i in ids[1:] if i != exact.special_tokens.eos])
    assert len(text) > 0


def test_text_ends_at_the_end_marker(exact: BagelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter([*exact.tokenizer.encode("the end"), exact.special_tokens.eos])
    monkeypatch.setattr(TokenSampler, "pick", lambda *_: next(tokens))
    assert exact.generate_text(exact.empty_context()) == "the end"
    assert next(tokens, None) is None


@pytest.mark.parametrize(
    ("decoded", "text"),
    [
        ("<|im_start|>so", "so"),
        ("<|im_start|>so<|im_end|>more", "so"),
        ("<|im_start|>so<|im_start|>more", "so"),
        ("<|im_start|>", ""),
    ],
)
def test_written_text_lies_between_the_first_two_markers(decoded: str, text: str) -> None:
    assert written_text(decoded) == text


def test_sampled_text_depends_on_generator_and_temperature(
    exact: BagelPipeline, seeded: Seeded
) -> None:
    context = exact.prefill("say it").gen

    def sample(seed: int, temperature: float) -> str:
        return exact.generate_text(
            context,
            max_length=12,
            do_sample=True,
            temperature=temperature,
            generator=seeded(seed),
        )

    assert sample(0, 5.0) == sample(0, 5.0)
    assert sample(0, 5.0) != sample(1, 5.0)
    assert sample(0, 1e-4) == sample(1, 1e-4) == exact.generate_text(context, max_length=12)
    with pytest.raises(ValueError, match="temperature"):
        sample(0, 0.0)


def test_a_penalty_is_for_the_prompt_too(exact: BagelPipeline) -> None:
    context = exact.prefill("say it").gen
    first = exact.generate_text(context, max_length=2)
    (token,) = exact.tokenizer.encode(first)
    assert exact.generate_text(context, max_length=2, repetition_penalty=99.0) == first
    options: dict[str, Any] = {"max_length": 2, "repetition_penalty": 99.0}
    assert exact.generate_text(context, **options, prompt_ids=[token]) != first


def test_encoding_samples_around_the_mean(exact: BagelPipeline, seeded: Seeded) -> None:
    pixels = torch.rand(3, 16, 24, generator=seeded(0)) * 2 - 1
    latent = exact.encode_image(pixels, seeded(1))
    ae = exact.config.ae
    with torch.no_grad():
        moments = exact.autoencoder.encoder(pixels[None])[0]
    mean, logvar = moments[: ae.z_channels], moments[ae.z_channels :]
    noise = torch.randn(mean.shape, generator=seeded(1))
    expected = ae.scale_factor * (mean + (logvar / 2).exp() * noise - ae.shift_factor)
    assert latent.shape == (4, 8, 12)
    assert torch.allclose(latent, expected, atol=1e-6)


def test_decoding_truncates_to_bytes(exact: BagelPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = torch.tensor([-2.0, -1.0, 0.0, 0.9999, 3.0]).expand(3, 1, 5)
    monkeypatch.setattr(exact.autoencoder, "decode", lambda latent: levels)
    assert exact.decode(torch.zeros(4, 1, 1))[0, :, 0].tolist() == [0, 0, 127, 254, 255]


@pytest.mark.parametrize("shape", [(8, 6), (0, 8), (68, 8), (8, 128)])
def test_image_shapes_must_fit_the_model(exact: BagelPipeline, shape: tuple[int, int]) -> None:
    with pytest.raises(SchemaError, match="multiples of 4 up to 64"):
        exact.prefill("a fox", image_shape=shape)


@pytest.mark.parametrize(
    "shape", [(8,), [8, 8, 8], [8.0, 8.0], (True, 8), ["8", "8"], "88", 8, torch.tensor([8, 8])]
)
def test_an_image_shape_is_two_integers(exact: BagelPipeline, shape: Any) -> None:
    refused = pytest.raises(SchemaError, match="give height and width, two integers")
    exact.release_caches()
    with refused:
        exact.prefill("a fox", image_shape=shape)
    with refused:
        exact.initial_noise(shape)
    with pytest.raises(RuntimeError, match="no request has run"):
        exact.get_kv_metadata()
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    with refused:
        BagelContexts(contexts.gen, contexts.cfg_text, contexts.cfg_img, shape)
    contexts.image_shape = shape
    with refused:
        exact.render(contexts, FEW, noise=torch.zeros(4, 16))


def test_an_image_shape_may_be_a_list(exact: BagelPipeline, seeded: Seeded) -> None:
    image = draw(exact, "a fox", 0, seeded)
    assert torch.equal(
        exact.generate("a fox", FEW, generator=seeded(0), image_shape=[16, 24]), image
    )
    contexts = exact.prefill("a fox", image_shape=list(SHAPE))
    assert contexts.image_shape == exact.get_kv_metadata()["image_shape"] == SHAPE
    noise = exact.initial_noise(list(SHAPE), seeded(0))
    assert torch.equal(noise, exact.initial_noise(SHAPE, seeded(0)))
    branches = contexts.gen, contexts.cfg_text, contexts.cfg_img
    received = BagelContexts(*branches, json.loads("[16, 24]"))
    assert received.image_shape == SHAPE
    assert torch.equal(exact.render(received, FEW, noise=noise), image)
    latents = exact.denoise_batch([contexts, received], [noise, noise], FEW)
    assert torch.equal(*latents)


def test_noise_must_fit_the_image(exact: BagelPipeline, seeded: Seeded) -> None:
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    with pytest.raises(SchemaError, match=r"noise has shape \(5, 16\), wanted \(4, 16\)"):
        exact.render(contexts, FEW, noise=torch.zeros(5, 16))
    with pytest.raises(ValueError, match="not both"):
        exact.render(contexts, FEW, noise=torch.zeros(4, 16), generator=seeded(0))
    contexts.image_shape = None
    with pytest.raises(SchemaError, match="no image_shape"):
        exact.render(contexts, FEW, generator=seeded(0))
