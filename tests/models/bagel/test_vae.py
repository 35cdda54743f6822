"""The autoencoder's building blocks against their formulas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.models.bagel import BagelPipeline

if TYPE_CHECKING:
    from pathlib import Path


def test_shapes_go_down_and_up_by_the_downsample(pipeline: BagelPipeline) -> None:
    latent = pipeline.encode_image(torch.zeros(3, 12, 20))
    assert (latent.dtype, tuple(latent.shape)) == (torch.float32, (4, 6, 10))
    assert pipeline.decode(latent).shape == (12, 20, 3)


def test_the_decoder_undoes_scale_and_shift(exact: BagelPipeline) -> None:
    latent = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))
    ae = exact.config.ae
    z = latent / ae.scale_factor + ae.shift_factor
    with torch.no_grad():
        expected = exact.autoencoder.decoder(z[None])[0]
    assert torch.equal(exact.autoencoder.decode(latent), expected)


def weight_of(block: nn.Module, name: str) -> Tensor:
    """The weight of a 1 x 1 convolution as a matrix."""
    return block.get_parameter(f"{name}.weight")[:, :, 0, 0]


def test_attention_mixes_all_cells(exact: BagelPipeline) -> None:
    block = exact.autoencoder.decoder.get_submodule("mid.attn_1")
    x = torch.randn(1, 64, 3, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = block(x)[0].flatten(1)
        weight, bias = block.get_parameter("norm.weight"), block.get_parameter("norm.bias")
        normed = F.group_norm(x, 32, weight, bias, 1e-6)[0].flatten(1)
        q, k, v = (
            weight_of(block, name) @ normed + block.get_parameter(f"{name}.bias")[:, None]
            for name in ("q", "k", "v")
        )
        mixed = v @ (q.T @ k / math.sqrt(64)).softmax(-1).T
        out = weight_of(block, "proj_out") @ mixed + block.get_parameter("proj_out.bias")[:, None]
    assert torch.allclose(got, x[0].flatten(1) + out, atol=1e-5)


def test_a_step_down_pads_right_and_bottom(exact: BagelPipeline) -> None:
    conv = exact.autoencoder.encoder.get_submodule("down.0.downsample.conv")
    assert isinstance(conv, torch.nn.Conv2d)
    assert conv.bias is not None
    x = torch.randn(1, 32, 4, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = exact.autoencoder.encoder.get_submodule("down.0.downsample")(x)
        # The first output sees the top left 3 x 3; nothing is padded there.
        corner = (conv.weight * x[0, :, :3, :3]).sum((1, 2, 3)) + conv.bias
        edge = (conv.weight[:, :, :2, :2] * x[0, :, 2:, 2:]).sum((1, 2, 3)) + conv.bias
    assert got.shape == (1, 32, 2, 2)
    assert torch.allclose(got[0, :, 0, 0], corner, atol=1e-5)
    assert torch.allclose(got[0, :, 1, 1], edge, atol=1e-5)


def test_a_step_up_doubles_each_cell(exact: BagelPipeline) -> None:
    step = exact.autoencoder.decoder.get_submodule("up.1.upsample")
    conv = step.get_submodule("conv")
    assert isinstance(conv, torch.nn.Conv2d)
    x = torch.randn(1, 64, 2, 3, generator=torch.Generator().manual_seed(0))
    doubled = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    with torch.no_grad():
        expected = F.conv2d(doubled, conv.weight, conv.bias, padding=1)
        assert torch.allclose(step(x), expected, atol=1e-5)


def test_norms_stay_float32_in_a_bfloat16_autoencoder(checkpoint: Path) -> None:
    short = BagelPipeline.from_pretrained(checkpoint, vae_dtype=torch.bfloat16).autoencoder
    for name, tensor in short.state_dict().items():
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name
    norm = short.decoder.get_submodule("norm_out")
    assert norm(torch.ones(1, 32, 2, 2, dtype=torch.bfloat16)).dtype == torch.float32
    with torch.no_grad():
        assert short.decode(torch.zeros(4, 2, 2)).dtype == torch.bfloat16
