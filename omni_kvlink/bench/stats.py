"""The summary of a few dozen measurements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Percentiles of one quantity over all rounds, in the unit of its values."""

    p50: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize at least one value; percentiles are numpy's, interpolated linearly."""
        p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
        return cls(p50, p90, p99, min(values), max(values))

    def to_dict(self) -> dict[str, float]:
        """The fields as JSON values, rounded to 6 digits."""
        return {name: round(value, 6) for name, value in dataclasses.asdict(self).items()}
