"""K, V and hidden states made of the tokens before them, so that a prefix is told by its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.payload.views import dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.lookup import Match, PrefixStore

LAYERS, HEADS, DIM = 3, 2, 4
ROW = 2 * LAYERS * HEADS * DIM * 4
"""Bytes of K and V of a token."""


def states(tokens: Sequence[int]) -> torch.Tensor:
    """float64 [tokens]: each is a sum over all tokens up to it."""
    return torch.tensor(tokens, dtype=torch.float64).mul(1.618).sin().cumsum(0)


def kv(tokens: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of each layer, `[tokens, heads, dim]` float32."""
    scale = torch.arange(1, HEADS * DIM + 1).view(HEADS, DIM)
    base = states(tokens)[:, None, None] * scale
    return (
        [(base + layer).float() for layer in range(LAYERS)],
        [(base - layer).float() for layer in range(LAYERS)],
    )


def hidden(tokens: Sequence[int]) -> torch.Tensor:
    """`[tokens, 6]`."""
    return (states(tokens)[:, None] * torch.arange(1, 7)).float()


def insert(store: PrefixStore, tokens: Sequence[int], *, states: int = 0, **options: Any) -> None:
    """A prompt, with the hidden states of its last `states` tokens."""
    keys, values = kv(tokens)
    last = hidden(tokens)[-states:] if states else None
    store.insert(list(tokens), None, keys, values, last, **options)


def assert_right(match: Match, prompt: Sequence[int]) -> None:
    """What was found is what these tokens make, bit for bit, and the hidden state is the last's."""
    assert match.requested == len(prompt)
    assert int(match.roi.sum()) == match.tokens
    keys, values = kv(prompt[: match.tokens]) if match.tokens else ([], [])
    for found, made in ((match.keys, keys), (match.values, values)):
        assert len(found) == len(made)
        for mine, theirs in zip(found, made, strict=True):
            assert mine is not None
            assert torch.equal(dense(mine), theirs)
    assert match.is_complete == (match.tokens == len(prompt))
    if match.hidden is not None:
        assert torch.equal(match.hidden, hidden(prompt)[-1:])
