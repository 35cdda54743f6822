"""The latency from `put` until the reader has the views, phase by phase."""

from __future__ import annotations

import copy
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
    has_vllm_omni,
)
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.membench import PlainCopy
from omni_kvlink.bench.pair import Pair, open_setup
from omni_kvlink.bench.payloads import make_bundle, make_sample
from omni_kvlink.bench.reader import page_faults
from omni_kvlink.bench.report import Progress, bar, document, progress, times_table, wrapped
from omni_kvlink.bench.setups import BLOCK, LatencySetup
from omni_kvlink.bench.stats import COLUMNS, Summary, Timings
from omni_kvlink.connectors.protocol.transfer import Ledger
from omni_kvlink.memory.region import PAGE

if TYPE_CHECKING:
    from omni_kvlink.payload.bundle import Payload

KEY, OTHER = "bench", "other"
TTL = 60.0
"""Seconds that each payload may wait for its reader."""
OTHERS = 3
"""Payloads that a busy producer puts just before the one that is measured."""
PHASES = {
    "prepare": "plan, reserve",
    "copy": "gather into the link's memory; direct: digests",
    "publish": "write the header",
    "wake": "commit → the waiting get has it",
    "view": "manifest decoded, tensors made",
    "verify": "digests checked by the reader",
    "total": "put called → views in hand",
}
"""Each phase in words; the phases up to `verify` add up to `total`."""
OTHER_TIMES = {
    "put": "put called → put returned",
    "release": "last view dropped → receipt done",
    "plain_copy": "as many bytes, one thread",
    "pipe_wake": "a pipe wakes the same reader",
}
TIMES = PHASES | OTHER_TIMES


