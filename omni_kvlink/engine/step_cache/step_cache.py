"""What the backends have in common that compare a denoising step with an earlier one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_kvlink.engine.step_cache.cache_backend import CacheBackend


@dataclass(frozen=True)
class Kept:
    """What a guidance branch left behind at a step.

    Attributes:
        step: counted from 0.
        probe: what steps are compared by, [rows, hidden], or [rows, batch, hidden].
        value: what may be used again, its row and batch dimensions the same way round.
        drift: float32 [], or [batch]: how far each request is from where `value` was computed.
    """

    step: int
    probe: Tensor
    value: Tensor
    drift: Tensor


class StepMemory:
    """The last step of every branch, of one generation.

    Attributes:
        computed: passes since the last `forget`, by branch.
        reused: passes that were not needed.
    """

    def __init__(self) -> None:
        self.computed, self.reused = Counter[str](), Counter[str]()
        self._kept: dict[str, Kept] = {}

    def forget(self) -> None:
        self._kept.clear()
        self.computed.clear()
        self.reused.clear()

    def last(self, branch: str, step: int) -> Kept | None:
        """The branch's step before this one; a step that comes again begins another generation."""
        kept = self._kept.get(branch)
        if kept is not None and step <= kept.step:
            self._kept.clear()
        return self._kept.get(branch)

    def keep(self, branch: str, kept: Kept, *, reused: bool) -> None:
        self._kept[branch] = kept
        (self.reused if reused else self.computed)[branch] += 1


class StepCache(CacheBackend):
    """Reuses what a branch computed while a request is closer to it than a threshold.

    Each request of a batch decides for itself, and never gets what was computed for a mate's sake:
    its image is that of a run alone. The pass is saved where all of them can do without. K and V
    are neither read nor written here.

    Raises:
        ValueError: a setting is unknown or out of range.
    """

    defaults: ClassVar[Mapping[str, Any]]
    """Every setting there is."""
    hook: ClassVar[str]
    """The field of `DenoiseHooks` that this needs for itself."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        if unknown := sorted(config.keys() - self.defaults.keys()):
            raise ValueError(
                f"{type(self).__name__} has no setting {', '.join(unknown)}; "
                f"there are {', '.join(self.defaults)}"
            )
        self.config = {**self.defaults, **config}
        self.memory = StepMemory()

    def enable(self, pipeline: Any) -> None:
        hooks = getattr(pipeline, "hooks", None)
        if not hasattr(hooks, self.hook):
            raise ValueError(
                f"{type(self).__name__} needs hooks.{self.hook}, which {type(pipeline).__name__} "
                f'does not offer: use cache_backend "none"'
            )
        if getattr(hooks, self.hook) is not None:
            raise ValueError(f"hooks.{self.hook} is taken: a pipeline has one cache backend")
        setattr(hooks, self.hook, getattr(self, self.hook))
        self.enabled = True

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        self.memory.forget()

    @property
    @abstractmethod
    def threshold(self) -> float:
        """Reused while the drift is under it; at 0 everything is computed."""

    @abstractmethod
    def _drift(self, last: Kept, probe: Tensor) -> Tensor:
        """How far each request is from what was computed: float32 [], or [batch]."""

    @abstractmethod
    def _anchor(self, last: Kept, probe: Tensor, same: Tensor) -> Tensor:
        """The probe to compare the next step with; `same` says who reused."""

    def _reuse(
        self,
        branch: str,
        step: int,
        probe: Tensor,
        compute: Callable[[], Tensor],
        base: Tensor | None = None,
    ) -> Tensor:
        """What `compute` gives, or gave; with a `base`, what it added to that is used again."""
        last = self.memory.last(branch, step)
        if last is None:
            out = compute()
            value = out if base is None else out - base
            nothing = torch.zeros(probe.shape[1:-1], device=probe.device)
            self.memory.keep(branch, Kept(step, probe, value, nothing), reused=False)
            return out
        drift = self._drift(last, probe)
        close = drift < self.threshold  # not so if there is a NaN
        same, every = close[..., None], bool(close.all())
        value = last.value
        out = value if base is None else base + value
        if not every:
            new = compute()
            out = torch.where(same, out, new)
            value = torch.where(same, value, new if base is None else new - base)
        kept = Kept(
            step, self._anchor(last, probe, same), value, drift.where(close, drift.new_zeros(()))
        )
        self.memory.keep(branch, kept, reused=every)
        return out


def change(new: Tensor, old: Tensor) -> Tensor:
    """The L1 distance relative to the old one, of each request: float32 [], or [batch]."""
    apart, size = (new - old).abs(), old.abs()
    return apart.mean((0, -1), dtype=torch.float32) / size.mean((0, -1), dtype=torch.float32)


def number(config: Mapping[str, Any], name: str) -> float:
    """A setting that is a number, 0 or more."""
    value = config[name]
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} {value!r}: a number, 0 (off) or more")
    return float(value)


def count(config: Mapping[str, Any], name: str, least: int) -> int:
    """A setting that is a whole number."""
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} {value!r}: a whole number, {least} or more")
    return value
