"""`TextOutput`: a text that the model has written, with its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from omni_kvlink.models.bagel.cache import BagelContext

OnToken: TypeAlias = Callable[[int, Tensor], None]
"""Called with each token of a text when it is chosen, and the logits [vocab] that the model gave
for it, before any sampling param."""

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class TextOutput:
    """A text, and how it came to be.

    Attributes:
        text: the text, without markers.
        token_ids: the tokens that were chosen; the last one is the end marker if the model wrote
            it. The begin marker is not among them: no token was chosen there.
        finish_reason: "stop" at the end marker, "length" at `max_length`.
        context: the context that was continued, with the begin marker and the text in it, but not
            with the end marker.
        logits: [tokens, vocab] in the model's dtype, as the model gave them; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    context: BagelContext
    logits: Tensor | None = None

    @property
    def logprobs(self) -> Tensor | None:
        """Log-probabilities [tokens, vocab] float32 of the logits; None without those."""
        return None if self.logits is None else self.logits.float().log_softmax(-1)
