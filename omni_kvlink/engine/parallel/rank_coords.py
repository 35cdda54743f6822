"""`RankCoords`: a rank's position among the ranks of its stage."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.engine.config import DiffusionParallelConfig


@dataclasses.dataclass(frozen=True)
class RankCoords:
    """A rank's data-parallel group, and its index among those that share branches, and heads."""

    group: int
    guidance: int
    tensor: int

    @classmethod
    def of(cls, rank: int, parallel: DiffusionParallelConfig) -> RankCoords:
        """Coordinates of a rank: tensor varies fastest, then guidance, then group."""
        if not 0 <= rank < parallel.world_size:
            raise ValueError(f"rank {rank} of {parallel.world_size}; ranks count from 0")
        rest, tensor = divmod(rank, parallel.tensor_parallel_size)
        group, guidance = divmod(rest, parallel.cfg_parallel_size)
        return cls(group, guidance, tensor)

    @property
    def is_leader(self) -> bool:
        """Whether this rank returns the results of its group."""
        return self.guidance == self.tensor == 0


def group_ranks(group: int, parallel: DiffusionParallelConfig) -> range:
    """The ranks of a data-parallel group, its leader first."""
    size = parallel.cfg_parallel_size * parallel.tensor_parallel_size
    return range(group * size, (group + 1) * size)
