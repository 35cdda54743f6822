"""Runs of several kinds, which take turns, and what their CPU and their rates say."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.stats import Summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.bench.setups import SmallSetup


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


def link_text(setup: SmallSetup, copier: str) -> str:
    """The link in words."""
    return (
        f"{setup.connector}, mode {setup.mode}, copier {copier}, digests "
        f"{'crc32c' if setup.digests else 'off'}, inline up to {setup.inline} bytes"
    )


def load_line() -> tuple[str, str]:
    """The load of the machine, for people."""
    averages = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    return "load", f"of the machine, 1, 5, 15 min: {averages}"
