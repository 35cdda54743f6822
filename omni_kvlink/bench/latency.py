"""How long it takes from `put` until the reader has the views, phase by phase."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_kvlink.bench.baselines import (
    BASELINES,
    SMALL,
    Baseline,
    BaselineSender,
    baselines_of,
    open_baseline,
)
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.pair import Pair, open_pair
from omni_kvlink.bench.payloads import BLOCK, Shape, Sources, make_bundle, make_sample
from omni_kvlink.bench.plain import PlainCopy
from omni_kvlink.bench.reader import page_faults
from omni_kvlink.bench.report import bar, bar_line, table, wrapped
from omni_kvlink.bench.stats import Summary
from omni_kvlink.connectors.protocol.transfer_table import Ledger
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.memory.region import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.transfer_table import Receipt
    from omni_kvlink.payload.bundle import Payload

KEY = "bench"
PHASES = ("prepare", "copy", "publish", "wake", "view", "verify", "total")
OTHER_TIMES = ("put", "release", "plain_copy", "pipe_wake")
_MEANING = {
    "prepare": "plan, reserve",
    "copy": "gather into the link's memory; direct: digests",
    "publish": "write the header",
    "wake": "commit → the waiting get has it",
    "view": "manifest decoded, tensors made",
    "verify": "digests checked by the reader",
    "total": "put called → views in hand",
    "put": "put called → put returned",
    "release": "last view dropped → receipt done",
    "plain_copy": "as many bytes, one thread",
    "pipe_wake": "a pipe wakes the same reader",
}


@dataclasses.dataclass(frozen=True)
class LatencySetup:
    """What to measure, and how."""

    connector: str
    shape: Shape
    url: str = ""
    paged: bool = False
    branches: int = 0
    rounds: int = 20
    warmup: int = 3
    mode: str = "pooled"
    digests: bool = True
    copier: str = "auto"
    verify: str = "auto"
    threads: int = 1
    idle: float = 0.0
    direct: bool = False


@dataclasses.dataclass(frozen=True)
class LatencyRound:
    """One transfer. Times are seconds; the phases up to `verify` add up to `total`."""

    prepare: float
    copy: float
    publish: float
    wake: float
    view: float
    verify: float
    total: float
    put: float
    release: float
    plain_copy: float
    pipe_wake: float
    producer_faults: int
    reader_faults: int
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LatencyResult:
    """All rounds of one setup; `cold` is the first warm-up round, if there was one."""

    setup: LatencySetup
    rounds: list[LatencyRound]
    cold: LatencyRound | None
    ledger: Ledger
    plain: str
    idle: dict[str, float] | None

    @property
    def ratio(self) -> float:
        """Median of the total over the median of the plain copy, of the same rounds."""
        return self.milliseconds("total").p50 / self.milliseconds("plain_copy").p50

    @property
    def ratio_by_round(self) -> Summary:
        """The total over the plain copy, round by round."""
        return Summary.of([round.total / round.plain_copy for round in self.rounds])

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """The baselines that were measured."""
        return baselines_of(self.setup.connector, self.setup.shape.nbytes)

    def baseline(self, baseline: Baseline) -> Summary:
        """Milliseconds that a baseline took."""
        return Summary.of([1e3 * round.baselines[baseline.name] for round in self.rounds])

    def baseline_ratio(self, baseline: Baseline) -> float:
        """Median of the baseline's phase over the median of the baseline."""
        return self.milliseconds(baseline.phase).p50 / self.baseline(baseline).p50

    @property
    def beyond_copy(self) -> Summary:
        """Milliseconds of the total that are not the copy."""
        return Summary.of([1e3 * (round.total - round.copy) for round in self.rounds])

    @property
    def rate(self) -> float:
        """Bytes of tensors a second, of the median total."""
        return 1e3 * self.setup.shape.nbytes / self.milliseconds("total").p50

    def milliseconds(self, name: str) -> Summary:
        """Milliseconds of one phase, or of one of the other times."""
        return Summary.of([1e3 * float(getattr(round, name)) for round in self.rounds])

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        names = (*PHASES, *OTHER_TIMES)
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "sent_bytes": self.ledger.nbytes,
            "not_sent_bytes": self.ledger.reused_nbytes,
            "payload_pages": -(-self.setup.shape.nbytes // PAGE),
            "copier": self.ledger.copier,
            "digests": self.ledger.digests,
            "rounds": len(self.rounds),
            "milliseconds": {name: self.milliseconds(name).to_dict() for name in names},
            "cold_total_ms": None if self.cold is None else round(1e3 * self.cold.total, 6),
            "plain_copy": self.plain,
            "ratio": round(self.ratio, 4),
            "ratio_by_round": self.ratio_by_round.to_dict(),
            **{key: value for one in BASELINES for key, value in self._comparison(one).items()},
            "beyond_copy_ms": self.beyond_copy.to_dict(),
            "gigabytes_per_second": round(self.rate / 1e9, 3),
            "minor_faults": {
                side: Summary.of([getattr(r, f"{side}_faults") for r in self.rounds]).to_dict()
                for side in ("producer", "reader")
            },
            "idle_cpu_percent": self.idle,
        }

    def text(self) -> str:
        """Everything that was measured, at most 96 columns wide."""
        is_checked = self.setup.verify == "full"
        names = [name for name in (*PHASES, *OTHER_TIMES) if name != "verify" or is_checked]
        head = ["ms", "p50", "p90", "p99", "min", "max", "what"]
        rows = [_row(name, self.milliseconds(name)) for name in names]
        lines = ("\n".join(_setup_lines(self)), table(head, rows), "\n".join(_result_lines(self)))
        return "\n\n".join(lines)

    def _comparison(self, baseline: Baseline) -> dict[str, Any]:
        ran, name = baseline in self.baselines, baseline.name
        return {
            f"{name}_ms": self.baseline(baseline).to_dict() if ran else None,
            f"{name}_ratio": round(self.baseline_ratio(baseline), 4) if ran else None,
        }


