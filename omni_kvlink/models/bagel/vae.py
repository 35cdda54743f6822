"""The image autoencoder, in the FLUX layout: pixels to a small latent grid and back.

Convolutions run in the dtype of their weights; group norms and the activations after them run in
float32, with float32 weights.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omni_kvlink.models.bagel.tiling import TileGrid, Tiling, run_divided, run_tiled

if TYPE_CHECKING:
    from omni_kvlink.models.bagel.config import AutoencoderConfig
    from omni_kvlink.models.bagel.hooks import TilesHook


class GroupNorm(nn.GroupNorm):
    """Group norm, computed and returned in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__(32, channels, eps=1e-6)

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
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )


def _conv3(in_channels: int, out_channels: int) -> _Conv:
    return _Conv(in_channels, out_channels, kernel_size=3, padding=1)


class _VaeAttention(nn.Module):
    """Single-head attention over all cells."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = GroupNorm(channels)
        self.q, self.k, self.v, self.proj_out = (
            _Conv(channels, channels, kernel_size=1) for _ in range(4)
        )

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
        self.norm1, self.conv1 = GroupNorm(in_channels), _conv3(in_channels, out_channels)
        self.norm2, self.conv2 = GroupNorm(out_channels), _conv3(out_channels, out_channels)
        self.nin_shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.nin_shortcut = _Conv(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        out: Tensor = h + self.nin_shortcut(x)
        return out


def _sequence(**modules: nn.Module) -> nn.Sequential:
    """Chain modules, with the published names for those that have weights."""
    return nn.Sequential(OrderedDict(modules))


def _middle(channels: int) -> nn.Sequential:
    return _sequence(
        block_1=_ResBlock(channels, channels),
        attn_1=_VaeAttention(channels),
        block_2=_ResBlock(channels, channels),
    )


def _level(in_channels: int, out_channels: int, blocks: int, **step: nn.Module) -> nn.Sequential:
    """Chain the residual blocks of one resolution, and the step to the next one if there is one."""
    widths = [in_channels] + [out_channels] * (blocks - 1)
    return _sequence(
        block=nn.Sequential(*(_ResBlock(width, out_channels) for width in widths)), **step
    )


def _encoder(config: AutoencoderConfig) -> nn.Sequential:
    """Map [n, 3, H, W] to the latent's mean and log variance, stacked: [n, 2 * z, H / d, W / d]."""
    channels, down = config.ch, nn.Sequential()
    for width in (config.ch * mult for mult in config.ch_mult):
        step = {}
        if len(down) + 1 < len(config.ch_mult):
            conv = _Conv(width, width, kernel_size=3, stride=2)
            step["downsample"] = _sequence(right_and_bottom=nn.ZeroPad2d((0, 1, 0, 1)), conv=conv)
        down.append(_level(channels, width, config.num_res_blocks, **step))
        channels = width
    return _sequence(
        conv_in=_conv3(config.in_channels, config.ch),
        down=down,
        mid=_middle(channels),
        norm_out=GroupNorm(channels),
        silu=nn.SiLU(),
        conv_out=_conv3(channels, 2 * config.z_channels),
    )


def _decoder(config: AutoencoderConfig) -> nn.Sequential:
    """Map [n, z, h, w] to [n, 3, H, W]. Level 0 is the full resolution and runs last."""
    deepest = channels = config.ch * config.ch_mult[-1]
    up: dict[str, nn.Module] = {}
    for level, mult in reversed([*enumerate(config.ch_mult)]):
        width, step = config.ch * mult, {}
        if level:
            doubled = nn.Upsample(scale_factor=2.0, mode="nearest")
            step["upsample"] = _sequence(doubled=doubled, conv=_conv3(width, width))
        up[str(level)] = _level(channels, width, config.num_res_blocks + 1, **step)
        channels = width
    return _sequence(
        conv_in=_conv3(config.z_channels, deepest),
        mid=_middle(deepest),
        up=_sequence(**up),
        norm_out=GroupNorm(channels),
        silu=nn.SiLU(),
        conv_out=_conv3(channels, config.out_ch),
    )


class Autoencoder(nn.Module):
    """Encoder and decoder, either of which may be left out."""

    def __init__(self, config: AutoencoderConfig, *, encoder: bool, decoder: bool) -> None:
        super().__init__()
        self.config = config
        if encoder:
            self.encoder = _encoder(config)
        if decoder:
            self.decoder = _decoder(config)
        self._tiling: Tiling | None = None

    def enable_tiling(self, tiling: Tiling | None) -> None:
        """Encode and decode images that are larger than a tile in tiles; with None, as a whole.

        Raises ValueError if the tiles do not fit the network.
        """
        if tiling is not None:
            tiling.check(self.config.downsample)
        self._tiling = tiling

    def encode(self, pixels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Sample the latent [z, H / d, W / d] float32 of pixels [3, H, W] in [-1, 1].

        The random numbers are drawn on the generator's device, so that a CPU generator gives the
        same ones wherever the model runs.
        """
        pixels = pixels.to(next(self.encoder.parameters()).device)
        with _exact(pixels.device):
            batch = pixels.unsqueeze(0)
            moments = run_tiled(self.encoder, batch, self._grid(batch, up=False))[0].float()
        mean, logvar = moments.chunk(2)
        origin = "cpu" if generator is None else generator.device
        noise = torch.randn(mean.shape, generator=generator, device=origin).to(mean.device)
        z = mean + torch.exp(0.5 * logvar) * noise
        scaled: Tensor = self.config.scale_factor * (z - self.config.shift_factor)
        return scaled

    def decode(self, latent: Tensor) -> Tensor:
        """Decode a latent [z, H / d, W / d] to the image [3, H, W], about [-1, 1]."""
        z = self._decoder_input(latent)
        with _exact(z.device):
            return run_tiled(self.decoder, z, self._grid(z, up=True))[0]

    def decode_divided(self, latent: Tensor, share: TilesHook) -> Tensor | None:
        """Decode a latent on ranks that divide the tiles; None where another rank has the image."""
        z = self._decoder_input(latent)
        with _exact(z.device):
            image = run_divided(self.decoder, z, self._grid(z, up=True), share)
        return None if image is None else image[0]

    def _decoder_input(self, latent: Tensor) -> Tensor:
        z = latent.to(next(self.decoder.parameters()))  # of conv_in, which has the module's dtype
        return (z / self.config.scale_factor + self.config.shift_factor).unsqueeze(0)

    def _grid(self, x: Tensor, *, up: bool) -> TileGrid:
        """The tiles of the input of the encoder or the decoder; one if tiling is not enabled."""
        height, width = x.shape[-2:]
        down = self.config.downsample
        pixels, overlap = max(height, width) * (down if up else 1), 0.0
        if self._tiling is not None:
            pixels, overlap = self._tiling.tile_sample_min_size, self._tiling.tile_overlap_factor
        size, size_out = (pixels // down, pixels) if up else (pixels, pixels // down)
        return TileGrid(height, width, size, size_out, overlap)
