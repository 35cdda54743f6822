"""`TeaCache`: reuses the flow of an earlier step while the input changes little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


class TeaCache(StepCache):
    """Skips a branch's pass while the summed changes of its input are below a threshold.

    The input is that of the first layer: the latent rows with the time step's embedding. Its
    relative L1 changes are summed since the last computed pass. After Tong Liu et al., "Timestep
    Embedding Tells: It's Time to Cache for Video Diffusion Model", 2024, but without their fitted
    polynomial, and with the flow kept instead of what the layers added.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"rel_l1_thresh": 0.2}
    threshold = "rel_l1_thresh"
    hook = "velocity"

    def velocity(
        self, branch: str, step: int, rows: Tensor, compute: Callable[[], Tensor]
    ) -> Tensor:
        """A `VelocityHook`."""
        return self._reuse(branch, step, rows[1:-1], compute)  # the markers never change

    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        return last.drift + change(probe, last.probe)

    def _anchor(self, last: Kept, probe: Tensor, same: Tensor) -> Tensor:
        return probe