@dataclasses.dataclass(frozen=True)
class LatencyResult(Timings):
    """All rounds of one setup: seconds of each phase, of the other times, and of each baseline.

    `cold` is the total of the first warm-up round, if there was one; `faults` has the minor page
    faults of each side, round by round.
    """

    setup: LatencySetup
    faults: dict[str, list[int]]
    cold: float | None
    ledger: Ledger
    plain: str
    idle: dict[str, float] | None

    @property
    def ratio(self) -> float:
        """Median of the total over the median of the plain copy, of the same rounds."""
        return self.ratio_of("total", "plain_copy")

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """The baselines that were measured."""
        return baselines_of(self.setup.connector, self.setup.shape.nbytes)

    @property
    def beyond_copy(self) -> Summary:
        """Milliseconds of the total that are not the copy."""
        pairs = zip(self.seconds["total"], self.seconds["copy"], strict=True)
        return Summary.of([1e3 * (total - copy) for total, copy in pairs])

    @property
    def rate(self) -> float:
        """Bytes of tensors a second, of the median total."""
        return 1e3 * self.setup.shape.nbytes / self.milliseconds("total").p50

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        compared = dict[str, Any]()
        for baseline in BASELINES:
            ran, name = baseline in self.baselines, baseline.name
            compared[f"{name}_ms"] = self.milliseconds(name).to_dict() if ran else None
            ratio = round(self.ratio_of(baseline.phase, name), 4) if ran else None
            compared[f"{name}_ratio"] = ratio
        return {
            "payload_bytes": self.setup.shape.nbytes,
            "sent_bytes": self.ledger.nbytes,
            "not_sent_bytes": self.ledger.reused_nbytes,
            "payload_pages": -(-self.setup.shape.nbytes // PAGE),
            "copier": self.ledger.copier,
            "digests": self.ledger.digests,
            "rounds": self.setup.rounds,
            "milliseconds": {
                name: self.milliseconds(name).to_dict() for name in PHASES | OTHER_TIMES
            },
            "cold_total_ms": None if self.cold is None else round(1e3 * self.cold, 6),
            "plain_copy": self.plain,
            "ratio": round(self.ratio, 4),
            "ratio_by_round": self.ratio_by_round("total", "plain_copy").to_dict(),
            **compared,
            "beyond_copy_ms": self.beyond_copy.to_dict(),
            "gigabytes_per_second": round(self.rate / 1e9, 3),
            "minor_faults": {side: Summary.of(n).to_dict() for side, n in self.faults.items()},
            "idle_cpu_percent": self.idle,
            "bars": self.bars(),
            "notes": _notes(self.setup),
        }

    def bars(self) -> list[dict[str, Any]]:
        """The bars of this setup, and whether they are met; empty for a setup without one."""
        setup, nbytes, bars = self.setup, self.setup.shape.nbytes, list[dict[str, Any]]()
        warm_shm = setup.connector == "shm" and setup.mode == "pooled" and setup.verify != "full"
        is_large = nbytes >= 100 << 20
        if warm_shm and nbytes <= SMALL:
            bars.append(bar("wake p50, microseconds", 1e3 * self.milliseconds("wake").p50, 300.0))
            total, pipe = self.milliseconds("total"), self.milliseconds("pipe_wake")
            label = f"total / a pipe's wake{', busy' * setup.busy}"
            bars.append(bar(f"{label}, p50", total.p50 / pipe.p50, 2.5))
            bars.append(bar(f"{label}, p99", total.p99 / pipe.p99, 6.0))
        if warm_shm and 1 << 20 <= nbytes <= 16 << 20:
            bars.append(bar("total beyond the copy p50, ms", self.beyond_copy.p50, 0.5))
        if warm_shm and is_large and setup.digests:
            label = f"total / plain copy, {self.ledger.copier} copier{', paged' * setup.paged}"
            bars.append(bar(label, self.ratio, 1.6 if setup.paged else 2.2))
        has_bar = (nbytes <= SMALL or is_large) and setup.digests
        for name, text, limit, phase in self.baselines if has_bar else ():
            if limit is not None:
                bars.append(bar(f"{phase} / {text}", self.ratio_of(phase, name), limit))
        if self.idle:
            bars.append(bar("idle CPU, percent of a core", max(self.idle.values()), 1.0))
        return bars

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        is_verified = self.setup.verify == "full"
        texts = {name: TIMES[name] for name in TIMES if name != "verify" or is_verified}
        times = times_table(self, texts, *COLUMNS)
        return document(_setup_lines(self), times, _result_lines(self), self.bars())


def measure(setup: LatencySetup, progress: Progress = progress) -> LatencyResult:
    """Run all rounds."""
    rng, nbytes = np.random.default_rng(0), setup.shape.nbytes
    sample = make_sample(KEY, setup.shape, rng, sources="paged" if setup.paged else "contiguous")
    data: Payload = make_bundle(sample, setup.branches, rng) if setup.branches else sample.cache
    plain = PlainCopy(nbytes)
    quota = max(4 << 30, 2 * nbytes)
    with (
        torch_threads(setup.threads),
        open_setup(setup, threads=setup.threads, quota=quota) as pair,
        progress("rounds", setup.warmup + setup.rounds) as step,
    ):
        senders = {
            baseline.name: BaselineSender(baseline, pair.peer, nbytes)
            for baseline in baselines_of(setup.connector, nbytes)
        }
        rounds, ledgers = list[dict[str, float]](), list[Ledger]()
        faults: dict[str, list[int]] = {"producer": [], "reader": []}
        for _ in range(setup.warmup + setup.rounds):
            timings, pages, ledger = _round(pair, data, setup, plain, senders)
            rounds.append(timings)
            ledgers.append(ledger)
            for side, count in pages.items():
                faults[side].append(count)
            step()
        idle = _idle(pair, setup.idle) if setup.idle else None
        for sender in senders.values():
            sender.close()
    cold = rounds[0]["total"] if setup.warmup else None
    seconds = {name: [timings[name] for timings in rounds[setup.warmup :]] for name in rounds[0]}
    faults = {side: counts[setup.warmup :] for side, counts in faults.items()}
    return LatencyResult(seconds, setup, faults, cold, ledgers[-1], plain.text, idle)


def _round(
    pair: Pair,
    data: Payload,
    setup: LatencySetup,
    plain: PlainCopy,
    senders: dict[str, BaselineSender],
) -> tuple[dict[str, float], dict[str, int], Ledger]:
    """One transfer after as many bytes by every baseline: seconds, page faults, and the ledger."""
    seconds = {"plain_copy": plain.seconds(), "pipe_wake": _pipe_wake(pair)}
    seconds |= {name: sender.seconds() for name, sender in senders.items()}
    getting = pair.peer.submit("get", key=KEY, timeout=60.0, verify=setup.verify)
    pair.wait_until_requested()
    if setup.busy:
        _put_others(pair, data)
    faults_before = page_faults(own_thread=pair.own_thread)
    called = time.monotonic_ns()
    receipt = pair.link.put(data, direct=setup.direct, ttl=TTL, timeout=60.0)
    returned = time.monotonic_ns()
    reader = getting.result(60.0)
    receipt.wait(timeout=60.0)
    done = time.monotonic_ns()
    committed = int(1e9 * (receipt.expires - TTL))
    seconds |= _phases(receipt.ledger, called, committed, reader)
    seconds |= {"put": 1e-9 * (returned - called), "release": 1e-9 * (done - reader["dropped"])}
    producer_faults = page_faults(own_thread=pair.own_thread) - faults_before
    return seconds, {"producer": producer_faults, "reader": reader["faults"]}, receipt.ledger


def _put_others(pair: Pair, data: Payload) -> None:
    """Put and abort payloads that nobody waits for, as an engine with many requests does."""
    other = copy.copy(data)
    other.request_id = OTHER
    for _ in range(OTHERS):
        pair.link.put(other, ttl=TTL, timeout=60.0)
        pair.link.abort(OTHER)


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
    cpu_before = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - cpu_before
    reader = idling.result(seconds + 10)
    percent = {"producer": 100 * used / seconds, "reader": 100 * reader / seconds}
    if pair.own_thread:
        percent = {"both": 100 * used / seconds}
    return {side: round(value, 4) for side, value in percent.items()}


def _notes(setup: LatencySetup) -> list[str]:
    """Facts about this setup that its figures cannot be understood without."""
    lines = []
    if setup.paged:
        lines.append(
            f"paged: K and V of each layer lie in pools of their own, in blocks of {BLOCK} "
            "tokens in random order; the same blocks in every layer"
        )
    if setup.busy:
        lines.append(
            f"busy: just before each put, {OTHERS} payloads of the same layout were put and "
            "aborted, so that the producer's code is in the processor's caches"
        )
    if setup.connector == "inproc":
        lines.append("inproc: both ends are threads of one process")
    if setup.connector == "shm" and setup.shape.nbytes <= SMALL and not has_vllm_omni():
        lines.append("vLLM-Omni is not installed: its SharedMemoryConnector is not compared")
    return lines


def _setup_lines(result: LatencyResult) -> list[str]:
    setup, ledger = result.setup, result.ledger
    branches = f", {setup.branches} branches" if setup.branches else ""
    link = (
        f"{setup.connector}, mode {setup.mode}, copier {ledger.copier}, digests {ledger.digests}, "
        f"verify {setup.verify}, sources {'paged' if setup.paged else 'contiguous'}"
        f"{', direct' * setup.direct}, inline up to {setup.inline} bytes, "
        f"torch threads {setup.threads}"
    )
    return [
        wrapped("payload", f"{setup.shape.text}{branches}"),
        wrapped("link", link),
        wrapped("rounds", f"{setup.rounds} after {setup.warmup} to warm up"),
        *(wrapped("note", note) for note in _notes(setup)),
    ]


def _result_lines(result: LatencyResult) -> list[str]:
    by_round, beyond = result.ratio_by_round("total", "plain_copy"), result.beyond_copy
    faults = {side: Summary.of(counts).p50 for side, counts in result.faults.items()}
    ratio = (
        f"total = {result.ratio:.2f} × a plain copy (round by round {by_round.min:.2f} to "
        f"{by_round.max:.2f}), copy alone {result.ratio_of('copy', 'plain_copy'):.2f} ×; "
        f"plain copy: {result.plain}"
    )
    pages = (
        f"minor page faults a warm round: producer {faults['producer']:.0f}, reader "
        f"{faults['reader']:.0f} (every page touched); the payload has "
        f"{-(-result.setup.shape.nbytes // PAGE)} pages"
    )
    remainder = f"{beyond.p50:.3f} ms of the total are not the copy"
    lines = [wrapped("ratio", ratio)]
    for baseline in result.baselines:
        summary = result.milliseconds(baseline.name)
        times = result.ratio_of(baseline.phase, baseline.name)
        text = f"{baseline.phase} = {times:.2f} × {baseline.text}, which took {summary.p50:.3f} ms"
        name = baseline.name.replace("_", " ")
        text += f" ({summary.min:.3f} to {summary.max:.3f}; p99 {summary.p99:.3f})"
        lines.append(wrapped(name, text))
    lines += [
        wrapped("rate", f"{result.rate / 1e9:.2f} GB/s to views"),
        wrapped("beyond", f"{remainder} ({beyond.min:.3f} to {beyond.max:.3f})"),
        wrapped("faults", pages),
    ]
    if result.cold is not None:
        lines.append(wrapped("cold", f"first round of all: {1e3 * result.cold:.3f} ms"))
    if result.setup.branches:
        reused = result.ledger.reused_nbytes / 1e6
        lines.append(wrapped("bundle", f"{reused:.3f} MB of branches not sent a second time"))
    if result.idle is not None:
        text = ", ".join(f"{side} {percent:.3f} %" for side, percent in result.idle.items())
        lines.append(wrapped("idle", f"CPU of a core while connected and waiting: {text}"))
    return lines
