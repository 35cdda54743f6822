"""`Prompt`: texts and images, or embeddings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from omni_kvlink.errors import SchemaError

_EMBEDS = re.compile(r"(negative_)?(pooled_)?prompt_(embeds|embeds_mask|attention_mask)(_[2-9])?")


@dataclasses.dataclass(frozen=True, eq=False)
class EmbedsPrompt:
    """Embeddings of one prompt instead of its text.

    Attributes:
        tensors: by the names of the pipeline's arguments: `prompt_embeds`, and such as
            `prompt_embeds_mask`, `pooled_prompt_embeds` and `negative_prompt_embeds`; the first
            dimension of each is 1.
        images: uint8 [H, W, 3], of a prompt that has some.
    """

    tensors: Mapping[str, torch.Tensor]
    images: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if not _EMBEDS.fullmatch(name):
                raise SchemaError(f"{name}: no embeddings of a prompt; such as prompt_embeds")
            if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.shape[0] != 1:
                kind = getattr(tensor, "shape", type(tensor).__name__)
                raise SchemaError(f"{name}: a tensor of one prompt, [1, …], not {kind}")
        if "prompt_embeds" not in self.tensors:
            raise SchemaError(f"{', '.join(self.tensors)}: prompt_embeds is missing")

    @property
    def layout(self) -> tuple[object, ...]:
        """Names, shapes and dtypes of the tensors: prompts of one layout can be concatenated."""
        tensors = sorted(self.tensors.items())
        return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors)


PromptItems: TypeAlias = str | torch.Tensor | Sequence[int | str | torch.Tensor | Sequence[int]]
"""A text, an image (uint8 [H, W, 3]), token ids, or several of them in order."""

Prompt: TypeAlias = PromptItems | EmbedsPrompt
"""Texts, images and token ids; or embeddings."""
