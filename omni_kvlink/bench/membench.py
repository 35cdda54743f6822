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
from omni_kvlink.bench.stats import Timings

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = "plain_copy"


@dataclasses.dataclass(frozen=True)
class CopySetup:
    """What to measure; `threads` are torch's."""

    shape: Shape
    rounds: int = 20
    threads: int = 1

    @property
    def steps(self) -> int:
        """How often `measure` calls `step`."""
        return self.rounds


@dataclasses.dataclass(frozen=True)
class CopyResult(Timings):
    """All methods of one run by their keys, and what each is, for people."""

    setup: CopySetup
    features: str
    what: dict[str, str]

    def rate(self, key: str) -> float:
        """Gigabytes of tensors a second, by the median."""
        return 1e-6 * self.setup.shape.nbytes / self.milliseconds(key).p50

    @property
    def digests_cost(self) -> float:
        """Percent that digests add to one thread's gather."""
        return 100 * (self.ratio_of("gather", "gather_bare") - 1)

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        rows = {
            key: {
                "what": what,
                "milliseconds": self.milliseconds(key).to_dict(),
                "gigabytes_per_second": round(self.rate(key), 3),
                "ratio": round(self.ratio_of(key, PLAIN), 4),
                "ratio_by_round": self.ratio_by_round(key, PLAIN).to_dict(),
            }
            for key, what in self.what.items()
        }
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "instructions": self.features,
            "plain_copy": self.what[PLAIN],
            "rounds": self.setup.rounds,
            "rows": rows,
            "digests_cost_percent": round(self.digests_cost, 3),
        }

    def text(self) -> str:
        """Everything that was measured, at most 96 columns wide."""
        shape = self.setup.shape
        head = ["", "ms p50 [min..max]", "GB/s", "× plain", "what"]
        rows = [self._cells(key) for key in self.what]
        lines = [
            wrapped("payload", f"{shape} = {shape.nbytes / 1e6:.3f} MB"),
            wrapped("copier", f"native, {self.features}; one thread unless a row says more"),
            wrapped("rounds", f"{self.setup.rounds}; each row once in each, in random order"),
        ]
        cost = wrapped("digests", f"{self.digests_cost:+.1f} % of one thread's gather")
        return "\n\n".join(["\n".join(lines), table(head, rows), cost])

    def _cells(self, key: str) -> list[str]:
        summary = self.milliseconds(key)
        times = f"{summary.p50:.3g} [{summary.min:.3g}..{summary.max:.3g}]"
        ratio = f"{self.ratio_of(key, PLAIN):.2f}"
        return [key.replace("_", " "), times, f"{self.rate(key):.2f}", ratio, self.what[key]]


def measure(setup: CopySetup, step: Callable[[], None] = lambda: None) -> CopyResult:
    """Prove every method, then time each once a round; `step` is called after each round.

    It raises `BenchError` for a method that does not move all bytes, `NativeError` without a
    compiled library, and `CapacityError` if the memory is too small.
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
    what = {method.key: method.what for method in methods}
    return CopyResult(seconds, setup, host.features(), what)
