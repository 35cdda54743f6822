"""`BlockCache`: reuses what the middle layers computed while the first ones change little."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from omni_kvlink.engine.step_cache.cache_backend import check_ends
from omni_kvlink.engine.step_cache.step_cache import Kept, StepCache, change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from omni_kvlink.models.bagel.hooks import RunLayers


class BlockCache(StepCache):
    """Computes the first and last layers in every step, those between only when needed.

    What the first layers add to their input is compared with what they added when the middle was
    last computed. While the relative L1 change is below the threshold, the middle adds what it
    added then. This is DBCache of cache-dit, whose names the settings have: `Fn_compute_blocks` are
    layers at the beginning, `Bn_compute_blocks` at the end.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "Fn_compute_blocks": 1,
        "Bn_compute_blocks": 0,
        "residual_diff_threshold": 0.08,
    }
    threshold = "residual_diff_threshold"

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self._first = self._count("Fn_compute_blocks", 1)
        self._last = self._count("Bn_compute_blocks", 0)

    def _count(self, name: str, least: int) -> int:
        value: Any = self.config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} {value!r}: a whole number, {least} or more")
        return value

    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline's layers; see `CacheBackend.enable`."""
        check_ends(self.config, pipeline)
        super().enable(pipeline)

    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Run the first and the last layers, those between if needed; see `StepCache.layers`."""
        stop = count - self._last
        head = run(rows, 0, self._first)
        middle = partial(run, head, self._first, stop)
        return run(self._reuse(branch, step, head - rows, middle, head), stop, count)

    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        return change(probe, last.probe)

    def _anchor(self, last: Kept, probe: Tensor, mask: Tensor) -> Tensor:
        return last.probe.where(mask, probe)
