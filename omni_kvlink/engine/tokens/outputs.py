"""Tokens, and what was sent, in the outputs of executors and requests, named as in vLLM v1."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass
class LogprobsLists:
    """Log-probabilities of tokens by the model's logits, before any sampling param.

    A row has the token that was chosen, then the likeliest ones in their order, the chosen one
    again if it is among them. A step's output has a row for each of its requests, as long as the
    request asks for: empty if it asks for none, or no token was chosen.
    """

    logprob_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: list[list[float]] = dataclasses.field(default_factory=list)
    sampled_token_ranks: list[int] = dataclasses.field(default_factory=list)  # from 1; 0 if empty


@dataclasses.dataclass
class KVConnectorOutput:
    """Requests whose KV was sent, or received, in a step; None if there are none."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None


@dataclasses.dataclass(kw_only=True)
class TokenOutputs:
    """The tokens of a step, in the order of its `req_ids`; a diffusion stage has the defaults.

    In an AR stage `req_ids` are all requests of the step; those that end with it have `results`.
    `prompt_logprobs_dict` stays empty: no request can ask for those. `spec_token_ids` stays None:
    nothing is decoded speculatively.
    """

    sampled_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    spec_token_ids: list[list[int]] | None = None
    logprobs: LogprobsLists | None = None  # None if no request of the step asks for them
    prompt_logprobs_dict: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None  # of requests that got a token, by id


@dataclasses.dataclass(kw_only=True)
class TextResult:
    """The facts about a request's text, apart from the text; None where there is none.

    The last of `token_ids` is the end marker if the model wrote it: `finish_reason` is "stop" then,
    "length" at `max_tokens`. `logprobs` have a row for each token. `hidden_states` are [tokens,
    hidden], or [hidden] of the last token, in the model's dtype, of the tokens in the cache: the
    prompt, and the text if it is the answer.
    """

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: LogprobsLists | None = None
    hidden_states: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class KVSent:
    """A request's KV that was sent: the largest size that a rank of the next stage receives."""

    nbytes: int
    image_shape: tuple[int, int] | None = None  # (height, width), in pixels
    tokens: int = 0  # of its longest context
    has_hidden_states: bool = False  # they were sent, too
    kv_sender_info: tuple[str, ...] = ()  # the URLs at which it was sent, by tensor rank
