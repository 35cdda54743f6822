"""Large images through the autoencoder in overlapping tiles, which are blended where they overlap.

The arithmetic is that of diffusers' `AutoencoderKL`. A tile has its own group norms and attends to
itself alone, so that an image of several tiles differs from one that is computed as a whole. Ranks
may divide the tiles: a tile has the same bits wherever it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omni_kvlink.models.bagel.hooks import TilesHook


@dataclass(frozen=True)
class Tiling:
    """The side of a tile in pixels, and the share of it that two neighbours have in common."""

    tile_sample_min_size: int = 512
    tile_overlap_factor: float = 0.25

    def check(self, downsample: int) -> None:
        """Raise ValueError unless tiles, and what they overlap by, are whole latent cells."""
        cells, remainder = divmod(self.tile_sample_min_size, downsample)
        if remainder or cells < 1 or not 0 <= self.tile_overlap_factor < 1:
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


@dataclass(frozen=True)
class TileGrid:
    """The tiles of an image: `size` cells a side, of which `size_out` are made."""

    height: int
    width: int
    size: int
    size_out: int
    overlap: float

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Top and left of each tile, row by row."""
        return list(product(self._starts(self.height), self._starts(self.width)))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Height and width of what is made of each tile."""
        sides = [(self.height - top, self.width - left) for top, left in self.corners]
        return [
            (self._side_out(min(height, self.size)), self._side_out(min(width, self.size)))
            for height, width in sides
        ]

    def cut(self, x: Tensor, index: int) -> Tensor:
        """Return a tile of x [n, c, height, width]."""
        top, left = self.corners[index]
        return x[..., top : top + self.size, left : left + self.size]

    def join(self, tiles: Iterable[Tensor]) -> Tensor:
        """Blend what was made of the tiles, in their order; float32 if there are several."""
        queue = iter(tiles)
        if len(self.corners) == 1:
            return next(queue)
        blend = round(self.size_out * self.overlap)
        kept, rows, above = self.size_out - blend, list[Tensor](), list[Tensor]()
        for _ in self._starts(self.height):
            row = list[Tensor]()
            for _ in self._starts(self.width):
                tile = next(queue).float()
                if above:
                    tile = _blended(above[len(row)], tile, blend, dim=-2)
                row.append(_blended(row[-1], tile, blend, dim=-1) if row else tile)
            rows.append(torch.cat([tile[..., :kept, :kept] for tile in row], dim=-1))
            above = row
        return torch.cat(rows, dim=-2)

    def _starts(self, side: int) -> range:
        if max(self.height, self.width) <= self.size:
            return range(1)
        return range(0, side, round(self.size * (1 - self.overlap)))

    def _side_out(self, side: int) -> int:
        return side * self.size_out // self.size


def run_tiled(run: Callable[[Tensor], Tensor], x: Tensor, grid: TileGrid) -> Tensor:
    """Apply `run` to the tiles of x [n, c, H, W], one after the other, and join the results."""
    return grid.join(run(grid.cut(x, index)) for index in range(len(grid.corners)))


def run_divided(
    run: Callable[[Tensor], Tensor], x: Tensor, grid: TileGrid, share: TilesHook
) -> Tensor | None:
    """Apply `run` to tiles that ranks divide, and join them; None where another has the result."""
    tiles = share(grid.shapes, lambda index: run(grid.cut(x, index)))
    return None if tiles is None else grid.join(tiles)


def _blended(neighbour: Tensor, tile: Tensor, extent: int, dim: int) -> Tensor:
    """Fade from the end of the tile before into the begin of this one, over up to `extent`."""
    extent = min(neighbour.shape[dim], tile.shape[dim], extent)
    share = torch.arange(extent, dtype=torch.float64, device=tile.device) / max(1, extent)
    share = share[:, None] if dim == -2 else share
    old = neighbour.narrow(dim, neighbour.shape[dim] - extent, extent)
    faded = old * (1 - share).float() + tile.narrow(dim, 0, extent) * share.float()
    return torch.cat([faded, tile.narrow(dim, extent, tile.shape[dim] - extent)], dim=dim)
