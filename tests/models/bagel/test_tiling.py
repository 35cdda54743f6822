"""The autoencoder in tiles: what a tile sees, how tiles are joined, and which images have any."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from omni_kvlink.engine import OmniDiffusionConfig
from omni_kvlink.engine.models.bagel import BagelUtility
from omni_kvlink.models.bagel import BagelPipeline, Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TILE = 16
"""Pixels a side; 8 latent cells, of which two neighbours share 2."""


@pytest.fixture
def tiled(checkpoint: Path) -> BagelPipeline:
    made = BagelPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    made.autoencoder.enable_tiling(Tiling(TILE))
    return made


def latent(height: int, width: int) -> Tensor:
    return torch.randn(4, height, width, generator=torch.Generator().manual_seed(0))


def pixels(height: int, width: int) -> Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("size", [(8, 8), (3, 8), (8, 1)])
def test_an_image_of_one_tile_is_as_before(
    exact: BagelPipeline, tiled: BagelPipeline, size: tuple[int, int]
) -> None:
    generators = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert tiled.decode(latent(*size)).equal(exact.decode(latent(*size)))
    image = pixels(2 * size[0], 2 * size[1])
    found, expected = (
        one.encode_image(image, own) for one, own in zip((tiled, exact), generators, strict=True)
    )
    assert found.equal(expected)


class Doubled(nn.Upsample):
    """A decoder in which no pixel depends on another cell than its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :3].sin())


@pytest.mark.parametrize("size", [(9, 8), (20, 14), (6, 33)])
def test_tiles_are_joined_without_a_seam(tiled: BagelPipeline, size: tuple[int, int]) -> None:
    """Tiles that agree where they overlap give the whole."""
    vae = tiled.autoencoder
    vae.decoder = nn.Sequential(nn.Conv2d(4, 4, 1).eval(), Doubled(scale_factor=2.0))
    vae.encoder = nn.Sequential(nn.Conv2d(3, 8, 1).eval(), nn.AvgPool2d(2))
    with torch.no_grad():
        found = vae.decode(latent(*size))
        vae.enable_tiling(None)
        assert torch.allclose(found, vae.decode(latent(*size)), atol=1e-6)
        vae.enable_tiling(Tiling(TILE))
        image, draw = pixels(2 * size[0], 2 * size[1]), torch.Generator
        found = vae.encode(image, draw().manual_seed(1))
        vae.enable_tiling(None)
        assert torch.allclose(found, vae.encode(image, draw().manual_seed(1)), atol=1e-6)


def test_a_tile_is_computed_alone_and_blended(exact: BagelPipeline, tiled: BagelPipeline) -> None:
    """No call sees more cells than a tile has; between two tiles a pixel fades linearly."""
    seen: list[tuple[int, ...]] = []
    network = tiled.autoencoder.decoder
    network.register_forward_pre_hook(lambda _, x: seen.append(tuple(x[0].shape[2:])))
    z = latent(6, 14)
    with torch.no_grad():
        found = tiled.autoencoder.decode(z)
        left, right = (exact.autoencoder.decode(z[..., at : at + 8]) for at in (0, 6))
    assert seen == [(6, 8), (6, 8), (6, 2)]
    assert found.shape == (3, 12, 28)
    assert found[..., :12].equal(left[..., :12])
    share = torch.arange(4) / 4
    assert torch.allclose(found[..., 12:16], left[..., 12:] * (1 - share) + right[..., :4] * share)
    assert found[..., 16:24].equal(right[..., 4:12])


@pytest.mark.parametrize("size", [(8, 8), (6, 14), (20, 14)])
def test_tiles_that_ranks_divide(tiled: BagelPipeline, size: tuple[int, int]) -> None:
    """Two ranks, one after the other: the first has the image, in the bits of one rank."""
    z, whole = latent(*size), tiled.decode(latent(*size))
    sent: dict[int, Tensor] = {}

    def share(
        rank: int, shapes: Sequence[tuple[int, int]], compute: Callable[[int], Tensor]
    ) -> list[Tensor] | None:
        sent.update((at, compute(at)) for at in range(rank, len(shapes), 2))
        assert all(tile.shape == (1, 3, *shapes[at]) for at, tile in sent.items())
        return None if rank else [sent[at] for at in range(len(shapes))]

    tiled.hooks.tiles = partial(share, 1)
    assert tiled.decode_shared(z) is None
    assert len(sent) == {(8, 8): 0, (6, 14): 1, (20, 14): 6}[size]
    tiled.hooks.tiles = partial(share, 0)
    image = tiled.decode_shared(z)
    assert image is not None
    assert image.equal(whole)


def test_tiles_are_near_the_whole(exact: BagelPipeline, tiled: BagelPipeline) -> None:
    """Group norms and attention are a tile's own: with random weights 15 levels of 255 on average.

    Another image differs by 68.
    """
    found, whole = (one.decode(latent(20, 20)).float() for one in (tiled, exact))
    assert 0 < (found - whole).abs().mean() < 30
    assert (found - exact.decode(latent(20, 20).flip(1, 2)).float()).abs().mean() > 60


@pytest.mark.parametrize(
    ("tiling", "text"),
    [
        (Tiling(15), "multiple of 2"),
        (Tiling(0), "multiple of 2"),
        (Tiling(16, 1.0), r"a share in \[0, 1\)"),
        (Tiling(16, 0.3), "no whole number"),
    ],
)
def test_tiles_that_do_not_fit(tiled: BagelPipeline, tiling: Tiling, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tiled.autoencoder.enable_tiling(tiling)


@pytest.mark.parametrize("is_on", [False, True])
def test_the_setting_of_a_stage(checkpoint: Path, is_on: bool) -> None:
    how = OmniDiffusionConfig(str(checkpoint), dtype="float32", vae_use_tiling=is_on)
    decoder = BagelUtility(how, torch.device("cpu")).pipeline.autoencoder
    seen: list[int] = []
    decoder.decoder = nn.Sequential(nn.Conv2d(4, 4, 1), Doubled(scale_factor=2.0))
    decoder.decoder.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[3]))
    with torch.no_grad():
        decoder.decode(latent(4, 300))
    assert seen == ([256, 108] if is_on else [300])