class Timestamps:
    """Records when a `put` passed the library's fault points, within the `with` block.

    `at[name]` is the monotonic nanosecond at which a point was last passed. The moment of the
    commit is inside `put`, so it cannot be timed around a call.
    """

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self._point = fault_points.point

    def __enter__(self) -> Timestamps:
        self._point = fault_points.point
        fault_points.point = self._record
        fault_points.enabled = True
        return self

    def __exit__(self, *exception: object) -> None:
        fault_points.point = self._point
        fault_points.enabled = True

    def _record(self, name: str) -> None:
        self.at[name] = time.monotonic_ns()
        self._point(name)


def measure(setup: LatencySetup, step: Callable[[], None] = lambda: None) -> LatencyResult:
    """Run all rounds; `step` is called after each."""
    with torch_threads(setup.threads):
        return _measure(setup, step)


def _measure(setup: LatencySetup, step: Callable[[], None]) -> LatencyResult:
    rng = np.random.default_rng(0)
    sources: Sources = "paged" if setup.paged else "contiguous"
    sample = make_sample(KEY, setup.shape, rng, sources=sources)
    data: Payload = sample.cache
    if setup.branches:
        data = make_bundle(sample, setup.branches, rng)
    plain = PlainCopy(setup.shape.nbytes)
    quota = max(4 << 30, 2 * setup.shape.nbytes)
    with open_pair(
        setup.connector,
        url=setup.url,
        threads=setup.threads,
        copier=setup.copier,
        digests=setup.digests,
        mode=setup.mode,
        quota=quota,
    ) as pair:
        nbytes = setup.shape.nbytes
        senders = {
            baseline.name: open_baseline(baseline, pair.peer, nbytes)
            for baseline in baselines_of(setup.connector, nbytes)
        }
        rounds = list[LatencyRound]()
        for _ in range(setup.warmup + setup.rounds):
            one, receipt = _round(pair, data, setup, plain, senders)
            rounds.append(one)
            step()
        idle = _idle(pair, setup.idle) if setup.idle else None
        for sender in senders.values():
            sender.close()
    cold = rounds[0] if setup.warmup else None
    return LatencyResult(setup, rounds[setup.warmup :], cold, receipt.ledger, plain.name, idle)


