"""The measurements of all rounds or runs, and their summaries."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink.bench.report import row
from omni_kvlink.cli.terminal import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


class Timings(dict[str, list[float]]):
    """Seconds of every measurement, round by round."""

    @classmethod
    def of_rounds(cls, rounds: Sequence[dict[str, float]]) -> Timings:
        """The seconds of rounds that have the same measurements."""
        return cls({name: [seconds[name] for seconds in rounds] for name in rounds[0]})

    def milliseconds(self, name: str) -> Summary:
        """Milliseconds of one measurement."""
        return Summary.of([1e3 * value for value in self[name]])

    def ratio_of(self, name: str, other: str) -> float:
        """Median of one measurement over the median of another one."""
        return self.milliseconds(name).p50 / self.milliseconds(other).p50

    def ratio_by_round(self, name: str, other: str) -> Summary:
        """One measurement over another one, round by round."""
        pairs = zip(self[name], self[other], strict=True)
        return Summary.of([value / base for value, base in pairs])

    def table(self, texts: Mapping[str, str], columns: Sequence[str] = COLUMNS) -> str:
        """A table of milliseconds: some columns of the summaries of measurements, with texts."""
        rows = [
            row(name, operator.attrgetter(*columns)(self.milliseconds(name)), text)
            for name, text in texts.items()
        ]
        return table(["ms", *columns, "what"], rows)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a kind: `count` items, when it began and ended, and the CPU; nanoseconds.

    It begins with the producer's first call. `cpu` is that of each side, all threads.
    """

    kind: str
    count: int
    began: int
    ended: int
    cpu: dict[str, int]
    wrong: int

    @property
    def per_second(self) -> float:
        """Items a second."""
        return 1e9 * self.count / (self.ended - self.began)

    @property
    def cpu_per_item(self) -> dict[str, float]:
        """Microseconds of CPU of each side."""
        return {side: 1e-3 * spent / self.count for side, spent in self.cpu.items()}


class Runs:
    """All runs, kind by kind in the order of the rounds, in two processes or in one."""

    def __init__(self, runs: Sequence[Any], *, one_process: bool):
        self._runs = runs
        self.total, self.wrong = sum(run.count for run in runs), sum(run.wrong for run in runs)
        self.sides = {"producer": "producer", "reader": "reader"}
        """The name of each side's CPU, and where a run has it."""
        if one_process:
            self.sides = {"both": "producer"}

    def of_kind(self, kind: str) -> list[Any]:
        """The runs of a kind, round by round."""
        return [run for run in self._runs if run.kind == kind]

    def per_second(self, kind: str, most: float = math.inf) -> Summary:
        """Items a second, by round; not more than `most`."""
        return Summary.of([min(run.per_second, most) for run in self.of_kind(kind)])

    def by_side(self, kind: str, figure: str) -> dict[str, Summary]:
        """A figure of both sides, such as `cpu_per_item`, by round."""
        by_round = [getattr(run, figure) for run in self.of_kind(kind)]
        return {
            side: Summary.of([sides[name] for sides in by_round])
            for side, name in self.sides.items()
        }
