"""Divides the tokens of a step among requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def divide_tokens(num_tokens: Sequence[int], budget: int, *, chunked: bool) -> list[int]:
    """Return the number of tokens that each request reads in a step, of those that it has left.

    Requests that want one token come first, then the others in their order, within the budget; the
    last one of them reads a part. Without `chunked`, each reads all of its tokens or none, and the
    first one reads all of them even if they exceed the budget.
    """
    counts = [int(tokens == 1) for tokens in num_tokens]
    remaining = budget - sum(counts)
    longer = [i for i, tokens in enumerate(num_tokens) if tokens > 1]
    for i in longer:
        if chunked:
            counts[i] = min(num_tokens[i], remaining)
        elif num_tokens[i] <= remaining or i == longer[0]:
            counts[i] = num_tokens[i]
        else:
            break
        remaining -= counts[i]
    return counts
