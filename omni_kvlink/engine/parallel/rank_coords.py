"""Where a rank stands among those of its stage."""

from __future__ import annotations

import dataclasses

from omni_kvlink.engine.config import DiffusionParallelConfig


@dataclasses.dataclass(frozen=True)
class RankCoords:
    """A rank's share of the work, by each way of dividing it.

    Attributes:
        group: data-parallel group: which of the requests.
        guidance: which of the guidance branches.
        tensor: which of the heads.
    """

    group: int
    guidance: int
    tensor: int

    @classmethod
    def of(cls, rank: int, parallel: DiffusionParallelConfig) -> RankCoords:
        """Ranks are counted through the tensor ranks first, then the guidance ranks, then groups.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < parallel.world_size:
            raise ValueError(f"rank {rank} of {parallel.world_size}; ranks count from 0")
        rest, tensor = divmod(rank, parallel.tensor_parallel_size)
        group, guidance = divmod(rest, parallel.cfg_parallel_size)
        return cls(group, guidance, tensor)

    @property
    def is_leader(self) -> bool:
        """Whether this rank answers for its group."""
        return self.guidance == self.tensor == 0


def group_ranks(group: int, parallel: DiffusionParallelConfig) -> range:
    """The ranks that paint a request of this group together; the first of them answers."""
    size = parallel.cfg_parallel_size * parallel.tensor_parallel_size
    return range(group * size, (group + 1) * size)
