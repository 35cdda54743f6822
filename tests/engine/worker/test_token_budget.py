"""How the tokens of a step are divided among requests."""

from __future__ import annotations

import pytest

from omni_kvlink.engine.worker.token_budget import divide_tokens


@pytest.mark.parametrize(
    ("num_tokens", "budget", "chunked", "expected"),
    [
        ([5, 1, 7, 1], 20, True, [5, 1, 7, 1]),
        ([5, 1, 7, 1], 9, True, [5, 1, 2, 1]),  # texts that are written do not wait
        ([5, 7, 1], 6, True, [5, 0, 1]),
        ([50, 7, 1], 6, True, [5, 0, 1]),
        ([5, 1, 7, 2], 9, False, [5, 1, 0, 0]),  # first come, first served
        ([50, 1, 2], 9, False, [50, 1, 0]),  # a text that is never divided is read alone
        ([4, 1, 3], 8, False, [4, 1, 3]),
        ([1, 1], 2, True, [1, 1]),
        ([], 4, True, []),
    ],
)
def test_tokens_of_a_step(
    num_tokens: list[int], budget: int, chunked: bool, expected: list[int]
) -> None:
    assert divide_tokens(num_tokens, budget, chunked=chunked) == expected