def _round(
    pair: Pair,
    data: Payload,
    setup: LatencySetup,
    plain: PlainCopy,
    senders: dict[str, BaselineSender],
) -> tuple[LatencyRound, Receipt]:
    plain_copy, pipe_wake = plain.seconds(), _pipe_wake(pair)
    baselines = {name: sender.seconds() for name, sender in senders.items()}
    getting = pair.peer.submit("get", key=KEY, timeout=60.0, verify=setup.verify)
    pair.wait_until_requested()
    before = page_faults(own_thread=pair.own_thread)
    with Timestamps() as timestamps:
        called = time.monotonic_ns()
        receipt = pair.link.put(data, direct=setup.direct, timeout=60.0)
        returned = time.monotonic_ns()
    reader = getting.result(60.0)
    receipt.wait(timeout=60.0)
    done = time.monotonic_ns()
    times = _phases(receipt.ledger, called, timestamps.at["put.encoded"], reader)
    return (
        LatencyRound(
            **times,
            put=1e-9 * (returned - called),
            release=1e-9 * (done - reader["dropped"]),
            plain_copy=plain_copy,
            pipe_wake=pipe_wake,
            producer_faults=page_faults(own_thread=pair.own_thread) - before,
            reader_faults=reader["faults"],
            baselines=baselines,
        ),
        receipt,
    )


def _phases(
    ledger: Ledger, called: int, committed: int, reader: dict[str, int]
) -> dict[str, float]:
    prepare = ledger.seconds["plan"] + ledger.seconds["reserve"]
    copy = ledger.seconds["digest" if "digest" in ledger.seconds else "copy"]
    view, verify = 1e-9 * reader["view"], 1e-9 * reader["verify"]
    return {
        "prepare": prepare,
        "copy": copy,
        "publish": 1e-9 * (committed - called) - prepare - copy,
        "wake": 1e-9 * (reader["returned"] - committed) - view - verify,
        "view": view,
        "verify": verify,
        "total": 1e-9 * (reader["returned"] - called),
    }


def _pipe_wake(pair: Pair) -> float:
    """Seconds until a reader that sleeps on its plain pipe (or queue) runs: the floor of a wake."""
    pair.wait_until_asleep()
    sent = time.monotonic_ns()
    return 1e-9 * (int(pair.peer.call("ping")) - sent)


def _idle(pair: Pair, seconds: float) -> dict[str, float]:
    """CPU of a connected pair whose reader waits for a payload that does not come, in percent."""
    idling = pair.peer.submit("idle", key="never", seconds=seconds)
    before = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - before
    reader = idling.result(seconds + 10)
    percent = {"producer": 100 * used / seconds, "reader": 100 * reader / seconds}
    if pair.own_thread:
        percent = {"both": 100 * used / seconds}
    return {side: round(value, 4) for side, value in percent.items()}


def bars(result: LatencyResult) -> list[dict[str, Any]]:
    """The bars of this setup, and whether they are met; empty for a setup without one."""
    setup, shape, found = result.setup, result.setup.shape, list[tuple[str, float, float]]()
    warm_shm = setup.connector == "shm" and setup.mode == "pooled" and setup.verify != "full"
    if warm_shm and shape.nbytes <= SMALL:
        found.append(("wake p50, microseconds", 1e3 * result.milliseconds("wake").p50, 300.0))
    if warm_shm and 1 << 20 <= shape.nbytes <= 16 << 20:
        found.append(("total beyond the copy p50, ms", result.beyond_copy.p50, 0.5))
    if warm_shm and shape.nbytes >= 100 << 20 and setup.digests:
        label = f"total / plain copy, {result.ledger.copier} copier"
        limit = (label, result.ratio, 2.2)
        if setup.paged:
            limit = (f"{label}, paged", result.ratio, 1.6)
        found.append(limit)
    has_bar = shape.nbytes <= SMALL or shape.nbytes >= 100 << 20
    for baseline in result.baselines if has_bar and setup.digests else ():
        if baseline.limit is not None:
            label = f"{baseline.phase} / {baseline.text}"
            found.append((label, result.baseline_ratio(baseline), baseline.limit))
    if result.idle:
        found.append(("idle CPU, percent of a core", max(result.idle.values()), 1.0))
    return [bar(*one) for one in found]


