"""`TokenLog`: the tokens that a request's text was given so far."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from omni_kvlink.engine.tokens.outputs import LogprobsLists

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclasses.dataclass
class _Token:
    """A token, and the facts of the logits that it was chosen by."""

    token: int
    num_nans: int
    row_ids: list[int] = dataclasses.field(default_factory=list)
    row: list[float] = dataclasses.field(default_factory=list)
    rank: int = 0


class TokenLog:
    """Records each token of one request as it is chosen; `add` is an `OnToken` of the model.

    `logprobs` is the sampling param of that name.
    """

    def __init__(self, logprobs: int | None = None):
        self._logprobs = logprobs
        self._tokens: list[_Token] = []
        self._taken = 0

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Record a token, and what is wanted of its logits [vocab]."""
        logits = logits.float()
        record = _Token(token, int(logits.isnan().sum()))
        if self._logprobs is not None:
            logprobs = logits.log_softmax(-1)
            count = len(logprobs) if self._logprobs == -1 else min(self._logprobs, len(logprobs))
            top = logprobs.topk(count)
            record.row_ids = [token, *top.indices.tolist()]
            record.row = [float(logprobs[token]), *top.values.tolist()]
            record.rank = int((logprobs >= logprobs[token]).sum())
        self._tokens.append(record)

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return [record.token for record in self._tokens]

    def logprobs(self) -> LogprobsLists | None:
        """A row for each token; None unless they are wanted."""
        return None if self._logprobs is None else _lists(self._tokens)

    def take_step(self) -> TokenLog:
        """The tokens since the last call, in a log of their own."""
        step = TokenLog(self._logprobs)
        step._tokens, self._taken = self._tokens[self._taken :], len(self._tokens)
        return step


def step_outputs(logs: Mapping[str, TokenLog]) -> dict[str, Any]:
    """The fields of a `TokenOutputs` for the tokens since the last call; of at most one a request.

    `logs` are in the order of the step's requests.
    """
    steps = {key: log.take_step() for key, log in logs.items()}
    has_rows = any(step._logprobs is not None for step in steps.values())
    return {
        "sampled_token_ids": [step.token_ids for step in steps.values()],
        "logprobs": _lists([_first_token(step) for step in steps.values()]) if has_rows else None,
        "num_nans_in_logits": {
            key: sum(record.num_nans for record in step._tokens)
            for key, step in steps.items()
            if step._tokens
        },
    }


def _first_token(step: TokenLog) -> _Token:
    return step._tokens[0] if step._tokens else _Token(0, 0)


def _lists(tokens: list[_Token]) -> LogprobsLists:
    return LogprobsLists(
        [t.row_ids for t in tokens], [t.row for t in tokens], [t.rank for t in tokens]
    )
