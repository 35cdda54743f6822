"""Conversions between a user's images and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.engine.inputs.prompt import EmbedsPrompt
from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.prompts import is_text, prompt_items

if TYPE_CHECKING:
    from omni_kvlink.engine.inputs.prompt import Prompt


def as_tensors(prompt: Any) -> Prompt:
    """A prompt whose images are uint8 [H, W, 3]; transparency becomes white.

    A map of embeddings, with its images under "image", becomes an `EmbedsPrompt`.
    """
    if isinstance(prompt, (str, EmbedsPrompt)):
        return prompt
    if isinstance(prompt, Mapping):
        images = prompt.get("image", ())
        images = images if isinstance(images, (list, tuple)) else [images]
        tensors = {name: value for name, value in prompt.items() if name != "image"}
        return EmbedsPrompt(tensors, [_as_tensor(image) for image in images])
    return [item if is_text(item) else _as_tensor(item) for item in prompt_items(prompt)]


def from_tensor(images: torch.Tensor) -> Any:
    """PIL images of uint8 [n, H, W, 3]: one image, or a list if n is not 1.

    A video of uint8 [n, frames, H, W, 3] becomes a list of its frames.
    """
    pictures = [as_pil(image) if image.ndim == 3 else list(map(as_pil, image)) for image in images]
    return pictures[0] if len(pictures) == 1 else pictures


def as_pil(image: torch.Tensor) -> Any:
    """The PIL image of uint8 [H, W, 3]."""
    from PIL import Image

    return Image.fromarray(image.numpy())


def _as_tensor(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        if image.dtype is not torch.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise SchemaError(f"an image is uint8 [H, W, 3], not {image.dtype} {[*image.shape]}")
        return image
    import numpy as np
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise SchemaError(
            f"a prompt is made of texts, token ids and images, not of {type(image).__name__}s"
        )
    from omni_kvlink.models.bagel.images import load_image

    return torch.from_numpy(np.array(load_image(image)))
