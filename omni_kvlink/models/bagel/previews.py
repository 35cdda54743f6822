"""Small images of latents that are still being denoised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from omni_kvlink.models.bagel.embeddings import unpatchify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from omni_kvlink.models.bagel.pipeline import BagelPipeline

PREVIEW_SIDE_PIXELS = 256
"""The most that the longest side of a preview may have; a larger latent is averaged down first."""


def decode_preview(pipeline: BagelPipeline, rows: Tensor, image_shape: Sequence[int]) -> Tensor:
    """Decode a latent's rows [h * w, patch_dim], as `DenoiseHooks.on_clean` gets them.

    Returns uint8 [H, W, 3] on the CPU: `pipeline.decode` of the latent, or of a smaller one.
    """
    stride = pipeline.config.latent_stride
    height, width = (side // stride for side in image_shape)
    latent = unpatchify(rows, height, width, pipeline.config.latent_patch_size)
    factor = -(-max(image_shape) // PREVIEW_SIDE_PIXELS)
    return pipeline.decode(latent if factor == 1 else F.avg_pool2d(latent[None], factor)[0])
