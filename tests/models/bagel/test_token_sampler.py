"""`TokenSampler`, against the definitions written out one token at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink.models.bagel.token_sampler import TokenSampler

if TYPE_CHECKING:
    from collections.abc import Collection

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 1.0, -2.0])


def chances(
    *, temperature: float, top_k: int, top_p: float, penalty: float, seen: Collection[int]
) -> list[float]:
    """The chance of each token."""
    logits = [float(logit) for logit in LOGITS]
    for token in seen:
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = [logit / temperature for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    total = sum(math.exp(logits[token]) for token in order)
    kept, together = list[int](), 0.0
    for token in order:
        if together >= top_p:
            break
        kept.append(token)
        together += math.exp(logits[token]) / total
    mass = sum(math.exp(logits[token]) for token in kept)
    return [math.exp(one) / mass if at in kept else 0.0 for at, one in enumerate(logits)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "penalty"),
    [
        (1.0, 0, 1.0, 1.0),
        (0.5, 0, 1.0, 1.0),
        (1.0, 3, 1.0, 1.0),
        (1.0, 99, 1.0, 1.0),
        (1.0, 0, 0.6, 1.0),
        (1.0, 0, 0.95, 1.0),
        (1.0, 0, 1.0, 2.0),
        (2.0, 4, 0.8, 1.3),
    ],
)
def test_tokens_are_drawn_with_their_chances(
    temperature: float, top_k: int, top_p: float, penalty: float
) -> None:
    generator, seen, draws = torch.Generator().manual_seed(0), [3, 1], 3000
    counts = [0] * len(LOGITS)
    for _ in range(draws):
        sampler = TokenSampler(
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=penalty,
            seen=seen,
            generator=generator,
        )
        counts[sampler.pick(LOGITS)] += 1
    expected = chances(
        temperature=temperature, top_k=top_k, top_p=top_p, penalty=penalty, seen=seen
    )
    for count, chance in zip(counts, expected, strict=True):
        assert chance > 0 or count == 0
        assert abs(count / draws - chance) < 5 * math.sqrt(0.25 / draws)


def test_chosen_tokens_are_seen() -> None:
    sampler = TokenSampler(repetition_penalty=2.0)
    assert [sampler.pick(LOGITS) for _ in range(4)] == [3, 0, 3, 3]
    assert LOGITS[3] == 3.0


def test_one_candidate_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert (
        TokenSampler(do_sample=True, temperature=1.0, top_k=1, generator=generator).pick(LOGITS)
        == 3
    )
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"repetition_penalty": 0.0}),
        {"temperature": 0.0},
    ],
)
def test_params_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TokenSampler(do_sample=True, **wrong)  # type: ignore[arg-type]
