"""A picture of the tokens and layers in which two caches differ, in characters."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from omni_kvlink.payload.branches import PART_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink.inspection.difference import TensorDifference

_SHADES = ((0.0, "."), (0.01, ":"), (0.1, "+"), (0.5, "#"), (1.0, "@"))
"""The largest part of elements that differ, and its character."""
LEGEND = ". equal  : up to 1 % of the elements differ  + up to 10 %  # up to half  @ more"
_MOST_LABEL = 24


def picture(differences: Sequence[TensorDifference], columns: int) -> Iterator[str]:
    """Yield the lines of a picture: a row for each tensor, the tokens from left to right.

    Rows of equal tensors are one line together. `columns` is the width of a line.
    """
    rows = max(1, *(len(difference.shares) for difference in differences))
    widest = max(len(_label(difference)) for difference in differences)
    indent = min(widest, _MOST_LABEL)
    step = -(-rows // (columns - indent - 1))
    noun = "token" if "/" not in differences[0].a.spec.name else "row"
    scale = f"a character is {step} {noun}s" if step > 1 else f"a character is a {noun}"
    yield f"{noun}s 0 to {rows - 1}, {scale}"
    for is_equal, group in groupby(differences, lambda difference: difference.is_equal):
        ones = list(group)
        if is_equal and len(ones) > 2:
            yield f"{_label(ones[0])} to {_label(ones[-1])}: equal"
        else:
            for difference in ones:
                yield f"{_label(difference)[-indent:]:>{indent}} {_shades(difference.shares, step)}"


def _label(difference: TensorDifference) -> str:
    name = difference.a.spec.name
    if "/" in name:
        return name.partition("/")[2]
    _, layer, part = name.split(".")
    return f"{layer} {PART_WORDS[part]}"


def _shades(shares: torch.Tensor, step: int) -> str:
    if not len(shares):
        return "(nothing to compare)"
    padding = torch.zeros(-len(shares) % step)
    parts = torch.cat([shares, padding]).view(-1, step).amax(1)
    return "".join(_shade(float(part)) for part in parts)


def _shade(part: float) -> str:
    return next(character for limit, character in _SHADES if part <= limit)
