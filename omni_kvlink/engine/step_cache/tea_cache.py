"""`TeaCache`: reuses the rows of an earlier step while the input changes little."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from omni_kvlink.models.bagel.hooks import RunLayers


class TeaCache(StepCache):
    """Skips a branch's pass while the summed changes of its input are below a threshold.

    The input is that of the first layer: the latent rows with the time step's embedding. Its
    relative L1 changes are summed since the last computed pass. After Tong Liu et al., "Timestep
    Embedding Tells: It's Time to Cache for Video Diffusion Model", 2024, with the last layer's rows
    kept instead of what the layers added. `coefficients` are their fitted polynomial, the highest
    power first as `numpy.poly1d` has them: the size of its value is summed instead of the change.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"rel_l1_thresh": 0.2, "coefficients": None}
    threshold = "rel_l1_thresh"

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        coefficients: Any = self.config["coefficients"]
        self._coefficients = None if coefficients is None else _numbers(coefficients)

    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Run all layers, or none; see `StepCache.layers`."""
        probe = rows[1:-1]  # the markers never change
        return self._reuse(branch, step, probe, partial(run, rows, 0, count))

    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        distance = change(probe, last.probe)
        if self._coefficients is None:
            return last.drift + distance
        powers, value = distance.double(), torch.zeros_like(distance, dtype=torch.float64)
        for coefficient in self._coefficients:
            value = value * powers + coefficient
        return last.drift + value.abs().float()

    def _anchor(self, last: Kept, probe: Tensor, mask: Tensor) -> Tensor:
        return probe


def _numbers(coefficients: Any) -> list[float]:
    """The coefficients; raises ValueError unless they are finite numbers, at least one."""
    numbers = list(coefficients) if isinstance(coefficients, (list, tuple)) else []
    are_numbers = [isinstance(n, int | float) and not isinstance(n, bool) for n in numbers]
    if not numbers or not all(are_numbers) or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"coefficients {coefficients!r:.60}: a list of numbers, the highest power first"
        )
    return [float(number) for number in numbers]
