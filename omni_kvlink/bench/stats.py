"""Percentiles of a few dozen measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of them lie, interpolated linearly as numpy does.

    Raises:
        ValueError: no values, or a percentage outside 0…100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"the {percent:g}th percentile of {len(values)} values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclasses.dataclass(frozen=True)
class Summary:
    """One measured quantity over all rounds, in the unit of its values."""

    p50: float
    p90: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(p50, p90, p99, min(values), max(values))

    def to_dict(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in dataclasses.asdict(self).items()}
