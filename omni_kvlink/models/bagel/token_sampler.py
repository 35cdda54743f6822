"""`TokenSampler`: chooses the tokens of a text from the model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Generator, Tensor


class TokenSampler:
    """Chooses one token after the other, with the params and in the order of vLLM's sampler.

    Tokens that were seen become less likely first, then the logits are divided by the temperature,
    then `top_k` and `top_p` leave the likeliest tokens, of which one is drawn.

    Args:
        do_sample: draws tokens; otherwise the most probable one is taken.
        temperature: of the drawing, above 0.
        top_k: the number of likeliest tokens to draw from; 0 for all, 1 draws nothing.
        top_p: draws from the fewest likeliest tokens that have this probability together.
        repetition_penalty: divides positive logits of seen tokens, and multiplies negative ones.
        seen: the prompt's tokens; those chosen are added.
        generator: draws; torch's default one if None.

    Raises:
        ValueError: a param is out of its range.
    """

    def __init__(
        self,
        *,
        do_sample: bool = False,
        temperature: float = 0.3,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seen: Sequence[int] = (),
        generator: Generator | None = None,
    ):
        if top_k < 0 or not 0 < top_p <= 1 or not repetition_penalty > 0:
            raise ValueError(
                f"top_k {top_k}, top_p {top_p}, repetition_penalty {repetition_penalty}: from 0, "
                "above 0 up to 1, and above 0"
            )
        if do_sample and not temperature > 0:
            raise ValueError(f"temperature {temperature} is too small: above 0")
        self._temperature = temperature if do_sample and top_k != 1 else None
        self._top_k, self._top_p, self._penalty = top_k, top_p, repetition_penalty
        self._seen, self._generator = set(seen), generator

    def pick(self, logits: Tensor) -> int:
        """Return the next token of logits [vocab], which are not changed."""
        if self._penalty != 1.0 and self._seen:
            logits = self._penalized(logits)
        temperature = self._temperature
        token = int(logits.argmax()) if temperature is None else self._draw(logits / temperature)
        self._seen.add(token)
        return token

    def _penalized(self, logits: Tensor) -> Tensor:
        seen = torch.tensor(sorted(self._seen), device=logits.device)
        seen_logits = logits[seen].float()
        penalized = torch.where(
            seen_logits > 0, seen_logits / self._penalty, seen_logits * self._penalty
        )
        return logits.float().index_copy(0, seen, penalized)

    def _draw(self, logits: Tensor) -> int:
        logits = logits.float()
        if 0 < self._top_k < logits.numel():
            logits = logits.masked_fill(logits < logits.topk(self._top_k).values[-1], -torch.inf)
        chances = logits.softmax(-1)
        if self._top_p < 1:
            ordered, tokens = chances.sort(descending=True, stable=True)
            # the likeliest token has no mass before it, and stays whatever `top_p` is
            mass_before = ordered.cumsum(0) - ordered
            chances = chances.index_fill(0, tokens[mass_before >= self._top_p], 0.0)
        device = "cpu" if self._generator is None else self._generator.device
        return int(torch.multinomial(chances.to(device), 1, generator=self._generator))
