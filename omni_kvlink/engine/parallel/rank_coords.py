"""`RankCoords`: a rank's position among the ranks of its stage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from omni_kvlink.engine.config import DiffusionParallelConfig

_AXES = {
    "group": "data_parallel_size",
    "guidance": "cfg_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tensor": "tensor_parallel_size",
}
"""Each coordinate and its number of values, the one that varies fastest last."""


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
        """Coordinates of a rank: tensor varies fastest, then those of `_AXES` from the end."""
        if not 0 <= rank < parallel.world_size:
            raise ValueError(f"rank {rank} of {parallel.world_size}; ranks count from 0")
        index = np.argwhere(_grid(parallel) == rank)[0].tolist()
        return cls(**dict(zip(_AXES, index, strict=True)))

    def rank(self, parallel: DiffusionParallelConfig) -> int:
        """The rank with these coordinates."""
        return self.ranks_along(parallel=parallel)[0]

    def ranks_along(self, *axes: str, parallel: DiffusionParallelConfig) -> list[int]:
        """The ranks that differ from this one along these axes alone, this one included."""
        index = tuple(slice(None) if axis in axes else getattr(self, axis) for axis in _AXES)
        return [int(rank) for rank in np.ravel(_grid(parallel)[index])]

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


def _grid(parallel: DiffusionParallelConfig) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All ranks by their coordinates, in the order of `_AXES`."""
    sizes = [getattr(parallel, degree) for degree in _AXES.values()]
    return np.arange(parallel.world_size).reshape(sizes)
