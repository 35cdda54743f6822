"""Positions and times as vectors, and images as rows of patches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from omni_kvlink.errors import SchemaError

_PERIOD = 10_000.0


class TimestepEmbedder(nn.Module):
    """A time in [0, 1] as a vector: 256 sines and cosines, then a small MLP."""

    frequencies = 256

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        first = nn.Linear(self.frequencies, hidden_size)
        self.mlp = nn.Sequential(first, nn.SiLU(), nn.Linear(hidden_size, hidden_size))

    def forward(self, t: Tensor) -> Tensor:
        """`t` [n] float32 to [n, hidden]. The angles stay float32 whatever the model's dtype."""
        half = self.frequencies // 2
        steps = torch.arange(half, dtype=torch.float32, device=t.device)
        angles = t.float()[:, None] * torch.exp(-math.log(_PERIOD) * steps / half)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        out: Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return out


def blank_embedding(rows: int, size: int) -> nn.Embedding:
    """A table without values: drawing random ones on the meta device costs a second of imports."""
    return nn.Embedding(rows, size, _weight=torch.empty(rows, size))


class PositionEmbedding(nn.Module):
    """A fixed table with one row for each cell of a square grid, row-major."""

    def __init__(self, side: int, hidden_size: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(torch.empty(side**2, hidden_size), requires_grad=False)

    def forward(self, height: int, width: int) -> Tensor:
        """Return the rows [height * width, hidden] of the grid's top left part."""
        if max(height, width) > self.side:
            raise SchemaError(f"{height}x{width} patches; the model has {self.side} a side")
        ids = grid_ids(height, width, self.side, self.pos_embed.device)
        return self.pos_embed[ids]


def grid_ids(height: int, width: int, side: int, device: torch.device | None = None) -> Tensor:
    """Cell numbers [height * width] int64 of the top left part of a `side` x `side` grid."""
    rows = torch.arange(height, device=device)[:, None] * side
    return (rows + torch.arange(width, device=device)).flatten()


def sincos_table(side: int, hidden_size: int) -> Tensor:
    """Return the values [side * side, hidden] float32 of a `PositionEmbedding`.

    Half of a row tells its column, half its row; each half is first sines, then cosines.
    """
    quarter = hidden_size // 4
    omega = _PERIOD ** -(np.arange(quarter, dtype=np.float64) / quarter)
    angles = np.arange(side, dtype=np.float64)[:, None] * omega
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    columns, rows = np.tile(waves, (side, 1)), np.repeat(waves, side, axis=0)
    return torch.from_numpy(np.concatenate([columns, rows], axis=1)).float()


Rotary = tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [*shape, 1, head_dim] for positions of any shape, computed in float32."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None] * (1.0 / theta ** (steps / head_dim))
    angles = torch.cat([angles, angles], dim=-1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of [..., heads, head_dim] by its row's angle."""
    cos, sin = rotary
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def patchify(image: Tensor, patch: int) -> Tensor:
    """[channels, H, W] to rows [h * w, patch * patch * channels].

    A row is ordered pixel row, pixel column, channel. What does not fill a patch is cut off.
    """
    channels, height, width = image.shape
    h, w = height // patch, width // patch
    cells = image[:, : h * patch, : w * patch].reshape(channels, h, patch, w, patch)
    return cells.permute(1, 3, 2, 4, 0).reshape(h * w, patch * patch * channels)


def unpatchify(rows: Tensor, height: int, width: int, patch: int) -> Tensor:
    """The inverse: rows of a `height` x `width` grid of patches to [channels, H, W]."""
    channels = rows.shape[-1] // patch**2
    cells = rows.reshape(height, width, patch, patch, channels)
    return cells.permute(4, 0, 2, 1, 3).reshape(channels, height * patch, width * patch)
