"""The dtypes of the weights: the autoencoder's own, and float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from omni_kvlink.models.bagel import BagelContexts, BagelPipeline, DenoiseParams

from .conftest import stored

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = DenoiseParams(4.0, 2.0, cfg_interval=(0.0, 1.0), num_timesteps=6)
FLOAT16 = 5e-3
"""The largest difference from float32, of the largest value; measured: 1.5e-3."""


def edited(pipeline: BagelPipeline, photo: Tensor) -> tuple[BagelContexts, Tensor]:
    """The contexts and the latent of an edit."""
    generator = torch.Generator().manual_seed(3)
    contexts = pipeline.prefill(["a fox", photo, "at night"], generator=generator)
    noise = pipeline.initial_noise(contexts.image_shape, generator)
    return contexts, pipeline.denoise(contexts, noise, PARAMS)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest value; infinite if a value is not finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.double() - expected).abs().max() / expected.abs().max())


def test_the_autoencoder_is_float32_under_any_model(
    exact: BagelPipeline, short: BagelPipeline, checkpoint: Path, photo: Tensor
) -> None:
    """A bfloat16 one moves pixels by levels, and the latent of an image that is read."""
    own = BagelPipeline.from_pretrained(checkpoint, vae_dtype=torch.bfloat16)
    latent, pixels = edited(exact, photo)[1], torch.linspace(-1, 1, 3 * 16 * 24).view(3, 16, 24)

    def encoded(pipeline: BagelPipeline) -> Tensor:
        return pipeline.encode_image(pixels, torch.Generator().manual_seed(1))

    assert torch.equal(encoded(short), encoded(exact))
    assert torch.equal(short.decode(latent), exact.decode(latent))
    assert 1e-4 < difference(encoded(own), encoded(exact)) < 0.05
    levels = (own.decode(latent).int() - exact.decode(latent).int()).abs().max()
    assert 1 <= levels <= 3


@pytest.mark.parametrize("vae_dtype", [torch.float32, torch.float16])
def test_float16_is_float32_but_for_rounding(
    exact: BagelPipeline, checkpoint: Path, photo: Tensor, vae_dtype: torch.dtype
) -> None:
    half = BagelPipeline.from_pretrained(checkpoint, dtype=torch.float16, vae_dtype=vae_dtype)
    (contexts, latent), (other, expected_latent) = edited(half, photo), edited(exact, photo)
    for layer in range(exact.num_layers):
        for found, expected in zip(
            stored(contexts.gen, layer), stored(other.gen, layer), strict=True
        ):
            assert found.dtype == torch.float16
            assert difference(found, expected) < FLOAT16
    assert latent.dtype == torch.float32
    assert difference(latent, expected_latent) < FLOAT16
    images = half.decode(latent).int(), exact.decode(expected_latent).int()
    assert (images[0] - images[1]).abs().max() <= 2
