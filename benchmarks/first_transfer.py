"""Seconds of the first transfer of a link beside those of its tenth, prefaulted and not.

    python benchmarks/first_transfer.py [--connector NAME] [--preset bagel] [--nixl PYTHON]
                                        [--json FILE]

Beside them, in the same rounds, process_vm_readv's first and, with a Python that has it, NIXL's.

Options are those of `kvlink-bench latency` that say the payload and the link.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from omni_kvlink.bench.commands import add_options, run_setup
from omni_kvlink.bench.pair import TIMEOUT, Pair, open_setup
from omni_kvlink.bench.payloads import make_sample
from omni_kvlink.bench.report import BenchError, row
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.setups import PRESETS, LinkSetup, Shape, option
from omni_kvlink.bench.stats import Timings
from omni_kvlink.cli.arguments import SECONDS, Parser
from omni_kvlink.cli.process import run_guarded
from omni_kvlink.cli.terminal import Progress, progress, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.bench.payloads import Sample
    from omni_kvlink.bench.result import Bars
    from omni_kvlink.bench.stats import Summary

KEY = "bench"
TRANSFERS = 10
KINDS = {"prefault": "prefault= at both ends", "without": "without"}
_SLOT_SPACE = 8 << 20


@dataclasses.dataclass(frozen=True)
class FirstSetup(LinkSetup):
    """`rounds` links of each kind, in turn, and as many first transfers of each peer."""

    presets: ClassVar = tuple(PRESETS)

    shape: Shape = dataclasses.field(kw_only=True)
    rounds: int = option(5, "measurement", "links of each kind")
    wait: float = option(
        2.0, "measurement", "between a link's opening and its first transfer", SECONDS
    )
    nixl: str = ""

    @property
    def peers(self) -> dict[str, str]:
        """The Python of each peer that is measured, by its name."""
        return {"process_vm_readv": sys.executable} | ({"nixl": self.nixl} if self.nixl else {})


def measure(setup: FirstSetup, progress: Progress = progress) -> Result:
    """Open all links one after the other, and send `TRANSFERS` payloads over each.

    The seconds are those from `put` called to the views, of the first and the tenth transfer.
    """
    sample = make_sample(KEY, setup.shape, np.random.default_rng(0))
    seconds = {f"{kind}_{name}": list[float]() for kind in KINDS for name in ("first", "tenth")}
    mapping, quota = dict[str, list[int]](), 2 * setup.shape.nbytes + _SLOT_SPACE
    seconds |= {name: [] for name in setup.peers}
    with progress("links", len(KINDS) * setup.rounds) as step:
        for _ in range(setup.rounds):
            for name, python in setup.peers.items():
                seconds[name].append(_peer(python, name, setup.shape))
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
    return _result(setup, Timings(seconds), mapping)


def _transfer(pair: Pair, sample: Sample) -> float:
    """Send one payload to a reader that waits for it; seconds until the reader has its views."""
    getting = pair.begin("get", key=KEY, verify="auto")
    called = time.monotonic_ns()
    receipt = pair.link.put(sample.cache, timeout=TIMEOUT)
    returned = int(getting.result(TIMEOUT)["returned"])
    receipt.wait(timeout=TIMEOUT)
    return 1e-9 * (returned - called)


def _peer(python: str, name: str, shape: Shape) -> float:
    """Seconds of a peer's first transfer of as many tensors, in processes of its own."""
    count = shape.layers * len(shape.parts)
    program = str(Path(__file__).with_name("first_peers.py"))
    command = [python, program, name, str(count), str(shape.nbytes // count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        raise BenchError(f"{' '.join(command[:3])}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def _mapping(pair: Pair) -> dict[str, int]:
    """Milliseconds in which each end mapped memory ahead."""
    stats = {"producer": pair.link.stats(), "reader": pair.peer.call("stats")}
    milliseconds = dict[str, int]()
    for side, counters in stats.items():
        mapped = counters.get("mapped") or counters.get("memory", {}).get("prefault")
        if mapped:  # an end in the producer's process maps nothing
            milliseconds[side] = mapped["milliseconds"]
    return milliseconds


def _result(setup: FirstSetup, times: Timings, mapping: dict[str, list[int]]) -> Result:
    ratios = {kind: times.ratio_by_round(f"{kind}_first", f"{kind}_tenth") for kind in KINDS}
    rows = [
        row(f"{name} transfer", (summary.p50, summary.min, summary.max), text)
        for kind, text in KINDS.items()
        for name in ("first", "tenth")
        for summary in (times.milliseconds(f"{kind}_{name}"),)
    ]
    rows += [
        row("first transfer", (summary.p50, summary.min, summary.max), name)
        for name in setup.peers
        for summary in (times.milliseconds(name),)
    ]
    beside = {name: times.ratio_by_round("without_first", name) for name in setup.peers}
    before = "in a thread, before the first transfer"
    return Result(
        figures={
            "payload_bytes": setup.shape.nbytes,
            "rounds": setup.rounds,
            "milliseconds": {name: times.milliseconds(name) for name in times},
            "first_over_tenth": ratios,
            "first_over_peer": beside,
            "mapping_ms": mapping,
        },
        head=[
            ("payload", setup.shape.text),
            ("link", f"{setup.connector}, {setup.rounds} links of each kind, in turn"),
            ("wait", f"{setup.wait:g} s between the link's opening and the first transfer"),
        ],
        tables=table(["ms", "p50", "min", "max", "what"], rows),
        lines=[
            *(
                ("first", f"{kind}: {r.p50:.2f} × the tenth ({r.min:.2f} to {r.max:.2f} by link)")
                for kind, r in ratios.items()
            ),
            *(
                ("first", f"without: {r.p50:.2f} × {name}'s ({r.min:.2f} to {r.max:.2f} by round)")
                for name, r in beside.items()
            ),
            *(
                ("mapping", f"{side}: {min(t)} to {max(t)} ms {before}")
                for side, t in mapping.items()
            ),
        ],
        bars=_bars(ratios["prefault"], beside) if setup.shape.nbytes >= 100 << 20 else (),
    )


def _bars(prefaulted: Summary, beside: dict[str, Summary]) -> Bars:
    yield "first / tenth transfer, prefaulted", prefaulted.p50, 1.5
    if "nixl" in beside:
        yield "first transfer without prefault= / NIXL's first", beside["nixl"].p50, 2.0


def run(argv: Sequence[str]) -> int:
    """Run one command line in this process; return the exit status."""
    parser = Parser(prog="first_transfer.py", description=(__doc__ or "").partition("\n")[0])
    add_options(parser, FirstSetup)
    text = "a Python that has NIXL, to measure its first transfer, too"
    parser.add_argument("--nixl", default="", metavar="PYTHON", help=text)
    arguments = parser.parse_args(argv)
    name = "first_transfer"
    return run_guarded(name, lambda: run_setup(name, FirstSetup, measure, arguments))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
