"""`SharedBranches`: guidance branches that are computed on several ranks; and where it hooks in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from omni_kvlink.models.bagel.hooks import BranchesHook, SyncErrorsHook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.engine.parallel.batch_sync import BatchSync
    from omni_kvlink.engine.parallel.process_group import ProcessGroup


@dataclasses.dataclass
class RankHooks:
    """The fields of a pipeline's `hooks` if ranks share its passes; set where there are several.

    Attributes:
        branches: `branches(names, compute, empty)` returns the flows of all named guidance branches
            by name, in each denoising step. `compute(name)` computes one on this rank, in memory
            like that of `empty(name)`.
        sync_errors: takes errors of this rank by request id, and returns those of all ranks.
        decode: whether this rank decodes the images.
    """

    branches: BranchesHook | None = None
    sync_errors: SyncErrorsHook | None = None
    decode: bool = True


class SharedBranches:
    """Hook of a pipeline's denoising loop: each guidance rank computes its branches' flows.

    It must be called on every rank at each step; afterwards all ranks have all flows. Branch i of
    `names`, all branches of the model, is computed by guidance rank i modulo their number.
    """

    def __init__(self, names: Sequence[str], process_group: ProcessGroup, sync: BatchSync):
        degree = process_group.parallel.cfg_parallel_size
        self._owners = {name: index % degree for index, name in enumerate(names)}
        self._process_group, self._sync = process_group, sync

    def __call__(
        self,
        branches: Sequence[str],
        compute: Callable[[str], Tensor],
        empty: Callable[[str], Tensor],
    ) -> dict[str, Tensor]:
        """Flows of some branches by name; the same bits on ranks that are alike but for guidance.

        `compute` computes one branch's flow, for which `empty` allocates the memory. If it raises
        on another rank, RankFailed is raised here.
        """
        group, local_flows = self._process_group, dict[str, Tensor]()
        if group.parallel.ranks_per_pass > 1:  # a rank that has failed would miss the pass
            self._sync.step()
        failure: Exception | None = None
        try:
            for branch in branches:
                if self._owners[branch] == group.coords.guidance:
                    local_flows[branch] = compute(branch)
        except Exception as error:
            failure = error
        if group.parallel.cfg_parallel_size > 1 or failure is not None:
            self._sync.step(failure)
        flows = {}
        for branch in branches:
            flow = local_flows[branch] if branch in local_flows else empty(branch)
            flows[branch] = group.broadcast_flow(flow, self._owners[branch])
        return flows
