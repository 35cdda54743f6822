"""`TextWriter`: continues contexts with tokens, of prompts or of texts that the model writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from omni_kvlink.models.bagel.loaded_stage import LoadedStage
from omni_kvlink.models.bagel.prefill_steps import (
    Advanced,
    NextToken,
    Steps,
    TextPass,
    all_steps,
    text_of_steps,
)
from omni_kvlink.models.bagel.text_output import OnToken, TextOutput
from omni_kvlink.models.bagel.token_sampler import TokenSampler
from omni_kvlink.models.bagel.tokenizer import written_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.models.bagel.cache import BagelContext


class TextWriter(LoadedStage):
    """Reads tokens after contexts, and writes texts."""

    @torch.no_grad()
    def advance(self, texts: Sequence[TextPass]) -> list[Advanced]:
        """Read the next tokens of several texts in one pass; see `BagelModel.extend_each`."""
        contexts, lens = [text.context for text in texts], [text.num_tokens for text in texts]
        rows = self.model.embed([token for text in texts for token in text.token_ids])
        contexts, hidden = self.model.extend_each(contexts, rows, lens)
        answers = list(hidden.split(lens))
        written = [i for i, text in enumerate(texts) if isinstance(text, NextToken)]
        if written:
            logits = self.model.language_model.lm_head(torch.cat([answers[i] for i in written]))
            for i, row in zip(written, logits, strict=True):
                answers[i] = row
        return list(zip(contexts, answers, strict=True))

    @torch.no_grad()
    def text_steps(
        self,
        /,
        context: BagelContext,
        *,
        max_length: int = 1000,
        prompt_ids: Sequence[int] = (),
        generator: Generator | None = None,
        output_logits: bool = False,
        on_token: OnToken | None = None,
        **sampling: Any,
    ) -> Steps[TextOutput]:
        """Continue a context with text until the end marker. The context is not changed.

        At most `max_length` tokens, the begin marker included. The `sampling`, and what `generator`
        draws, is `TokenSampler`'s; the penalty is for tokens of the text, and for the prompt's
        `prompt_ids`. `output_logits` keeps those that each token was chosen by; `on_token` is
        called with each token when it is chosen.

        These are the steps of `generate_text`, which takes the same arguments and returns the text,
        and of `generate_text_output`, which returns a `TextOutput`.
        """
        self._require("text head", self.stage != "dit")
        if max_length < 1:
            raise ValueError(f"max_length {max_length} is too small: 1 or more")
        sampler = TokenSampler(seen=prompt_ids, generator=generator, **sampling)
        self.model.check_context("context", context)
        # a discarded text must not claim rows in place
        context = replace(context.snapshot(), hidden=context.hidden)
        special, kept = self.special_tokens, list[Tensor]()
        token, written, chosen = special.bos, list[int](), list[int]()
        while len(written) < max_length and not (written and token == special.eos):
            written.append(token)
            answer = yield NextToken(context, token)
            assert answer is not None
            context, logits = answer
            token = sampler.pick(logits)
            if len(written) == max_length and token != special.eos:
                break  # there is no room for it
            chosen.append(token)
            kept += [logits] if output_logits else []
            if on_token is not None:
                on_token(token, logits)
        return TextOutput(
            written_text(self.tokenizer.decode(written)),
            chosen,
            "stop" if chosen[-1:] == [special.eos] else "length",
            context,
            torch.stack(kept) if kept else None,
        )

    generate_text = text_of_steps(text_steps)
    generate_text_output = all_steps(text_steps)
