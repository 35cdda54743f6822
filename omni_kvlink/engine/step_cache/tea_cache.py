"""`TeaCache`: a step whose input has hardly moved gets the flow of an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change, number


class TeaCache(StepCache):
    """Skips a branch's whole pass while its input's changes, summed up, are under a threshold.

    The input is what goes into the first layer: the latent rows with the time step's embedding
    added. Its relative L1 change from step to step is summed since the last computed pass. (Tong
    Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model", 2024; the
    polynomial fitted to a model that they rescale changes by is left out, for nobody has fitted
    one to tiny weights, and a flow is kept where they keep what the layers added.)

    Args:
        config: `rel_l1_thresh`, 0.2 if not given.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"rel_l1_thresh": 0.2}
    hook = "velocity"

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self._threshold = number(self.config, "rel_l1_thresh")

    @property
    def threshold(self) -> float:
        return self._threshold

    def velocity(
        self, branch: str, step: int, rows: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """A `VelocityHook`."""
        return self._reuse(branch, step, rows[1:-1], compute)  # the markers never move

    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        return last.drift + change(probe, last.probe)

    def _anchor(self, last: Kept, probe: Tensor, same: Tensor) -> Tensor:
        return probe
