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


class StepMemory:
    """The last step of every branch, in one generation; passes computed and reused since then."""

    def __init__(self) -> None:
        self.computed, self.reused = Counter[str](), Counter[str]()
        self._kept: dict[str, Kept] = {}

    def forget(self) -> None:
        """Clear everything; a new generation begins."""
        self._kept.clear()
        self.computed.clear()
        self.reused.clear()

    def last(self, branch: str, step: int) -> Kept | None:
        """The branch's last step; a step number that does not rise begins another generation."""
        kept = self._kept.get(branch)
        if kept is not None and step <= kept.step:
            self._kept.clear()
        return self._kept.get(branch)

    def keep(self, branch: str, kept: Kept, *, reused: bool) -> None:
        """Remember a branch's step, and count it."""
        self._kept[branch] = kept
        (self.reused if reused else self.computed)[branch] += 1


class StepCache(CacheBackend):
    """Reuses what a branch computed while a request differs from it by less than a threshold.

    This is decided for each request of a batch by itself, so that its image is that of a run alone;
    the pass is skipped if no request needs it. K and V are neither read nor written.
    """

    threshold: float
    """The drift below which values are reused; at 0 everything is computed."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.memory = StepMemory()

    def enable(self, pipeline: Any) -> None:
        """Hook into the pipeline's layers; see `CacheBackend.enable`."""
        self._hook_into(pipeline, self.layers)

    @abstractmethod
    def layers(self, branch: str, step: int, rows: Tensor, run: RunLayers, count: int) -> Tensor:
        """Run the layers, or reuse what some computed: a `LayersHook`."""

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Clear the memory; see `CacheBackend.refresh`."""
        self.memory.forget()

    def cached_steps(self, pipeline: Any) -> int:
        """Passes that reused something, of all branches; see `CacheBackend.cached_steps`."""
        return sum(self.memory.reused.values())

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
        last = self.memory.last(branch, step)
        if last is None:
            out = compute()
            value = out if base is None else out - base
            drift = torch.zeros(probe.shape[1:-1], device=probe.device)
            self.memory.keep(branch, Kept(step, probe, value, drift), reused=False)
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
        self.memory.keep(branch, Kept(step, anchor, value, drift), reused=all_close)
        return out


def change(new: Tensor, old: Tensor) -> Tensor:
    """The L1 distance relative to `old`, of each request: float32 [] or [batch]."""
    distance, size = (new - old).abs(), old.abs()
    return distance.mean((0, -1), dtype=torch.float32) / size.mean((0, -1), dtype=torch.float32)
