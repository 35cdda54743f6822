"""`TeaCache`: reuses the rows of an earlier step while the input changes little."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch

from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change
from omni_kvlink.errors import SchemaError
from omni_kvlink.settings import Number, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from omni_kvlink.models.bagel.hooks import RunLayers


@dataclasses.dataclass(frozen=True)
class TeaCacheSettings(Settings):
    """All settings."""

    rel_l1_thresh: Annotated[float, Number(0)] = 0.2
    coefficients: tuple[float, ...] | None = None  # the highest power first

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coefficients == ():
            raise SchemaError("coefficients=[]: wanted a list of numbers, the highest power first")


class TeaCache(StepCache):
    """Skips a branch's pass while the summed changes of its input are below a threshold.

    The input is that of the first layer: the latent rows with the time step's embedding. Its
    relative L1 changes are summed since the last computed pass. After Tong Liu et al., "Timestep
    Embedding Tells: It's Time to Cache for Video Diffusion Model", 2024, with the last layer's rows
    kept instead of what the layers added. `coefficients` are their fitted polynomial, the highest
    power first as `numpy.poly1d` has them: the size of its value is summed instead of the change.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        settings = TeaCacheSettings.read(config)
        self.threshold, self._coefficients = settings.rel_l1_thresh, settings.coefficients

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
