"""Texts of several prompts in one forward pass, and a text in chunks: each as if it were alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.models.bagel.prefill_steps import NextToken, PromptTokens, TextPass, run_steps

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelContext, BagelPipeline

TOLERANCE = 1e-5
"""Of the largest value: products of larger matrices may be summed in another order."""


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def context(pipeline: BagelPipeline, seed: int, count: int) -> BagelContext:
    """A context of so many tokens, and an image block of one position if there are any."""
    if not count:
        return pipeline.empty_context()
    read = pipeline.append_text(pipeline.empty_context(), tokens(seed, count))
    return pipeline.append_vae_latent(read, torch.full((4, 8, 8), 0.1 * seed))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def cache_gap(ours: BagelContext, theirs: BagelContext) -> float:
    """The largest relative difference; lengths and positions must be equal."""
    assert (ours.kv_lens, ours.ropes) == (theirs.kv_lens, theirs.ropes)
    gaps = list[float]()
    for part in ("key_cache", "value_cache"):
        for layer in range(3):
            pair: Any = [getattr(one.past_key_values, part)[layer] for one in (ours, theirs)]
            gaps.append(gap(*pair))
    return max(gaps)


def test_several_texts_in_one_pass_are_those_of_each_alone(exact: BagelPipeline) -> None:
    """Of other lengths, after other contexts, one of which is empty; and a text's next token."""
    texts: list[TextPass] = [
        PromptTokens(exact.empty_context(), tokens(1, 12)),
        PromptTokens(context(exact, 2, 5), tokens(3, 1)),
        NextToken(context(exact, 4, 9), 17),
        PromptTokens(context(exact, 5, 3), tokens(6, 30)),
    ]
    passes = list[int]()
    decoder = exact.model.language_model.model
    hook = decoder.layers[0].register_forward_hook(
        lambda _, inputs, __: passes.append(len(inputs[0]))
    )
    together = exact.advance(texts)
    hook.remove()
    assert passes == [44]
    for one, (longer, rows) in zip(texts, together, strict=True):
        alone, expected = exact.advance([one])[0]
        assert cache_gap(longer, alone) < TOLERANCE
        assert gap(rows, expected) < TOLERANCE
        assert one.context.kv_lens[0] + one.num_tokens == longer.kv_lens[0]
    assert [len(rows) for _, rows in together] == [12, 1, 288, 30]  # hidden states, or logits


def test_no_text_sees_another(exact: BagelPipeline) -> None:
    """Another neighbour changes nothing, not even a bit."""
    one = PromptTokens(context(exact, 1, 4), tokens(2, 8))
    found = [
        exact.advance([one, PromptTokens(exact.empty_context(), tokens(seed, 8))])[0]
        for seed in (3, 4)
    ]
    assert cache_gap(found[0][0], found[1][0]) == 0


@pytest.mark.parametrize("size", [1, 3, 8, 31, 64])
def test_a_text_in_chunks_is_the_whole_text(exact: BagelPipeline, size: int) -> None:
    whole = PromptTokens(context(exact, 1, 6), tokens(2, 32))
    expected, hidden = exact.advance([whole])[0]
    left, read, rows = whole, 0, list[torch.Tensor]()
    while True:
        count = min(size, left.num_tokens)
        answer = exact.advance([left.chunk(count)])[0]
        rows.append(answer[1])
        read += count
        if count == left.num_tokens:
            break
        left = left.rest(count, answer)
        assert left.num_computed_tokens == whole.num_computed_tokens + read
    assert read == 32
    assert cache_gap(answer[0], expected) < TOLERANCE
    assert gap(torch.cat(rows), hidden) < TOLERANCE


IMAGE = torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8)


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("understanding", [False, True])
@pytest.mark.parametrize("prompt", ["a fox", ["a", "fox"], ["a fox", IMAGE, "red"], [IMAGE, "b"]])
def test_prefix_tokens_are_what_gen_begins_with(
    exact: BagelPipeline, prompt: Any, understanding: bool, think: bool
) -> None:
    how: dict[str, Any] = {"think": think, "understanding": understanding}
    read = list[int]()

    def advance(texts: list[TextPass]) -> Any:
        (one,) = texts
        if isinstance(one, PromptTokens) and one.num_computed_tokens == len(read):
            read.extend(one.token_ids)
        return exact.advance(texts)

    steps = exact.prefill_steps(prompt, image_shape=(16, 16), max_think_tokens=1, **how)
    run_steps(steps, advance)
    prefix = exact.prefix_tokens(prompt, **how)
    assert read[: len(prefix)] == prefix
    assert bool(prefix) == (think or isinstance(prompt, str) or isinstance(prompt[0], str))
