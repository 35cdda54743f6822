"""Divides the tokens of a step among requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def divide_tokens(wanted: Sequence[int], budget: int, *, chunked: bool) -> list[int]:
    """How many tokens each request reads in a step, of those that it has left.

    Requests that want one token come first, then the others in their order, within the budget; the
    last one of them reads a part. Without `chunked`, each reads all of its tokens or none, and the
    first one reads all of them even if they exceed the budget.
    """
    counts = [int(tokens == 1) for tokens in wanted]
    left = budget - sum(counts)
    longer = [i for i, tokens in enumerate(wanted) if tokens > 1]
    for i in longer:
        if chunked:
            counts[i] = min(wanted[i], left)
        elif wanted[i] <= left or i == longer[0]:
            counts[i] = wanted[i]
        else:
            break
        left -= counts[i]
    return counts
