"""Where each rank of a stage stands."""

from __future__ import annotations

import pytest

from omni_kvlink.engine import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords, group_ranks


def test_every_place_is_taken_once_and_leaders_come_first() -> None:
    parallel = DiffusionParallelConfig(2, 3, 2)
    places = [RankCoords.of(rank, parallel) for rank in range(parallel.world_size)]
    assert len(set(places)) == 12
    for group in range(2):
        ranks = group_ranks(group, parallel)
        assert [places[rank].group for rank in ranks] == [group] * 6
        assert [rank for rank in ranks if places[rank].is_leader] == [ranks[0]]


def test_tensor_ranks_are_neighbours() -> None:
    parallel = DiffusionParallelConfig(1, 2, 2)
    found = [(p.guidance, p.tensor) for p in (RankCoords.of(rank, parallel) for rank in range(4))]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_there_is_no_other_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="of 4"):
        RankCoords.of(rank, DiffusionParallelConfig(1, 2, 2))
