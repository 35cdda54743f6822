"""The three contexts: bookkeeping, prefixes, and that cached tensors are only ever read."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel import (
    BagelContext,
    BagelContexts,
    BagelPipeline,
    DenoiseParams,
    NaiveCache,
)
from omni_kvlink.models.bagel.images import ResizeRule, load_image, resize

from .conftest import SHAPE

Seeded = Callable[[int], torch.Generator]
EDIT = DenoiseParams(cfg_img_scale=2.0, num_timesteps=4)


def tensors(context: BagelContext) -> list[Tensor]:
    """K and V of every layer."""
    cache = context.past_key_values
    found = [
        layers[i] for layers in (cache.key_cache, cache.value_cache) for i in range(len(layers))
    ]
    return [tensor for tensor in found if tensor is not None]


def raw(context: BagelContext) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors(context)]


def cut(context: BagelContext, tokens: int) -> list[bytes]:
    return [t[:tokens].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors(context)]


def lens(context: BagelContext) -> tuple[int, int]:
    (tokens,), (position,) = context.kv_lens, context.ropes
    assert all(tensor.shape[0] == tokens for tensor in tensors(context))
    assert tensors(context) or tokens == 0
    return tokens, position


def test_an_empty_context_has_no_tensors(exact: BagelPipeline) -> None:
    context = exact.empty_context()
    assert (context.kv_lens, context.ropes) == ([0], [0])
    assert isinstance(context.past_key_values, NaiveCache)
    assert context.past_key_values.key_cache == {0: None, 1: None, 2: None}
    assert context.past_key_values.value_cache == {0: None, 1: None, 2: None}
    assert context.past_key_values.seq_lens == 0


def test_text_takes_a_token_and_a_position_each(exact: BagelPipeline) -> None:
    ids = exact.encode_prompt("a tree")
    special_tokens = exact.special_tokens
    assert (ids[0], ids[-1]) == (special_tokens.bos, special_tokens.eos)
    assert exact.tokenizer.decode(ids[1:-1]) == "a tree"
    context = exact.append_text(exact.empty_context(), ids)
    assert lens(context) == (len(ids), len(ids))
    assert lens(exact.append_text(context, ids[:2])) == (len(ids) + 2, len(ids) + 2)
    assert isinstance(context.past_key_values, NaiveCache)
    assert context.past_key_values.seq_lens == len(ids)


def test_an_image_block_takes_one_position(exact: BagelPipeline) -> None:
    context = exact.append_text(exact.empty_context(), [1, 2, 3])
    context = exact.append_vae_latent(context, torch.randn(4, 6, 10))  # 3 x 5 patches
    assert lens(context) == (3 + 15 + 2, 4)
    context = exact.append_vit_image(context, torch.rand(3, 16, 24))  # 2 x 3 patches
    assert lens(context) == (20 + 6 + 2, 5)
    context = exact.append_text(context, [1])
    assert lens(context) == (29, 6)


def test_text_to_image(pipeline: BagelPipeline) -> None:
    contexts = pipeline.prefill("a red fox", image_shape=SHAPE)
    n = len(pipeline.encode_prompt("a red fox"))
    assert contexts.image_shape == SHAPE
    assert contexts.text is None
    assert lens(contexts.gen) == lens(contexts.cfg_img) == (n, n)
    assert lens(contexts.cfg_text) == (0, 0)
    assert raw(contexts.cfg_img) == raw(contexts.gen)


def test_two_texts_leave_the_first_in_cfg_text(pipeline: BagelPipeline) -> None:
    contexts = pipeline.prefill(["a red fox", "in the snow"], image_shape=SHAPE)
    first = len(pipeline.encode_prompt("a red fox"))
    both = first + len(pipeline.encode_prompt("in the snow"))
    assert lens(contexts.gen) == lens(contexts.cfg_img) == (both, both)
    assert lens(contexts.cfg_text) == (first, first)
    assert raw(contexts.cfg_text) == cut(contexts.gen, first)
    assert raw(contexts.cfg_img) == raw(contexts.gen)


def test_edit(pipeline: BagelPipeline, photo: Tensor, seeded: Seeded) -> None:
    contexts = pipeline.prefill([photo, "make it red"], generator=seeded(3))
    # 40 x 56 pixels: 10 x 14 latent tokens, 5 x 7 ViT patches, two markers each.
    image = (140 + 2 + 35 + 2, 2)
    n = len(pipeline.encode_prompt("make it red"))
    assert contexts.image_shape == (40, 56)
    assert lens(contexts.cfg_text) == image
    assert lens(contexts.gen) == (image[0] + n, image[1] + n)
    assert lens(contexts.cfg_img) == (n, n)
    assert raw(contexts.cfg_text) == cut(contexts.gen, image[0])
    text_alone = pipeline.append_text(
        pipeline.empty_context(), pipeline.encode_prompt("make it red")
    )
    assert raw(contexts.cfg_img) == raw(text_alone)


def test_text_image_text(pipeline: BagelPipeline, photo: Tensor, seeded: Seeded) -> None:
    contexts = pipeline.prefill(["look:", photo, "again, blue"], generator=seeded(3))
    first, last = (len(pipeline.encode_prompt(text)) for text in ("look:", "again, blue"))
    before = (first + 179, first + 2)
    assert lens(contexts.cfg_text) == before
    assert lens(contexts.gen) == (before[0] + last, before[1] + last)
    assert lens(contexts.cfg_img) == (first + last, first + last)
    assert raw(contexts.cfg_text) == cut(contexts.gen, before[0])
    texts = pipeline.prefill(["look:", "again, blue"])
    assert raw(contexts.cfg_img) == raw(texts.gen)


def test_an_image_last_leaves_cfg_text_equal_to_gen(
    exact: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    contexts = exact.prefill(["look:", photo], generator=seeded(3))
    assert raw(contexts.cfg_text) == raw(contexts.gen)
    assert lens(contexts.cfg_img)[0] == len(exact.encode_prompt("look:"))


def test_the_latent_comes_before_the_vit_block(
    exact: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    """A prefill is the single steps in the published order, with one generator."""
    pixels = photo.permute(2, 0, 1).float() / 127.5 - 1
    context = exact.append_vae_latent(exact.empty_context(), exact.encode_image(pixels, seeded(3)))
    context = exact.append_vit_image(context, pixels)
    expected = exact.append_text(context, exact.encode_prompt("go"))
    gen = exact.prefill([photo, "go"], generator=seeded(3)).gen
    for got, expected_tensor in zip(tensors(gen), tensors(expected), strict=True):
        assert torch.allclose(got, expected_tensor, atol=1e-4)


def test_think_puts_the_plan_into_gen_only(pipeline: BagelPipeline) -> None:
    options: dict[str, Any] = {"think": True, "system_prompt": "plan first", "max_think_tokens": 9}
    contexts = pipeline.prefill("a fox", image_shape=SHAPE, **options)
    system, prompt = (len(pipeline.encode_prompt(text)) for text in ("plan first", "a fox"))
    assert contexts.text is not None
    plan = len(pipeline.encode_prompt(contexts.text))
    assert lens(contexts.cfg_text) == (system, system)
    assert lens(contexts.cfg_img) == (system + prompt,) * 2
    assert lens(contexts.gen) == (system + prompt + plan,) * 2
    assert raw(contexts.cfg_text) == cut(contexts.gen, system)
    assert raw(contexts.cfg_img) == cut(contexts.gen, system + prompt)
    unplanned = pipeline.prefill(["plan first", "a fox"]).gen
    assert contexts.text == pipeline.generate_text(unplanned, max_length=9)


def test_the_system_prompt_stays_in_cfg_img_beside_an_image(
    exact: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    options: dict[str, Any] = {"think": True, "system_prompt": "plan first", "max_think_tokens": 3}
    contexts = exact.prefill([photo, "blue"], generator=seeded(3), **options)
    assert raw(contexts.cfg_img) == raw(exact.prefill(["plan first", "blue"]).gen)
    assert lens(contexts.cfg_text)[0] == len(exact.encode_prompt("plan first")) + 179


def test_an_image_is_resized_into_the_models_range(exact: BagelPipeline, seeded: Seeded) -> None:
    """Both blocks see the image that was resized for the autoencoder."""
    large = (torch.arange(90 * 147 * 3) % 251).to(torch.uint8).view(90, 147, 3)
    contexts = exact.prefill(large, generator=seeded(3))
    assert contexts.image_shape == (40, 64)  # 39.2 by 64
    assert lens(contexts.gen) == (10 * 16 + 2 + 5 * 8 + 2, 2)
    small = resize(load_image(large), ResizeRule(64, 32, 4))
    again = exact.prefill([small], generator=seeded(3))
    assert raw(again.gen) == raw(contexts.gen)


def test_understanding_reads_images_by_the_vit_alone(
    exact: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    generator = seeded(3)
    contexts = exact.prefill([photo, "what is it"], understanding=True, generator=generator)
    assert lens(contexts.gen)[0] == 37 + len(exact.encode_prompt("what is it"))
    assert contexts.image_shape is None
    assert torch.equal(generator.get_state(), seeded(3).get_state())


def test_a_snapshot_shares_tensors_but_no_containers(exact: BagelPipeline) -> None:
    context = exact.append_text(exact.empty_context(), [1, 2, 3])
    copy, before = context.snapshot(), raw(context)
    cache = context.past_key_values
    assert isinstance(cache, NaiveCache)
    assert copy.past_key_values.key_cache[1] is cache.key_cache[1]
    cache.key_cache[1], cache.value_cache[2] = None, None
    context.kv_lens[0], context.ropes[0] = 9, 9
    assert (copy.kv_lens, copy.ropes) == ([3], [3])
    assert raw(copy) == before


def test_steps_do_not_change_the_given_context(pipeline: BagelPipeline) -> None:
    context = pipeline.append_text(pipeline.empty_context(), [1, 2, 3])
    before, tensors_before = raw(context), tensors(context)
    pipeline.append_text(context, [4, 5])
    pipeline.append_vae_latent(context, torch.randn(4, 4, 4))
    pipeline.append_vit_image(context, torch.rand(3, 16, 16))
    pipeline.generate_text(context, max_length=4)
    pipeline.render(BagelContexts(context, context, context, (8, 8)), EDIT, noise=torch.ones(4, 16))
    assert lens(context) == (3, 3)
    assert raw(context) == before
    assert all(a is b for a, b in zip(tensors(context), tensors_before, strict=True))


def _as_lists(context: BagelContext) -> Any:
    cache = context.past_key_values
    keys = [cache.key_cache[i] for i in range(len(cache.key_cache))]
    values = [cache.value_cache[i] for i in range(len(cache.value_cache))]
    return SimpleNamespace(key_cache=keys, value_cache=values)


def _read_only(context: BagelContext) -> BagelContext:
    """The same cache in pages that the process may not write: a write would be a signal."""
    made, cache = context.snapshot(), NaiveCache(len(context.past_key_values.key_cache))
    for into, layers in (
        (cache.key_cache, made.past_key_values.key_cache),
        (cache.value_cache, made.past_key_values.value_cache),
    ):
        for i in range(len(layers)):
            tensor = layers[i]
            assert tensor is not None
            with tempfile.TemporaryFile() as file:
                file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
                file.flush()
                pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the buffer is not writable
                into[i] = torch.frombuffer(memoryview(pages), dtype=tensor.dtype).view(tensor.shape)
    return BagelContext(list(context.kv_lens), list(context.ropes), cache)


def _prefix_view(context: BagelContext, of: BagelContext) -> BagelContext:
    made = of.snapshot()
    cache, tokens = made.past_key_values, context.kv_lens[0]
    assert isinstance(cache, NaiveCache)
    for i in range(cache.num_layers):
        keys, values = cache.key_cache[i], cache.value_cache[i]
        assert keys is not None
        assert values is not None
        cache.key_cache[i], cache.value_cache[i] = keys[:tokens], values[:tokens]
    return BagelContext(list(context.kv_lens), list(context.ropes), cache)


def test_lists_views_and_read_only_memory_give_the_same_latent(
    pipeline: BagelPipeline, photo: Tensor, seeded: Seeded
) -> None:
    contexts = pipeline.prefill(["look:", photo, "blue"], generator=seeded(1))
    noise = pipeline.initial_noise(contexts.image_shape, seeded(2))
    expected = pipeline.denoise(contexts, noise, EDIT)
    gen = BagelContext(contexts.gen.kv_lens, contexts.gen.ropes, _as_lists(contexts.gen))
    view = _prefix_view(contexts.cfg_text, contexts.gen)
    read_only = [_read_only(one) for one in (contexts.gen, contexts.cfg_text, contexts.cfg_img)]
    for other in (
        BagelContexts(gen, contexts.cfg_text, contexts.cfg_img, contexts.image_shape),
        BagelContexts(contexts.gen, view, contexts.cfg_img, contexts.image_shape),
        BagelContexts(read_only[0], read_only[1], read_only[2], contexts.image_shape),
    ):
        assert torch.equal(pipeline.denoise(other, noise, EDIT), expected)


def test_read_only_memory_can_be_continued(pipeline: BagelPipeline) -> None:
    context = pipeline.append_text(pipeline.empty_context(), [1, 2, 3])
    expected = pipeline.append_text(context, [4, 5])
    assert raw(pipeline.append_text(_read_only(context), [4, 5])) == raw(expected)


def test_an_empty_cache_may_be_none_or_tensors_without_tokens(
    exact: BagelPipeline, seeded: Seeded
) -> None:
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    noise, none = exact.initial_noise((8, 8), seeded(2)), [None] * 3
    expected = exact.denoise(contexts, noise, EDIT)
    zero = [torch.empty(0, 2, 16)] * 3
    for empty in (none, zero):
        cache: Any = SimpleNamespace(key_cache=empty, value_cache=empty)
        cfg_text = BagelContext([0], [0], cache)
        other = BagelContexts(contexts.gen, cfg_text, contexts.cfg_img, (8, 8))
        assert torch.equal(exact.denoise(other, noise, EDIT), expected)


Spoil = Callable[[NaiveCache], Any]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.key_cache.update({1: None}), "gen: K of layer 1 is missing"),
        (lambda c: c.value_cache.update({2: c.value_cache[2][:-1]}), "gen: V of layer 2 has shape"),
        (lambda c: c.key_cache.update({0: c.key_cache[0].bfloat16()}), "K of layer 0 is torch.bf"),
        (lambda c: c.value_cache.pop(2), "gen: V has 2 layers, the model 3"),
        (lambda c: c.key_cache.update({7: c.key_cache.pop(0)}), "no layer 0 among"),
        (lambda c: c.key_cache.update({0: c.key_cache[0].to("meta")}), "K of layer 0 is on meta"),
    ],
)
def test_a_partial_cache_is_an_error_and_never_an_image(
    exact: BagelPipeline, spoil: Spoil, message: str
) -> None:
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    cache = contexts.gen.past_key_values
    assert isinstance(cache, NaiveCache)
    spoil(cache)
    noise = torch.zeros(4, 16)
    with pytest.raises(SchemaError, match=message):
        exact.denoise(contexts, noise, EDIT)
    with pytest.raises(SchemaError, match=message.removeprefix("gen: ")):
        exact.append_text(contexts.gen, [1])


@pytest.mark.parametrize("branch", ["cfg_text", "cfg_img"])
def test_a_branch_is_checked_when_it_is_read(exact: BagelPipeline, branch: str) -> None:
    contexts = exact.prefill("a fox", image_shape=(8, 8))
    setattr(contexts, branch, BagelContext([4], [4], NaiveCache(3)))
    noise = torch.zeros(4, 16)
    with pytest.raises(SchemaError, match=f"{branch}: K of layer 0 is missing"):
        exact.denoise(contexts, noise, EDIT)
    unguided = DenoiseParams(cfg_text_scale=1.0, num_timesteps=3)
    assert exact.denoise(contexts, noise, unguided).isfinite().all()


@pytest.mark.parametrize(("kv_lens", "ropes"), [([5, 5], [5]), ([5], []), ([-1], [0]), ([5], [-1])])
def test_lengths_must_make_sense(
    exact: BagelPipeline, kv_lens: list[int], ropes: list[int]
) -> None:
    cache = exact.append_text(exact.empty_context(), [1] * 5).past_key_values
    with pytest.raises(SchemaError, match="kv_lens"):
        exact.append_text(BagelContext(kv_lens, ropes, cache), [1])


def test_wrong_inputs_are_refused(exact: BagelPipeline) -> None:
    empty = exact.empty_context()
    for ids in ([], [-1], [288]):
        with pytest.raises(SchemaError, match="token ids"):
            exact.append_text(empty, ids)
    for latent in (torch.zeros(3, 4, 4), torch.zeros(1, 4, 4, 4)):
        with pytest.raises(SchemaError, match="latent has shape"):
            exact.append_vae_latent(empty, latent)
    for pixels in (torch.zeros(3, 12, 16), torch.zeros(1, 16, 16)):
        with pytest.raises(SchemaError, match="multiples of 8"):
            exact.append_vit_image(empty, pixels)
    with pytest.raises(SchemaError, match="9x1 patches; the model has 8 a side"):
        exact.append_vit_image(empty, torch.zeros(3, 72, 8))
