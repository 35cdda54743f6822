"""The measurements of all rounds, and their summaries."""

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


COLUMNS = tuple(field.name for field in dataclasses.fields(Summary))
"""The names of the figures of a summary."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of every measurement, round by round."""

    seconds: dict[str, list[float]]

    def milliseconds(self, name: str) -> Summary:
        """Milliseconds of one measurement."""
        return Summary.of([1e3 * value for value in self.seconds[name]])

    def ratio_of(self, name: str, other: str) -> float:
        """Median of one measurement over the median of another one."""
        return self.milliseconds(name).p50 / self.milliseconds(other).p50

    def ratio_by_round(self, name: str, other: str) -> Summary:
        """One measurement over another one, round by round."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return Summary.of([value / base for value, base in pairs])
