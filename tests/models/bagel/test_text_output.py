"""Texts with their tokens, token ids as prompts, and hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.images import load_image, resize, to_pixels
from omni_kvlink.models.bagel.prefill_steps import NextToken

from .conftest import stored

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelPipeline


def slow_logits(pipeline: BagelPipeline, context: Any, ids: list[int]) -> torch.Tensor:
    """The logits after each of these tokens, in one pass over all of them."""
    with torch.no_grad():
        rows = pipeline.model.embed(ids)
        _, hidden = pipeline.model.extend(context, rows, mode="und", causal=True)
        logits: torch.Tensor = pipeline.model.language_model.lm_head(hidden)
        return logits


def test_the_tokens_of_a_text_and_their_logits(exact: BagelPipeline) -> None:
    context = exact.prefill("say it", understanding=True).gen
    found = exact.generate_text_output(context, max_length=12, output_logits=True)
    text = exact.generate_text(context, max_length=12)
    assert (found.text, exact.tokenizer.decode(found.token_ids)) == (text, text)
    assert (len(found.token_ids), found.finish_reason) == (11, "length")
    ids = [exact.special_tokens.bos, *found.token_ids]
    expected = slow_logits(exact, context, ids)[:-1]
    assert found.logits is not None
    assert found.logprobs is not None
    assert (found.logits - expected).abs().max() < 1e-4
    assert found.logits.argmax(-1).tolist() == found.token_ids
    assert torch.equal(found.logprobs, torch.log_softmax(found.logits.float(), -1))
    assert exact.generate_text_output(context, max_length=3).logits is None


def test_what_the_text_continues_has_its_tokens(pipeline: BagelPipeline) -> None:
    """K and V of `context` are those of the prompt with the text's tokens read one by one."""
    context = pipeline.prefill("say it", understanding=True).gen
    found = pipeline.generate_text_output(context, max_length=5)
    again = context
    for token in [pipeline.special_tokens.bos, *found.token_ids]:
        again = pipeline.append_text(again, [token])
    assert found.context.kv_lens == again.kv_lens == [context.kv_lens[0] + 5]
    assert all(map(torch.equal, stored(found.context, 2), stored(again, 2)))


def test_the_end_marker_is_a_token_and_not_in_the_text(
    exact: BagelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, chosen = [*exact.tokenizer.encode("so"), exact.special_tokens.eos], list[int]()
    tokens = iter(ids)
    monkeypatch.setattr(
        "omni_kvlink.models.bagel.token_sampler.TokenSampler.pick", lambda *_: next(tokens)
    )
    found = exact.generate_text_output(
        exact.empty_context(), max_length=9, on_token=lambda token, logits: chosen.append(token)
    )
    assert (found.text, found.token_ids, found.finish_reason) == ("so", ids, "stop")
    assert chosen == ids


def test_token_ids_are_read_as_the_text_they_are(pipeline: BagelPipeline, photo: Any) -> None:
    ids = pipeline.encode_prompt("make it night")
    expected = pipeline.prefill([photo, "make it night"])
    forms: list[Any] = [ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)]
    for form in forms:
        found = pipeline.prefill([photo, form])
        for name in ("gen", "cfg_text", "cfg_img"):
            one, other = getattr(found, name), getattr(expected, name)
            assert (one.kv_lens, one.ropes) == (other.kv_lens, other.ropes)
        assert all(map(torch.equal, stored(found.cfg_img, 2), stored(expected.cfg_img, 2)))
    assert torch.equal(
        stored(pipeline.prefill(ids).gen, 2)[0], stored(pipeline.prefill("make it night").gen, 2)[0]
    )
    assert pipeline.count_tokens([photo, ids]) == pipeline.count_tokens([photo, "make it night"])
    assert pipeline.text_ids([photo, ids], "plan") == [*pipeline.encode_prompt("plan"), *ids]


