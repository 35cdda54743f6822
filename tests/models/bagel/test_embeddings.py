"""Positions, times and patches, each against a formula written out the slow way."""

from __future__ import annotations

import cmath
import math

import pytest
import torch

from omni_kvlink.errors import SchemaError
from omni_kvlink.models.bagel.embeddings import (
    PositionEmbedding,
    TimestepEmbedder,
    grid_ids,
    patchify,
    rotary_tables,
    rotate,
    sincos_table,
    unpatchify,
)


def test_rotation_is_a_complex_product_of_the_two_halves() -> None:
    dim, theta, positions = 8, 100.0, torch.tensor([0, 3, 41])
    x = torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotary_tables(positions, dim, theta, torch.float32))
    for row, position in enumerate(positions.tolist()):
        for head in range(2):
            for i in range(dim // 2):
                pair = complex(x[row, head, i], x[row, head, i + dim // 2])
                expected = pair * cmath.exp(1j * position / theta ** (2 * i / dim))
                got = complex(turned[row, head, i], turned[row, head, i + dim // 2])
                assert abs(got - expected) < 1e-5


def test_rotation_tables_take_the_dtype_of_the_rows() -> None:
    cos, sin = rotary_tables(torch.tensor([7]), 8, 1e6, torch.bfloat16)
    assert (cos.dtype, sin.dtype, tuple(cos.shape)) == (torch.bfloat16, torch.bfloat16, (1, 1, 8))


def test_patches_are_ordered_pixel_row_pixel_column_channel() -> None:
    image = torch.arange(3 * 4 * 6).reshape(3, 4, 6)
    rows = patchify(image, 2)
    assert rows.shape == (6, 12)
    for patch in range(6):
        top, left = patch // 3 * 2, patch % 3 * 2
        expected = [image[c, top + p, left + q] for p in (0, 1) for q in (0, 1) for c in range(3)]
        assert rows[patch].tolist() == expected


@pytest.mark.parametrize("patch", [1, 2, 3])
def test_unpatchify_inverts_patchify(patch: int) -> None:
    image = torch.randn(4, 2 * patch, 5 * patch)
    assert torch.equal(unpatchify(patchify(image, patch), 2, 5, patch), image)


def test_patchify_cuts_what_does_not_fill_a_patch() -> None:
    image = torch.randn(2, 5, 7)
    assert torch.equal(patchify(image, 2), patchify(image[:, :4, :6], 2))


def test_grid_ids_number_cells_in_the_full_grid() -> None:
    assert grid_ids(2, 3, 10).tolist() == [0, 1, 2, 10, 11, 12]


def test_sincos_table_tells_the_column_first_then_the_row() -> None:
    side, hidden = 5, 16
    table = sincos_table(side, hidden)
    for row in range(side):
        for column in range(side):
            expected = []
            for position in (column, row):
                angles = [position / 10000 ** (i / 4) for i in range(4)]
                expected += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            assert torch.allclose(table[row * side + column], torch.tensor(expected), atol=1e-6)


def test_a_position_table_refuses_a_larger_grid() -> None:
    table = PositionEmbedding(4, 8)
    table.pos_embed.copy_(torch.arange(128.0).reshape(16, 8))
    assert torch.equal(table(2, 3)[:, 0], torch.tensor([0.0, 8, 16, 32, 40, 48]))
    with pytest.raises(SchemaError, match="2x5 patches; the model has 4 a side"):
        table(2, 5)


def test_time_is_256_waves_and_stays_float32_up_to_the_weights() -> None:
    embedder = TimestepEmbedder(256)
    first, _, second = embedder.mlp
    assert isinstance(first, torch.nn.Linear)
    assert isinstance(second, torch.nn.Linear)
    torch.nn.init.eye_(first.weight)
    torch.nn.init.eye_(second.weight)
    torch.nn.init.constant_(first.bias, 20.0)  # where SiLU is the identity
    torch.nn.init.constant_(second.bias, -20.0)
    waves = embedder(torch.tensor([0.7]))[0]
    angles = [0.7 * 10000 ** (-i / 128) for i in range(128)]
    expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
    assert torch.allclose(waves, torch.tensor(expected), atol=1e-5)
    assert embedder.to(torch.bfloat16)(torch.tensor([0.7])).dtype == torch.bfloat16
