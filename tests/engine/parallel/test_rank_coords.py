"""Coordinates of the ranks of a stage."""

from __future__ import annotations

import pytest

from omni_kvlink.engine import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords, group_ranks


def test_all_coordinates_differ_and_leaders_come_first() -> None:
    parallel = DiffusionParallelConfig(2, 3, 2)
    coords = [RankCoords.of(rank, parallel) for rank in range(parallel.world_size)]
    assert len(set(coords)) == 12
    for group in range(2):
        ranks = group_ranks(group, parallel)
        assert [coords[rank].group for rank in ranks] == [group] * 6
        assert [rank for rank in ranks if coords[rank].is_leader] == [ranks[0]]


def test_tensor_ranks_are_neighbours() -> None:
    parallel = DiffusionParallelConfig(1, 2, 2)
    found = [(p.guidance, p.tensor) for p in (RankCoords.of(rank, parallel) for rank in range(4))]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_raises(rank: int) -> None:
    with pytest.raises(ValueError, match="of 4"):
        RankCoords.of(rank, DiffusionParallelConfig(1, 2, 2))
