"""`RankCoords`: a rank's position among the ranks of its stage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.engine.config import DiffusionParallelConfig

_AXES = {
    "tensor": "tensor_parallel_size",
    "ulysses": "ulysses_degree",
    "ring": "ring_degree",
    "pipeline": "pipeline_parallel_size",
    "guidance": "cfg_parallel_size",
    "group": "data_parallel_size",
}
"""Each coordinate and its number of values, the one that varies fastest first."""


@dataclasses.dataclass(frozen=True)
class RankCoords:
    """A rank's data-parallel group, and its index along each axis that divides a request's work."""

    group: int
    guidance: int
    tensor: int
    ulysses: int = 0
    ring: int = 0
    pipeline: int = 0

    @classmethod
    def of(cls, rank: int, parallel: DiffusionParallelConfig) -> RankCoords:
        """Coordinates of a rank: tensor varies fastest, then those of `_AXES` in their order."""
        if not 0 <= rank < parallel.world_size:
            raise ValueError(f"rank {rank} of {parallel.world_size}; ranks count from 0")
        coords = {}
        for axis, degree in _AXES.items():
            rank, coords[axis] = divmod(rank, getattr(parallel, degree))
        return cls(**coords)

    def rank(self, parallel: DiffusionParallelConfig) -> int:
        """The rank with these coordinates."""
        rank, stride = 0, 1
        for axis, degree in _AXES.items():
            rank += getattr(self, axis) * stride
            stride *= getattr(parallel, degree)
        return rank

    def ranks_along(self, *axes: str, parallel: DiffusionParallelConfig) -> list[int]:
        """The ranks that differ from this one along these axes alone, this one included."""
        other_axes = vars(self).keys() - set(axes)
        return [
            rank
            for rank, coords in _all(parallel)
            if all(getattr(coords, axis) == getattr(self, axis) for axis in other_axes)
        ]

    def kv_rank(self, parallel: DiffusionParallelConfig) -> int:
        """Its index among the ranks that divide the KV heads; those of a ring have the same."""
        return self.tensor * parallel.ulysses_degree + self.ulysses

    @property
    def is_leader(self) -> bool:
        """Whether this rank returns the results of its group."""
        return not any(value for axis, value in vars(self).items() if axis != "group")


def group_ranks(group: int, parallel: DiffusionParallelConfig) -> range:
    """The ranks of a data-parallel group, its leader first."""
    size = parallel.world_size // parallel.data_parallel_size
    return range(group * size, (group + 1) * size)


def _all(parallel: DiffusionParallelConfig) -> Iterator[tuple[int, RankCoords]]:
    return ((rank, RankCoords.of(rank, parallel)) for rank in range(parallel.world_size))
