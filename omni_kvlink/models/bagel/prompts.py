"""The items of a prompt: texts, token ids and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, Union

import torch
from torch import Tensor

from omni_kvlink.errors import SchemaError

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.images import ImageLike

TokenIds: TypeAlias = Sequence[int] | Tensor
"""Token ids of a text, read as they are: markers are among them where the text is to have them, as
in `BagelPipeline.encode_prompt`. A list or tuple of ints, or an int64 or int32 tensor [n]."""

Item: TypeAlias = Union[str, Sequence[int], "ImageLike"]
Prompt: TypeAlias = Union[str, "ImageLike", Sequence[Union[int, str, Sequence[int], "ImageLike"]]]
"""One item, or a list of them in their order. A list of ints alone is one item: token ids."""

_DTYPES = (torch.int64, torch.int32)

# Only the form is fixed by the training: a plan between these tags, then the result.
_THINK = "Before you {task}, plan it step by step. Write the plan between <think> and </think>."
THINK_IMAGE_PROMPT = _THINK.format(task="draw the image")
THINK_TEXT_PROMPT = _THINK.format(task="answer")


def first_text(*, think: bool, understanding: bool, system_prompt: str | None) -> str:
    """Return the text that think mode puts before a prompt; "" without think mode."""
    default = THINK_TEXT_PROMPT if understanding else THINK_IMAGE_PROMPT
    return (system_prompt or default) if think else ""


def prompt_items(prompt: Prompt) -> list[Item]:
    """Return the items of a prompt."""
    if isinstance(prompt, (list, tuple)) and not (prompt and is_token_ids(prompt)):
        return list(prompt)
    return [prompt]  # type: ignore[list-item]


def is_token_ids(item: object) -> TypeGuard[TokenIds]:
    """Whether an item is token ids: an int tensor [n], or a list or tuple that begins with an int.

    An empty one is, too; `checked_token_ids` refuses it, and checks the rest of the others.
    """
    if isinstance(item, Tensor):
        return item.ndim == 1 and item.dtype in _DTYPES
    return isinstance(item, (list, tuple)) and (not item or isinstance(item[0], int))


def checked_token_ids(item: TokenIds, vocab_size: int) -> list[int]:
    """Return token ids as a list.

    Raises SchemaError if there are none, or one is no int within [0, vocab_size).
    """
    ids = item.tolist() if isinstance(item, Tensor) else list(item)
    if not ids:
        raise SchemaError(f"token ids: none are given; ints within [0, {vocab_size}) are needed")
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise SchemaError(
                f"token ids must be within [0, {vocab_size}), ints; number {index} is {token!r:.50}"
            )
    return ids


def is_text(item: Item) -> TypeGuard[str | TokenIds]:
    """Whether an item is a text or token ids, and no image."""
    return isinstance(item, str) or is_token_ids(item)