def notes(setup: LatencySetup) -> list[str]:
    """What must be known about this setup to understand its figures."""
    lines = []
    if setup.paged:
        lines.append(
            f"paged: K and V of each layer lie in pools of their own, in blocks of {BLOCK} tokens "
            "in random order; the same blocks in every layer"
        )
    if setup.connector == "inproc":
        lines.append("inproc: both ends are threads of one process")
    return lines


def _setup_lines(result: LatencyResult) -> list[str]:
    setup = result.setup
    branches = f", {setup.branches} branches" if setup.branches else ""
    lines = [
        wrapped("payload", f"{setup.shape} = {setup.shape.nbytes / 1e6:.3f} MB{branches}"),
        wrapped(
            "link",
            f"{setup.connector}, mode {setup.mode}, copier {result.ledger.copier}, "
            f"digests {result.ledger.digests}, verify {setup.verify}, "
            f"sources {'paged' if setup.paged else 'contiguous'}{', direct' * setup.direct}, "
            f"torch threads {setup.threads}",
        ),
        wrapped("rounds", f"{len(result.rounds)} after {setup.warmup} to warm up"),
    ]
    return lines + [wrapped("note", note) for note in notes(setup)]


def _row(name: str, summary: Summary) -> list[str]:
    values = (summary.p50, summary.p90, summary.p99, summary.min, summary.max)
    return [name.replace("_", " "), *(f"{value:.3f}" for value in values), _MEANING[name]]


def _baseline_lines(result: LatencyResult) -> list[str]:
    lines = []
    for baseline in result.baselines:
        summary, ratio = result.baseline(baseline), result.baseline_ratio(baseline)
        text = f"{baseline.phase} = {ratio:.2f} × {baseline.text}, which took {summary.p50:.3f} ms"
        name = baseline.name.replace("_", " ")
        lines.append(wrapped(name, f"{text} ({summary.min:.3f} to {summary.max:.3f})"))
    return lines


def _result_lines(result: LatencyResult) -> list[str]:
    by_round, faults = result.ratio_by_round, result.to_dict()["minor_faults"]
    pages = -(-result.setup.shape.nbytes // 4096)
    copy = result.milliseconds("copy").p50 / result.milliseconds("plain_copy").p50
    beyond = result.beyond_copy
    lines = [
        wrapped(
            "ratio",
            f"total = {result.ratio:.2f} × a plain copy (round by round {by_round.min:.2f} to "
            f"{by_round.max:.2f}), copy alone {copy:.2f} ×; plain copy: {result.plain}",
        ),
        *_baseline_lines(result),
        wrapped("rate", f"{result.rate / 1e9:.2f} GB/s to views"),
        wrapped(
            "beyond",
            f"{beyond.p50:.3f} ms of the total are not the copy ({beyond.min:.3f} to "
            f"{beyond.max:.3f})",
        ),
        wrapped(
            "faults",
            f"minor page faults a warm round: producer {faults['producer']['p50']:.0f}, reader "
            f"{faults['reader']['p50']:.0f} (every page touched); the payload has {pages} pages",
        ),
    ]
    if result.cold is not None:
        lines.append(wrapped("cold", f"first round of all: {1e3 * result.cold.total:.3f} ms"))
    if result.setup.branches:
        reused = result.ledger.reused_nbytes / 1e6
        lines.append(wrapped("bundle", f"{reused:.3f} MB of branches not sent a second time"))
    if result.idle is not None:
        text = ", ".join(f"{side} {percent:.3f} %" for side, percent in result.idle.items())
        lines.append(wrapped("idle", f"CPU of a core while connected and waiting: {text}"))
    return lines + [bar_line(one) for one in bars(result)]
