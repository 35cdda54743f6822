"""`TokenEmitter`: reports the tokens of a BAGEL text as they are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.engine.tokens.events import TokenEvent
from omni_kvlink.engine.tokens.token_log import TokenLog
from omni_kvlink.models.bagel.tokenizer import written_text

if TYPE_CHECKING:
    from torch import Tensor

    from omni_kvlink.engine.request import OmniDiffusionRequest
    from omni_kvlink.models.bagel.pipeline import BagelPipeline

_INCOMPLETE = "\ufffd"
"""The character to which bytes that are no whole character are decoded."""


def log_of(request: OmniDiffusionRequest) -> TokenLog:
    """The request's token log, made now if it has none."""
    if request.token_log is None:
        request.token_log = TokenLog(request.sampling_params.logprobs)
    log: TokenLog = request.token_log
    return log


class TokenEmitter:
    """Records each token of one text, and emits a `TokenEvent`; `add` is an `OnToken`.

    The texts of all events together are the beginning of the text; what may still change, bytes at
    its end that are no character yet, is in a later one, or in the output alone.
    """

    def __init__(self, pipeline: BagelPipeline, request: OmniDiffusionRequest):
        self._pipeline, self._request = pipeline, request
        self._log, self._text = log_of(request), ""

    def add(self, token: int, logits: Tensor) -> None:
        """Record a token, and emit it."""
        self._log.add(token, logits)
        ids = self._log.token_ids
        pipeline = self._pipeline
        written = pipeline.tokenizer.decode([pipeline.special_tokens.bos, *ids])
        text = written_text(written).rstrip(_INCOMPLETE)
        new, self._text = text[len(self._text) :], max(self._text, text, key=len)
        self._request.emit(TokenEvent(self._request.request_id, len(ids) - 1, [token], new))
