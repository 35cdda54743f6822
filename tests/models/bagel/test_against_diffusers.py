"""The same weights in diffusers' autoencoder: skipped where diffusers is not installed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.models.bagel import Tiling

if TYPE_CHECKING:
    from omni_kvlink.models.bagel import BagelPipeline
    from omni_kvlink.models.bagel.vae import Autoencoder

diffusers = pytest.importorskip("diffusers")

_RENAMES = [
    (r"mid\.block_1", "mid_block.resnets.0"),
    (r"mid\.block_2", "mid_block.resnets.1"),
    (r"mid\.attn_1\.norm", "mid_block.attentions.0.group_norm"),
    (r"mid\.attn_1\.proj_out", "mid_block.attentions.0.to_out.0"),
    (r"mid\.attn_1\.([qkv])\.", r"mid_block.attentions.0.to_\1."),
    (r"nin_shortcut", "conv_shortcut"),
    (r"norm_out", "conv_norm_out"),
    (r"down\.(\d)\.block", r"down_blocks.\1.resnets"),
    (r"down\.(\d)\.downsample", r"down_blocks.\1.downsamplers.0"),
    # diffusers numbers the decoder's two levels in the order in which they run.
    (r"up\.0\.block", "up_blocks.1.resnets"),
    (r"up\.1\.block", "up_blocks.0.resnets"),
    (r"up\.1\.upsample", "up_blocks.0.upsamplers.0"),
]


def _renamed(name: str) -> str:
    for old, new in _RENAMES:
        name = re.sub(old, new, name)
    return name


def test_encoder_and_decoder_are_the_flux_autoencoder(exact: BagelPipeline) -> None:
    ae, ours = exact.config.ae, exact.autoencoder
    theirs = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[ae.ch * mult for mult in ae.ch_mult],
        layers_per_block=ae.num_res_blocks,
        latent_channels=ae.z_channels,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    weights = {_renamed(name): tensor for name, tensor in ours.state_dict().items()}
    for name, tensor in theirs.state_dict().items():
        weights[name] = weights[name].reshape(tensor.shape)  # 1 x 1 convolutions are matrices
    theirs.load_state_dict(weights, strict=True)
    pixels = torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        moments = theirs.encode(pixels).latent_dist.parameters
        assert torch.allclose(ours.encoder(pixels), moments, atol=1e-5)
        latent = moments[:, : ae.z_channels]
        assert torch.allclose(ours.decoder(latent), theirs.decode(latent).sample, atol=1e-5)
        _check_tiles(ours, theirs)


def _check_tiles(ours: Autoencoder, theirs: Any) -> None:
    """Tiles of 16 pixels of an image of 40 x 28, cut and blended as diffusers does it."""
    theirs.enable_tiling()
    theirs.tile_sample_min_size, theirs.tile_latent_min_size = 16, 8
    ours.enable_tiling(Tiling(16))
    try:
        generator = torch.Generator().manual_seed(1)
        z = torch.randn(1, ours.config.z_channels, 20, 14, generator=generator)
        scaled = (z[0] - ours.config.shift_factor) * ours.config.scale_factor
        assert torch.allclose(ours.decode(scaled), theirs.decode(z).sample[0], atol=1e-4)
        pixels = torch.rand(3, 40, 28, generator=generator) * 2 - 1
        mean, logvar = theirs.encode(pixels[None]).latent_dist.parameters[0].chunk(2)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(2))
        sampled = mean + torch.exp(0.5 * logvar) * noise
        expected = ours.config.scale_factor * (sampled - ours.config.shift_factor)
        found = ours.encode(pixels, torch.Generator().manual_seed(2))
        assert torch.allclose(found, expected, atol=1e-4)
    finally:
        ours.enable_tiling(None)
