"""Large images through the autoencoder in overlapping tiles, which are blended where they overlap.

The arithmetic is that of diffusers' `AutoencoderKL`. A tile has its own group norms and attends to
itself alone, so that an image of several tiles differs from one that is computed as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Tiling:
    """The side of a tile in pixels, and the share of it that two neighbours have in common."""

    tile_sample_min_size: int = 512
    tile_overlap_factor: float = 0.25

    def check(self, downsample: int) -> None:
        """Raise ValueError unless tiles, and what they overlap by, are whole latent cells."""
        cells, rest = divmod(self.tile_sample_min_size, downsample)
        if rest or cells < 1 or not 0 <= self.tile_overlap_factor < 1:
            raise ValueError(
                f"tiles of {self.tile_sample_min_size} pixels that overlap by "
                f"{self.tile_overlap_factor}: the size is a multiple of {downsample}, the overlap "
                "a share in [0, 1)"
            )
        if not (cells * self.tile_overlap_factor).is_integer():
            raise ValueError(
                f"tile_overlap_factor {self.tile_overlap_factor} of {cells} latent cells a side "
                "is no whole number of them"
            )


def run_tiled(
    run: Callable[[Tensor], Tensor], x: Tensor, *, size: int, size_out: int, overlap: float
) -> Tensor:
    """Apply `run` to tiles of x [n, c, H, W] of up to `size` a side, and join the results.

    `run` makes `size_out` cells of `size`. Returns float32 if there are several tiles.
    """
    height, width = x.shape[-2:]
    if max(height, width) <= size:
        return run(x)
    step, blend = round(size * (1 - overlap)), round(size_out * overlap)
    kept, rows, above = size_out - blend, list[Tensor](), list[Tensor]()
    for top in range(0, height, step):
        row = list[Tensor]()
        for left in range(0, width, step):
            tile = run(x[..., top : top + size, left : left + size]).float()
            if above:
                tile = _blended(above[len(row)], tile, blend, dim=-2)
            row.append(_blended(row[-1], tile, blend, dim=-1) if row else tile)
        rows.append(torch.cat([tile[..., :kept, :kept] for tile in row], dim=-1))
        above = row
    return torch.cat(rows, dim=-2)


def _blended(before: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Fade from the end of the tile before into the begin of this one, over up to `extent`."""
    extent = min(before.shape[dim], tile.shape[dim], extent)
    share = torch.arange(extent, dtype=torch.float64, device=tile.device) / max(1, extent)
    share = share[:, None] if dim == -2 else share
    old = before.narrow(dim, before.shape[dim] - extent, extent)
    faded = old * (1 - share).float() + tile.narrow(dim, 0, extent) * share.float()
    return torch.cat([faded, tile.narrow(dim, extent, tile.shape[dim] - extent)], dim=dim)
