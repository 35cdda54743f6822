"""Coordinates of the ranks of a stage."""

from __future__ import annotations

import pytest

from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.parallel.rank_coords import RankCoords, group_ranks


def test_all_coordinates_differ_and_leaders_come_first() -> None:
    parallel = DiffusionParallelConfig(2, 3, 2)
    coords = [RankCoords.of(rank, parallel) for rank in range(parallel.world_size)]
    assert len(set(coords)) == 12
    for group in range(2):
        ranks = group_ranks(group, parallel)
        assert [coords[rank].group for rank in ranks] == [group] * 6
        assert [rank for rank in ranks if coords[rank].is_leader] == [ranks[0]]


def test_a_rank_is_found_by_its_coordinates() -> None:
    parallel = DiffusionParallelConfig(
        data_parallel_size=2,
        cfg_parallel_size=2,
        tensor_parallel_size=2,
        ulysses_degree=2,
        ring_degree=2,
        pipeline_parallel_size=2,
    )
    coords = [RankCoords.of(rank, parallel) for rank in range(parallel.world_size)]
    assert [one.rank(parallel) for one in coords] == list(range(64))
    assert coords[32 + 16 + 8 + 4 + 2 + 1] == RankCoords(1, 1, 1, 1, 1, 1)
    assert coords[2] == RankCoords(0, 0, 0, ulysses=1)  # as vLLM-Omni orders them
    assert coords[8] == RankCoords(0, 0, 0, pipeline=1)
    assert [rank for rank, one in enumerate(coords) if one.is_leader] == [0, 32]
    assert coords[37].ranks_along("ring", parallel=parallel) == [33, 37]
    assert coords[37].ranks_along("ulysses", "ring", parallel=parallel) == [33, 35, 37, 39]
    assert len({one.kv_rank(parallel) for one in coords}) == parallel.kv_ranks == 4


def test_degrees_of_sequence_parallelism_agree() -> None:
    assert DiffusionParallelConfig(ulysses_degree=2, ring_degree=3).sequence_parallel_size == 6
    assert DiffusionParallelConfig(sequence_parallel_size=2, ring_degree=2).world_size == 2
    with pytest.raises(ValueError, match="ulysses_degree 1 x ring_degree 1 is 1; set those"):
        DiffusionParallelConfig(sequence_parallel_size=2)


def test_tensor_ranks_are_neighbours() -> None:
    parallel = DiffusionParallelConfig(1, 2, 2)
    found = [(p.guidance, p.tensor) for p in (RankCoords.of(rank, parallel) for rank in range(4))]
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_raises(rank: int) -> None:
    with pytest.raises(ValueError, match="of 4"):
        RankCoords.of(rank, DiffusionParallelConfig(1, 2, 2))
