"""The image autoencoder, in the FLUX layout: pixels to a small latent grid and back.

Convolutions run in the dtype of their weights; group norms and the activations after them run in
float32, with float32 weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import AutoencoderConfig

_GROUPS = 32


class GroupNorm(nn.GroupNorm):
    """Group norm, computed and returned in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__(_GROUPS, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in float32."""
        return super().forward(x.float())


class _Conv(nn.Conv2d):
    """A convolution that takes its input in any float dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _exact(device: torch.device) -> AbstractContextManager[None]:
    """Make convolutions on a GPU deterministic and in full float32."""
    if device.type != "cuda":
        return nullcontext()
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    return flags


def _conv3(in_channels: int, out_channels: int) -> _Conv:
    return _Conv(in_channels, out_channels, kernel_size=3, padding=1)


class _VaeAttention(nn.Module):
    """Single-head attention over all cells."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(channels)
        self.q = _Conv(channels, channels, kernel_size=1)
        self.k = _Conv(channels, channels, kernel_size=1)
        self.v = _Conv(channels, channels, kernel_size=1)
        self.proj_out = _Conv(channels, channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        projections = (self.q(normed), self.k(normed), self.v(normed))
        q, k, v = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in projections)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = x + self.proj_out(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))
        return out


class _ResBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(in_channels)
        self.conv1 = _conv3(in_channels, out_channels)
        self.norm2 = GroupNorm(out_channels)
        self.conv2 = _conv3(out_channels, out_channels)
        if in_channels != out_channels:
            self.nin_shortcut = _Conv(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        out: Tensor = h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)
        return out


class _Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _Conv(channels, channels, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        # Padded at the right and the bottom only.
        out: Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return out


class _Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = _ResBlock(channels, channels)
        self.attn_1 = _VaeAttention(channels)
        self.block_2 = _ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class _Level(nn.Module):
    """The residual blocks of one resolution, and the step to the next one where there is one."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int) -> None:
        super().__init__()
        widths = [in_channels] + [out_channels] * (blocks - 1)
        self.block = nn.ModuleList(_ResBlock(width, out_channels) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for step in ("downsample", "upsample"):
            if hasattr(self, step):
                x = self.get_submodule(step)(x)
        return x


class Encoder(nn.Module):
    """[n, 3, H, W] to the latent's mean and log variance, stacked: [n, 2 * z, H / d, W / d]."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = [config.ch * mult for mult in config.ch_mult]
        self.conv_in = _conv3(config.in_channels, config.ch)
        self.down = nn.ModuleList()
        for before, width in zip([config.ch, *widths], widths, strict=False):
            level = _Level(before, width, config.num_res_blocks)
            if len(self.down) + 1 < len(widths):
                level.downsample = _Downsample(width)
            self.down.append(level)
        self.mid = _Middle(widths[-1])
        self.norm_out = GroupNorm(widths[-1])
        self.conv_out = _conv3(widths[-1], 2 * config.z_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Encode pixels [n, 3, H, W] to the latent's mean and log variance."""
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(self.mid(x))))
        return out


class Decoder(nn.Module):
    """[n, z, h, w] to [n, 3, H, W]. Level 0 is the full resolution and runs last."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        widths = [config.ch * mult for mult in config.ch_mult]
        self.conv_in = _conv3(config.z_channels, widths[-1])
        self.mid = _Middle(widths[-1])
        self.up = nn.ModuleList()
        for i, (width, before) in enumerate(zip(widths, [*widths[1:], widths[-1]], strict=True)):
            level = _Level(before, width, config.num_res_blocks + 1)
            if i:
                level.upsample = _Upsample(width)
            self.up.append(level)
        self.norm_out = GroupNorm(widths[0])
        self.conv_out = _conv3(widths[0], config.out_ch)

    def forward(self, z: Tensor) -> Tensor:
        """Decode a latent [n, z, h, w] to pixels [n, 3, H, W]."""
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class Autoencoder(nn.Module):
    """Encoder and decoder, either of which may be left out."""

    def __init__(self, config: AutoencoderConfig, *, encoder: bool, decoder: bool) -> None:
        super().__init__()
        self.config = config
        if encoder:
            self.encoder = Encoder(config)
        if decoder:
            self.decoder = Decoder(config)

    def encode(self, pixels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Sample the latent [z, H / d, W / d] float32 of pixels [3, H, W] in [-1, 1].

        The random numbers are drawn on the generator's device, so that a CPU generator gives the
        same ones wherever the model runs.
        """
        pixels = pixels.to(self.encoder.conv_in.weight.device)
        with _exact(pixels.device):
            moments = self.encoder(pixels.unsqueeze(0))[0].float()
        mean, logvar = moments.chunk(2)
        origin = "cpu" if generator is None else generator.device
        noise = torch.randn(mean.shape, generator=generator, device=origin).to(mean.device)
        z = mean + torch.exp(0.5 * logvar) * noise
        scaled: Tensor = self.config.scale_factor * (z - self.config.shift_factor)
        return scaled

    def decode(self, latent: Tensor) -> Tensor:
        """Decode a latent [z, H / d, W / d] to the image [3, H, W], about [-1, 1]."""
        z = latent.to(self.decoder.conv_in.weight)
        z = z / self.config.scale_factor + self.config.shift_factor
        with _exact(z.device):
            image: Tensor = self.decoder(z.unsqueeze(0))[0]
        return image
