"""`StepCache`: common parts of backends that compare a denoising step with an earlier one."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from omni_kvlink.engine.step_cache.cache_backend import CacheBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omni_kvlink.models.bagel.hooks import RunLayers


@dataclass(frozen=True)
class Kept:
    """A guidance branch's step, as far as it is kept.

    Attributes:
        step: counted from 0.
        probe: what steps are compared by, [rows, hidden] or [rows, batch, hidden].
        value: what may be reused, with the row and batch dimensions of `probe`.
        drift: float32 [] or [batch]: how far each request is from the step that computed `value`.
    """

    step: int
    probe: Tensor
    value: Tensor
    drift: Tensor


class StepCache(CacheBackend):
    """Reuses what a branch computed while a request differs from it by less than a threshold.

    This is decided for each request of a batch by itself, so that its image is that of a run alone;
    the pass is skipped if no request needs it. K and V are neither read nor written.

    Attributes:
        computed: passes that were computed in this generation, by branch.
        reused: passes that reused something.
    """

    threshold: float
    """The drift below which values are reused; at 0 everything is computed."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.computed, self.reused = Counter[str](), Counter[str]()
        self._kept: dict[str, Kept] = {}

    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline's layers; see `CacheBackend.enable`."""
        self._hook_into(pipeline, self.layers)

    @abstractmethod
    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Run the layers, or reuse what some computed: a `LayersHook`."""

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Forget all steps; see `CacheBackend.refresh`."""
        self._kept.clear()
        self.computed.clear()
        self.reused.clear()

    def cached_steps(self, pipeline: Any) -> int:
        """Passes that reused something, of all branches; see `CacheBackend.cached_steps`."""
        return sum(self.reused.values())

    @abstractmethod
    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        """Return each request's distance from the kept step: float32 [] or [batch]."""

    @abstractmethod
    def _anchor(self, last: Kept, probe: Tensor, mask: Tensor) -> Tensor:
        """The probe to compare the next step with; `mask` is True for requests that reused."""

    def _reuse(
        self,
        branch: str,
        step: int,
        probe: Tensor,
        compute: Callable[[], Tensor],
        base: Tensor | None = None,
    ) -> Tensor:
        """The value of `compute`, now or as kept; with a `base`, the difference to it is kept."""
        if branch in self._kept and step <= self._kept[branch].step:
            self._kept.clear()  # another generation begins
        last = self._kept.get(branch)
        if last is None:
            out = compute()
            value = out if base is None else out - base
            drift = torch.zeros(probe.shape[1:-1], device=probe.device)
            self._kept[branch] = Kept(step, probe, value, drift)
            self.computed[branch] += 1
            return out
        drift = self._drift(last, probe)
        close = drift < self.threshold  # not so if there is a NaN
        mask, all_close = close[..., None], bool(close.all())
        value = last.value
        out = value if base is None else base + value
        if not all_close:
            new = compute()
            out = torch.where(mask, out, new)
            value = torch.where(mask, value, new if base is None else new - base)
        drift, anchor = drift.where(close, drift.new_zeros(())), self._anchor(last, probe, mask)
        self._kept[branch] = Kept(step, anchor, value, drift)
        (self.reused if all_close else self.computed)[branch] += 1
        return out


def change(new: Tensor, old: Tensor) -> Tensor:
    """The L1 distance relative to `old`, of each request: float32 [] or [batch]."""
    distance, size = (new - old).abs(), old.abs()
    return distance.mean((0, -1), dtype=torch.float32) / size.mean((0, -1), dtype=torch.float32)
