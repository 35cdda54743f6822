"""`Prompt`: texts and images, or embeddings; and checks of params that are tensors or maps."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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


_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data", "modalities")
_IMAGES = ("image", "img2img")


def read_prompt(prompt: Any) -> tuple[Any, dict[str, Any]]:
    """Return a prompt as `as_tensors` takes it, and the sampling params that it brings.

    A map has `prompt` (a text, or a list of items), or `prompt_token_ids`, which follows the images
    of `multi_modal_data`: `image` or `img2img`, one or a list; and `modalities`. Raises SchemaError
    for other fields. What is no map, or a map of `prompt_embeds`, is returned as it is.
    """
    if not isinstance(prompt, Mapping) or "prompt_embeds" in prompt:
        return prompt, {}
    if unknown := sorted(map(str, prompt.keys() - set(_FIELDS))):
        raise SchemaError(f"a prompt has no {', '.join(unknown)}; there are {', '.join(_FIELDS)}")
    texts = [prompt[name] for name in _FIELDS[:2] if prompt.get(name) is not None]
    if len(texts) != 1:
        raise SchemaError("a prompt has a prompt or prompt_token_ids: one of them")
    items = _images(prompt.get("multi_modal_data") or {})
    if "prompt_token_ids" in prompt or not isinstance(texts[0], (list, tuple)):
        items.append(texts[0])
    else:
        items += texts[0]
    params = {"modalities": prompt["modalities"]} if prompt.get("modalities") else {}
    return items, params


def _images(data: Any) -> list[Any]:
    if not isinstance(data, Mapping) or data.keys() - set(_IMAGES):
        raise SchemaError(f"multi_modal_data is a map with {' or '.join(_IMAGES)}: {data!r:.100}")
    items: list[Any] = []
    for name in _IMAGES:
        images = data.get(name)
        if images is not None:
            items += images if isinstance(images, (list, tuple)) else [images]
    return items


def check_values(latents: object, extra_args: object, count: int) -> None:
    """Raise SchemaError unless latents are noise of `count` outputs, and extra_args JSON values."""
    try:
        json.dumps(extra_args, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"extra_args {extra_args!r:.60}: JSON values ({error})") from None
    if extra_args is not None and not isinstance(extra_args, Mapping):
        raise SchemaError(f"extra_args {extra_args!r:.60}: a map of arguments")
    if latents is None:
        return
    if not isinstance(latents, torch.Tensor) or not latents.is_floating_point():
        kind = latents.dtype if isinstance(latents, torch.Tensor) else type(latents).__name__
        raise SchemaError(f"latents: a tensor of floating-point numbers, not {kind}")
    if latents.ndim < 2 or latents.shape[0] != count:
        raise SchemaError(
            f"latents of shape {[*latents.shape]} for num_outputs_per_prompt {count}: "
            "the first dimension is that number"
        )


def comparable(value: object) -> object:
    """The value itself; of a tensor its shape and dtype, of a map its JSON."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
