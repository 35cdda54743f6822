"""What this machine's memory allows: several methods to copy as many bytes, timed in turn."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from omni_kvlink._native import host
from omni_kvlink.bench.copy_methods import make_copy_methods
from omni_kvlink.bench.errors import BenchError
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.payloads import Shape
from omni_kvlink.bench.report import table, wrapped
from omni_kvlink.bench.stats import Summary

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class CopySetup:
    """What to measure; `threads` are torch's."""

    shape: Shape
    rounds: int = 20
    threads: int = 1


@dataclasses.dataclass(frozen=True)
class CopyTimes:
    """Seconds of one method in each round, beside the plain copy's of the same rounds."""

    key: str
    what: str
    nbytes: int
    seconds: list[float]
    plain: list[float]

    @property
    def milliseconds(self) -> Summary:
        """Milliseconds of all rounds."""
        return Summary.of([1e3 * value for value in self.seconds])

    @property
    def ratio(self) -> float:
        """Median over the plain copy's median."""
        return Summary.of(self.seconds).p50 / Summary.of(self.plain).p50

    @property
    def rate(self) -> float:
        """Gigabytes of tensors a second, by the median."""
        return 1e-6 * self.nbytes / self.milliseconds.p50

    def to_dict(self) -> dict[str, Any]:
        """The method's part of the JSON document; the keys are stable."""
        by_round = [own / plain for own, plain in zip(self.seconds, self.plain, strict=True)]
        return {
            "what": self.what,
            "milliseconds": self.milliseconds.to_dict(),
            "gigabytes_per_second": round(self.rate, 3),
            "ratio": round(self.ratio, 4),
            "ratio_by_round": Summary.of(by_round).to_dict(),
        }

    def cells(self) -> list[str]:
        """The method's row of the table."""
        summary = self.milliseconds
        times = f"{summary.p50:.3g} [{summary.min:.3g}..{summary.max:.3g}]"
        name = self.key.replace("_", " ")
        return [name, times, f"{self.rate:.2f}", f"{self.ratio:.2f}", self.what]


@dataclasses.dataclass(frozen=True)
class CopyResult:
    """All methods of one run; the first is the plain copy."""

    setup: CopySetup
    features: str
    rows: list[CopyTimes]

    @property
    def digests_cost(self) -> float:
        """Percent that digests add to one thread's gather."""
        p50 = {row.key: row.milliseconds.p50 for row in self.rows}
        return 100 * (p50["gather"] / p50["gather_bare"] - 1)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "instructions": self.features,
            "plain_copy": self.rows[0].what,
            "rounds": len(self.rows[0].seconds),
            "rows": {row.key: row.to_dict() for row in self.rows},
            "digests_cost_percent": round(self.digests_cost, 3),
        }

    def text(self) -> str:
        """Everything that was measured, at most 96 columns wide."""
        shape = self.setup.shape
        head = ["", "ms p50 [min..max]", "GB/s", "× plain", "what"]
        lines = [
            wrapped("payload", f"{shape} = {shape.nbytes / 1e6:.3f} MB"),
            wrapped("copier", f"native, {self.features}; one thread unless a row says more"),
            wrapped("rounds", f"{self.setup.rounds}; each row once in each, in random order"),
        ]
        cost = wrapped("digests", f"{self.digests_cost:+.1f} % of one thread's gather")
        blocks = ["\n".join(lines), table(head, [row.cells() for row in self.rows]), cost]
        return "\n\n".join(blocks)


def measure(setup: CopySetup, step: Callable[[], None] = lambda: None) -> CopyResult:
    """Prove every method, then time each once a round; `step` is called after each round.

    Raises:
        BenchError: a method does not move all bytes.
        NativeError: there is no compiled library.
        CapacityError: the memory is too small.
    """
    with torch_threads(setup.threads):
        methods = make_copy_methods(setup.shape, threads=setup.threads)
        for method in methods:
            if not method.moves_all_bytes():
                raise BenchError(f"{method.key}: not all bytes are there")
        seconds: dict[str, list[float]] = {method.key: [] for method in methods}
        chance = random.Random(0)  # the order changes from round to round
        for _ in range(setup.rounds):
            for method in chance.sample(methods, len(methods)):
                seconds[method.key].append(method.seconds())
            step()
    plain = seconds[methods[0].key]
    nbytes = setup.shape.nbytes
    rows = [CopyTimes(one.key, one.what, nbytes, seconds[one.key], plain) for one in methods]
    return CopyResult(setup, host.features(), rows)
