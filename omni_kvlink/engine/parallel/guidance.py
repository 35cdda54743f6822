"""Guidance branches on several ranks: each computes its own, and all go on with the same flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup


class SharedBranches:
    """The hook in a pipeline's denoising loop; called once for each step, on every rank.

    Args:
        names: all branches of the model; they are dealt to the guidance ranks in this order.
    """

    def __init__(self, names: Sequence[str], mates: ProcessGroup, agreement: BatchSync):
        degree = mates.parallel.cfg_parallel_size
        self._owners = {name: at % degree for at, name in enumerate(names)}
        self._mates, self._agreement = mates, agreement

    def __call__(
        self, branches: Sequence[str], compute: Callable[[str], Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """The flows of all branches, the same bits on every rank of a tensor share.

        Raises:
            What `compute` raised here.
            RankFailed: it raised something on another rank.
        """
        parallel, own = self._mates.parallel, dict[str, Tensor]()
        if parallel.tensor_parallel_size > 1:  # who has failed before would be missed in the sums
            self._agreement.step()
        failure: Exception | None = None
        try:
            for branch in branches:
                if self._owners[branch] == self._mates.place.guidance:
                    own[branch] = compute(branch)
        except Exception as error:
            failure = error
        if parallel.cfg_parallel_size > 1 or failure is not None:
            self._agreement.step(failure)
        flows = {}
        for branch in branches:
            flow = own[branch] if branch in own else like.clone()
            flows[branch] = self._mates.flow(flow, self._owners[branch])
        return flows
