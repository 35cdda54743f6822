"""Input images: from PIL or tensors to resized pixels in [-1, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.tokenizer import INSTALL

if TYPE_CHECKING:
    from PIL.Image import Image

# An input: a PIL image, a uint8 tensor [H, W, 3], or a float tensor [3, H, W] within [-1, 1].
ImageLike = Union["Image", Tensor]

_MAX_PIXELS = 14 * 14 * 9 * 1024


@dataclass(frozen=True)
class ResizeRule:
    """The size that an image is resized to: sides within two bounds, multiples of a stride."""

    longest: int
    shortest: int
    stride: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the new height and width. The bound on the longest side has priority."""
        scale = max(min(self.longest / max(height, width), 1.0), self.shortest / min(height, width))
        height, width = self._scaled(height, width, scale)
        if height * width > _MAX_PIXELS:
            height, width = self._scaled(height, width, _MAX_PIXELS / (height * width))
        if max(height, width) > self.longest:
            height, width = self._scaled(height, width, self.longest / max(height, width))
        return height, width

    def _scaled(self, height: int, width: int, scale: float) -> tuple[int, int]:
        return self._fitted(round(height * scale)), self._fitted(round(width * scale))

    def _fitted(self, side: int) -> int:
        return max(self.stride, round(side / self.stride) * self.stride)


def load_image(image: ImageLike) -> ImageLike:
    """Return an RGB PIL image (transparency becomes white), or a checked float tensor [3, H, W].

    Raises SchemaError for a tensor of another shape or dtype, TypeError for what is no image.
    """
    if isinstance(image, Tensor) and image.is_floating_point():
        if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise SchemaError(f"a float image has shape [3, H, W], not {tuple(image.shape)}")
        return image.float()
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"reading an image needs the Pillow package: {INSTALL}") from error
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            expected = "uint8 [H, W, 3] or float [3, H, W]"
            raise SchemaError(f"an image is {expected}, not {image.dtype} {tuple(image.shape)}")
        return Image.fromarray(image.cpu().numpy())
    if not isinstance(image, Image.Image):
        raise TypeError(f"a prompt is made of texts and images, not {type(image).__name__}")
    if image.mode == "RGBA" or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def shape_pair(image_shape: object) -> tuple[int, int]:
    """Return height and width of an `image_shape`: a tuple, or a list, as JSON has it.

    Raises SchemaError unless it has two integers.
    """
    if isinstance(image_shape, tuple | list) and len(image_shape) == 2:
        height, width = image_shape
        if all(isinstance(n, Integral) and not isinstance(n, bool) for n in image_shape):
            return int(height), int(width)
    raise SchemaError(f"image_shape {image_shape!r}: give height and width, two integers")


def image_size(image: ImageLike) -> tuple[int, int]:
    """Return height and width in pixels of a loaded image."""
    if isinstance(image, Tensor):
        return image.shape[1], image.shape[2]
    return image.height, image.width


def resize(image: ImageLike, rule: ResizeRule) -> ImageLike:
    """Resize by bicubic interpolation with antialiasing."""
    height, width = rule.size(*image_size(image))
    if isinstance(image, Tensor):
        if image_size(image) == (height, width):
            return image
        resized = F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)
        return resized[0].clamp(-1, 1)
    from PIL import Image

    return image.resize((width, height), Image.Resampling.BICUBIC)


def to_pixels(image: ImageLike) -> Tensor:
    """Convert a loaded image to float32 [3, H, W] in [-1, 1]."""
    if isinstance(image, Tensor):
        return image
    levels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return (levels.float() / 255 - 0.5) / 0.5
