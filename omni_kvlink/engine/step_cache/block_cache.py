"""`BlockCache`: reuses what the middle layers computed while the first ones change little."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from omni_kvlink.engine.step_cache.cache_backend import check_ends
from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change
from omni_kvlink.settings import Integer, Number, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from omni_kvlink.models.bagel.hooks import RunLayers


@dataclasses.dataclass(frozen=True)
class BlockCacheSettings(Settings):
    """All settings."""

    Fn_compute_blocks: Annotated[int, Integer(1)] = 1
    Bn_compute_blocks: Annotated[int, Integer(0)] = 0
    residual_diff_threshold: Annotated[float, Number(0)] = 0.08


class BlockCache(StepCache):
    """Computes the first and last layers in every step, those between only when needed.

    What the first layers add to their input is compared with what they added when the middle was
    last computed. While the relative L1 change is below the threshold, the middle adds what it
    added then. This is DBCache of cache-dit, whose names the settings have: `Fn_compute_blocks` are
    layers at the beginning, `Bn_compute_blocks` at the end.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self._settings = BlockCacheSettings.read(config)
        self.threshold = self._settings.residual_diff_threshold

    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline's layers; see `CacheBackend.enable`."""
        check_ends(self._settings, pipeline)
        super().enable(pipeline)

    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Run the first and the last layers, those between if needed; see `StepCache.layers`."""
        first, stop = self._settings.Fn_compute_blocks, count - self._settings.Bn_compute_blocks
        head = run(rows, 0, first)
        middle = partial(run, head, first, stop)
        return run(self._reuse(branch, step, head - rows, middle, head), stop, count)

    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        return change(probe, last.probe)

    def _anchor(self, last: Kept, probe: Tensor, mask: Tensor) -> Tensor:
        return last.probe.where(mask, probe)