def test_only_token_ids_of_the_vocabulary_are_read(exact: BagelPipeline) -> None:
    size = exact.config.llm.vocab_size
    wrong: list[tuple[Any, str]] = [
        ([[]], "none are given"),
        ([[1, size]], rf"within \[0, {size}\), ints; number 1 is {size}"),
        ([[3, -1]], "number 1 is -1"),
        ([[True, 2]], "number 0 is True"),
        ([[1, "fox"]], "number 1 is 'fox'"),
        (torch.tensor([size]), f"number 0 is {size}"),
    ]
    for prompt, text in wrong:
        with pytest.raises(SchemaError, match=text):
            exact.prefill(prompt)
    with pytest.raises(TypeError, match="texts and images, not int"):
        exact.prefill(["a fox", 7])


def test_understanding_reads_images_by_the_vit_alone(pipeline: BagelPipeline, photo: Any) -> None:
    contexts = pipeline.prefill([photo, "what is it?"], understanding=True)
    counted = pipeline.count_tokens([photo, "what is it?"], understanding=True)
    assert counted == {"gen": contexts.gen.kv_lens[0], "cfg_img": 0}
    assert contexts.image_shape is None


@pytest.mark.parametrize("keep", ["all", "last"])
def test_hidden_states_are_the_models(pipeline: BagelPipeline, photo: Any, keep: Any) -> None:
    """Bit for bit those of each part of the prompt, read by the network itself."""
    prompt: list[Any] = ["a fox", photo, "make it night"]
    model = pipeline.model
    rows, context = list[torch.Tensor](), pipeline.empty_context()
    original = type(model).extend

    contexts = pipeline.prefill(
        prompt, keep_hidden=keep, generator=torch.Generator().manual_seed(0)
    )
    assert contexts.gen.hidden is not None
    assert contexts.cfg_text.hidden is None
    found = contexts.gen.hidden.tensor()

    def recorded(*given: Any, **options: Any) -> Any:
        longer, hidden = original(model, *given, **options)
        rows.append(hidden)
        return longer, hidden

    model.extend = recorded  # type: ignore[method-assign]
    try:
        for part in prompt:
            if isinstance(part, str):
                context = pipeline.append_text(context, pipeline.encode_prompt(part))
            else:
                seeded = torch.Generator().manual_seed(0)
                image = resize(load_image(part), pipeline.config.vae_resize)
                latent = pipeline.encode_image(
                    to_pixels(resize(image, pipeline.config.vae_resize)), seeded
                )
                context = pipeline.append_vae_latent(context, latent)
                pixels = to_pixels(resize(image, pipeline.config.vit_resize))
                context = pipeline.append_vit_image(context, pixels)
    finally:
        del model.extend
    expected = torch.cat(rows)
    assert expected.shape[0] == contexts.gen.kv_lens[0]
    assert torch.equal(found, expected if keep == "all" else expected[-1])
    assert found.dtype == pipeline.dtype


def test_the_last_hidden_state_gives_the_next_token(exact: BagelPipeline) -> None:
    """Also after tokens that were read in a pass of several texts."""
    context = exact.prefill("say it", understanding=True, keep_hidden="last").gen
    other = exact.prefill("a fox in", understanding=True, keep_hidden="all").gen
    pair = exact.advance([NextToken(context, 5), NextToken(other, 6)])
    kept = [longer.hidden.tensor() for longer, _ in pair if longer.hidden is not None]
    rows = torch.stack([kept[0], kept[1][-1]])
    with torch.no_grad():
        expected = exact.model.language_model.lm_head(rows)
    assert torch.equal(expected, torch.stack([logits for _, logits in pair]))
    assert kept[1].shape[0] == pair[1][0].kv_lens[0]


def test_a_context_without_tokens_has_no_hidden_states(exact: BagelPipeline) -> None:
    context = exact.prefill([], keep_hidden="last").gen
    assert context.hidden is not None
    with pytest.raises(SchemaError, match="without tokens"):
        context.hidden.tensor()
