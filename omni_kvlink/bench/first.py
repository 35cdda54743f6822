"""Seconds of the first transfer of a link beside those of its tenth, prefaulted and not."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink.bench.pair import Pair, open_setup
from omni_kvlink.bench.payloads import make_sample
from omni_kvlink.bench.report import Progress, bar, document, progress, row, table, wrapped
from omni_kvlink.bench.setups import FirstSetup
from omni_kvlink.bench.stats import Timings

if TYPE_CHECKING:
    from omni_kvlink.bench.payloads import Sample

KEY = "bench"
TRANSFERS = 10
KINDS = ("prefault", "without")
_SLOT_SPACE = 8 << 20


@dataclasses.dataclass(frozen=True)
class FirstResult(Timings):
    """Seconds from `put` called to the views, of the first and the tenth transfer of each link.

    `mapping` has the milliseconds in which each end of the prefaulted links mapped its memory.
    """

    setup: FirstSetup
    mapping: dict[str, list[int]]

    def bars(self) -> list[dict[str, Any]]:
        """The bar of this setup, and whether it is met; empty for a small payload."""
        if self.setup.shape.nbytes < 100 << 20:
            return []
        ratio = self.ratio_by_round("prefault_first", "prefault_tenth").p50
        return [bar("first / tenth transfer, prefaulted", ratio, 1.5)]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "rounds": self.setup.rounds,
            "milliseconds": {name: self.milliseconds(name).to_dict() for name in self.seconds},
            "first_over_tenth": {
                kind: self.ratio_by_round(f"{kind}_first", f"{kind}_tenth").to_dict()
                for kind in KINDS
            },
            "mapping_ms": self.mapping,
            "bars": self.bars(),
        }

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        setup = self.setup
        head = [
            wrapped("payload", setup.shape.text),
            wrapped("link", f"{setup.connector}, {setup.rounds} links of each kind, in turn"),
            wrapped("wait", f"{setup.wait:g} s between the link's opening and the first transfer"),
        ]
        texts = {kind: "prefault= at both ends" if kind == "prefault" else kind for kind in KINDS}
        rows = [
            row(f"{name} transfer", (summary.p50, summary.min, summary.max), texts[kind])
            for kind in KINDS
            for name in ("first", "tenth")
            for summary in (self.milliseconds(f"{kind}_{name}"),)
        ]
        lines = list[str]()
        for kind in KINDS:
            ratio = self.ratio_by_round(f"{kind}_first", f"{kind}_tenth")
            text = f"{ratio.p50:.2f} × the tenth ({ratio.min:.2f} to {ratio.max:.2f} by link)"
            lines.append(wrapped("first", f"{kind}: {text}"))
        for side, times in self.mapping.items():
            text = f"{side}: {min(times)} to {max(times)} ms in a thread, before the first transfer"
            lines.append(wrapped("mapping", text))
        figures = table(["ms", "p50", "min", "max", "what"], rows)
        return document(head, figures, lines, self.bars())


def measure(setup: FirstSetup, progress: Progress = progress) -> FirstResult:
    """Open all links one after the other, and send `TRANSFERS` payloads over each."""
    sample = make_sample(KEY, setup.shape, np.random.default_rng(0), sources="contiguous")
    seconds = {f"{kind}_{name}": list[float]() for kind in KINDS for name in ("first", "tenth")}
    mapping, quota = dict[str, list[int]](), 2 * setup.shape.nbytes + _SLOT_SPACE
    with progress("links", len(KINDS) * setup.rounds) as step:
        for _ in range(setup.rounds):
            for kind in KINDS:
                options = {"prefault": setup.shape.nbytes} if kind == "prefault" else {}
                with open_setup(setup, connecting=options, quota=quota, **options) as pair:
                    time.sleep(setup.wait)
                    times = [_transfer(pair, sample) for _ in range(TRANSFERS)]
                    if options:
                        for side, spent in _mapping(pair).items():
                            mapping.setdefault(side, []).append(spent)
                seconds[f"{kind}_first"].append(times[0])
                seconds[f"{kind}_tenth"].append(times[-1])
                step()
    return FirstResult(seconds, setup, mapping)


def _transfer(pair: Pair, sample: Sample) -> float:
    """Send one payload to a reader that waits for it; seconds until the reader has its views."""
    getting = pair.peer.submit("get", key=KEY, timeout=60.0, verify="auto")
    pair.wait_until_requested()
    called = time.monotonic_ns()
    receipt = pair.link.put(sample.cache, timeout=60.0)
    returned = int(getting.result(60.0)["returned"])
    receipt.wait(timeout=60.0)
    return 1e-9 * (returned - called)


def _mapping(pair: Pair) -> dict[str, int]:
    """Milliseconds in which each end mapped memory ahead."""
    stats = {"producer": pair.link.stats(), "reader": pair.peer.call("stats")}
    milliseconds = dict[str, int]()
    for side, counters in stats.items():
        mapped = counters.get("mapped") or counters.get("memory", {}).get("prefault")
        if mapped:  # an end in the producer's process maps nothing
            milliseconds[side] = mapped["milliseconds"]
    return milliseconds
