"""Prompts in the form of vLLM-Omni: a map with the prompt, its images, and what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_kvlink.errors import SchemaError

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
