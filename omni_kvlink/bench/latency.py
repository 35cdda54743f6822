"""The latency from `put` until the reader has the views, phase by phase."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from omni_kvlink.bench.baselines import (
    ASLEEP,
    BASELINES,
    RAW_TCP,
    ROUND_TRIP,
    SMALL,
    ZMQ_TCP,
    Baseline,
    BaselineSender,
    baselines_of,
    has_vllm_omni,
)
from omni_kvlink.bench.machine import torch_threads
from omni_kvlink.bench.membench import PlainCopy
from omni_kvlink.bench.pair import TIMEOUT, Pair, open_setup
from omni_kvlink.bench.payloads import make_bundle, make_sample
from omni_kvlink.bench.reader import page_faults
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.result import Bars, Lines, Result
from omni_kvlink.bench.setups import BLOCK, LatencySetup
from omni_kvlink.bench.stats import Summary, Timings
from omni_kvlink.cli.terminal import Progress, progress
from omni_kvlink.memory.mapping import PAGE
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_kvlink.connectors.protocol.transfer import Ledger
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
FRESH = "new payload object made → views in hand"
KEYS_LIMIT, CPU_LIMIT = 1.8, 0.7
"""Bars of a link with keys: total to one raw TCP connection; CPU seconds a gigabyte of a side."""
_Round: TypeAlias = "tuple[dict[str, float], dict[str, int], Ledger, dict[str, float]]"
"""The seconds of a round, the page faults of each side, the ledger, and each side's CPU seconds."""


def measure(setup: LatencySetup, progress: Progress = progress) -> Result:
    """Run all rounds."""
    rng, nbytes = np.random.default_rng(0), setup.shape.nbytes
    sample = make_sample(KEY, setup.shape, rng, sources="paged" if setup.paged else "contiguous")
    data: Payload = make_bundle(sample, setup.branches, rng) if setup.branches else sample.cache
    plain = PlainCopy(nbytes)
    quota = max(4 << 30, 2 * nbytes)
    if setup.keys:
        if setup.connector != "zmq+tcp" or setup.url or setup.connect:
            raise BenchError("--keys is for --connector zmq+tcp, without --url and --connect")
        setup = dataclasses.replace(setup, url="zmq+tcp://127.0.0.1:0")
    with (
        torch_threads(setup.threads),
        open_setup(setup, threads=setup.threads, quota=quota) as pair,
        progress("rounds", setup.warmup + setup.rounds) as step,
    ):
        senders = {
            baseline.name: BaselineSender(baseline, pair.peer, nbytes, pair.host)
            for baseline in _baselines(setup)
        }
        rounds = []
        for _ in range(setup.warmup + setup.rounds):
            rounds.append(_round(pair, data, setup, plain, senders))
            step()
        idle = _idle(pair, setup.idle) if setup.idle else None
        for sender in senders.values():
            sender.close()
    return _result(setup, rounds, plain.text, idle, pair.clock)


def _result(
    setup: LatencySetup,
    rounds: Sequence[_Round],
    plain: str,
    idle: dict[str, float] | None,
    clock: str,
) -> Result:
    nbytes, baselines = setup.shape.nbytes, _baselines(setup)
    cold = rounds[0][0]["total"] if setup.warmup else None
    seconds, pages, ledgers, used = zip(*rounds[setup.warmup :], strict=True)
    times, ledger = Timings.of_rounds(seconds), ledgers[-1]
    cpu = {side: Summary.of([1e9 * each[side] / nbytes for each in used]) for side in used[0]}
    faults = {side: Summary.of([counts[side] for counts in pages]) for side in pages[0]}
    pairs = zip(times["total"], times["copy"], strict=True)
    beyond = Summary.of([1e3 * (total - copy) for total, copy in pairs])
    notes = [*_notes(setup), *([f"the reader is kvlink-bench serve's; {clock}"] if clock else [])]
    figures = {
        "payload_bytes": nbytes,
        "sent_bytes": ledger.nbytes,
        "not_sent_bytes": ledger.reused_nbytes,
        "payload_pages": -(-nbytes // PAGE),
        "copier": ledger.copier,
        "digests": ledger.digests,
        "rounds": setup.rounds,
        "milliseconds": {name: times.milliseconds(name) for name in TIMES},
        "fresh_ms": times.milliseconds("fresh") if "fresh" in times else None,
        "cold_total_ms": None if cold is None else round(1e3 * cold, 6),
        "plain_copy": plain,
        "ratio": round(times.ratio_of("total", "plain_copy"), 4),
        "ratio_by_round": times.ratio_by_round("total", "plain_copy"),
        **_compared(times, baselines),
        "beyond_copy_ms": beyond,
        "gigabytes_per_second": round(1e-6 * nbytes / times.milliseconds("total").p50, 3),
        "minor_faults": faults,
        "cpu_seconds_per_gigabyte": cpu,
        "idle_cpu_percent": idle,
        "notes": notes,
    }
    is_verified = setup.verify == "full"
    shown = {name: TIMES[name] for name in TIMES if name != "verify" or is_verified}
    shown |= {"fresh": FRESH} if "fresh" in times else {}
    head = [*_head(setup, ledger), *(("note", note) for note in notes)]
    bars = _bars(setup, times, figures, baselines)
    return Result(figures, head, times.table(shown), _lines(setup, times, figures, baselines), bars)


def _baselines(setup: LatencySetup) -> tuple[Baseline, ...]:
    """The baselines of a setup; beside a reader of another host those over TCP alone."""
    baselines = baselines_of(setup.connector, setup.shape.nbytes)
    if setup.connect:
        baselines = tuple(one for one in baselines if one in (RAW_TCP, ROUND_TRIP, ZMQ_TCP))
    return baselines


def _compared(times: Timings, baselines: Sequence[Baseline]) -> dict[str, Any]:
    compared = dict[str, Any]()
    for baseline in BASELINES:
        ran, name = baseline in baselines, baseline.name
        compared[f"{name}_ms"] = times.milliseconds(name) if ran else None
        ratio = round(times.ratio_of(baseline.phase, name), 4) if ran else None
        compared[f"{name}_ratio"] = ratio
    return compared


def _head(setup: LatencySetup, ledger: Ledger) -> Lines:
    branches = f", {setup.branches} branches" if setup.branches else ""
    link = (
        f"{setup.connector}, mode {setup.mode}, copier {ledger.copier}, digests "
        f"{ledger.digests}, verify {setup.verify}, sources "
        f"{'paged' if setup.paged else 'contiguous'}{', direct' * setup.direct}, inline up to "
        f"{setup.inline} bytes, torch threads {setup.threads}{', with keys' * setup.keys}"
    )
    return [
        ("payload", f"{setup.shape.text}{branches}"),
        ("link", link),
        ("rounds", f"{setup.rounds} after {setup.warmup} to warm up"),
    ]


def _notes(setup: LatencySetup) -> list[str]:
    """Facts about this setup that its figures cannot be understood without."""
    is_alone = setup.connector == "shm" and setup.shape.nbytes <= SMALL and not has_vllm_omni()
    notes = {
        f"paged: K and V of each layer lie in pools of their own, in blocks of {BLOCK} tokens in "
        "random order; the same blocks in every layer": setup.paged,
        f"busy: just before each put, {OTHERS} payloads of the same layout were put and aborted, "
        "so that the producer's code is in the processor's caches": setup.busy,
        "inproc: both ends are threads of one process": setup.connector == "inproc",
        "vLLM-Omni is not installed: its SharedMemoryConnector is not compared": is_alone,
    }
    return [text for text, is_true in notes.items() if is_true]


def _lines(
    setup: LatencySetup, times: Timings, figures: dict[str, Any], baselines: Sequence[Baseline]
) -> Lines:
    by_round, beyond, faults = (
        figures[name] for name in ("ratio_by_round", "beyond_copy_ms", "minor_faults")
    )
    cold, idle = figures["cold_total_ms"], figures["idle_cpu_percent"]
    ratio = (
        f"total = {figures['ratio']:.2f} × a plain copy (round by round {by_round.min:.2f} to "
        f"{by_round.max:.2f}), copy alone {times.ratio_of('copy', 'plain_copy'):.2f} ×; "
        f"plain copy: {figures['plain_copy']}"
    )
    pages = (
        f"minor page faults a warm round: producer {faults['producer'].p50:.0f}, reader "
        f"{faults['reader'].p50:.0f} (every page touched); the payload has "
        f"{figures['payload_pages']} pages"
    )
    spread = f"({beyond.min:.3f} to {beyond.max:.3f})"
    lines = [("ratio", ratio)]
    for name, text, _, phase in baselines:
        took, factor = times.milliseconds(name), times.ratio_of(phase, name)
        range_text = f"({took.min:.3f} to {took.max:.3f}; p99 {took.p99:.3f})"
        compared = f"{phase} = {factor:.2f} × {text}, which took {took.p50:.3f} ms {range_text}"
        lines.append((name.replace("_", " "), compared))
    cpu = figures["cpu_seconds_per_gigabyte"]
    spent = ", ".join(f"{side} {used.p50:.3f} ({used.max:.3f})" for side, used in cpu.items())
    lines += [
        ("cpu", f"seconds a gigabyte, put to release, median (most): {spent}"),
        ("rate", f"{figures['gigabytes_per_second']:.2f} GB/s to views"),
        ("beyond", f"{beyond.p50:.3f} ms of the total are not the copy {spread}"),
        ("faults", pages),
    ]
    if cold is not None:
        lines.append(("cold", f"first round of all: {cold:.3f} ms"))
    if setup.branches:
        reused = figures["not_sent_bytes"] / 1e6
        lines.append(("bundle", f"{reused:.3f} MB of branches not sent a second time"))
    if idle is not None:
        text = ", ".join(f"{side} {percent:.3f} %" for side, percent in idle.items())
        lines.append(("idle", f"CPU of a core while connected and waiting: {text}"))
    return lines


def _bars(
    setup: LatencySetup, times: Timings, figures: dict[str, Any], baselines: Sequence[Baseline]
) -> Bars:
    nbytes = setup.shape.nbytes
    warm_shm = setup.connector == "shm" and setup.mode == "pooled" and setup.verify != "full"
    is_large = nbytes >= 100 << 20
    if warm_shm and nbytes <= SMALL:
        yield "wake p50, microseconds", 1e3 * times.milliseconds("wake").p50, 300.0
        total, pipe = times.milliseconds("total"), times.milliseconds("pipe_wake")
        label = f"total / a pipe's wake{', busy' * setup.busy}"
        yield f"{label}, p50", total.p50 / pipe.p50, 2.5
        yield f"{label}, p99", total.p99 / pipe.p99, 6.0
    if warm_shm and 1 << 20 <= nbytes <= 16 << 20:
        yield "total beyond the copy p50, ms", figures["beyond_copy_ms"].p50, 0.5
    if warm_shm and is_large and setup.digests:
        label = f"total / plain copy, {figures['copier']} copier{', paged' * setup.paged}"
        yield label, times.ratio_of("total", "plain_copy"), 1.6 if setup.paged else 2.2
    has_bar = (nbytes <= SMALL or is_large) and setup.digests
    if setup.keys and is_large:
        for side, used in figures["cpu_seconds_per_gigabyte"].items():
            yield f"CPU seconds a gigabyte, {side}", used.p50, CPU_LIMIT
    for name, text, limit, phase in baselines if has_bar else ():
        if limit is not None:
            limit = KEYS_LIMIT if setup.keys and is_large else limit
            yield f"{phase} / {text}", times.ratio_of(phase, name), limit
    if setup.idle:
        yield "idle CPU, percent of a core", max(figures["idle_cpu_percent"].values()), 1.0


def _round(
    pair: Pair,
    data: Payload,
    setup: LatencySetup,
    plain: PlainCopy,
    senders: dict[str, BaselineSender],
) -> _Round:
    """One transfer after as many bytes by every baseline."""
    seconds = {"plain_copy": plain.seconds(), "pipe_wake": _pipe_wake(pair)}
    seconds |= {name: sender.seconds() for name, sender in senders.items()}
    if any(baseline.phase == "fresh" for baseline in _baselines(setup)):
        seconds["fresh"] = _fresh(pair, data, setup)
    getting = pair.begin("get", key=KEY, verify=setup.verify)
    if setup.busy:
        _put_others(pair, data)
    faults_before, used = page_faults(own_thread=pair.own_thread), -time.process_time()
    called = time.monotonic_ns()
    receipt = pair.link.put(data, direct=setup.direct, ttl=TTL, timeout=TIMEOUT)
    returned = time.monotonic_ns()
    reader = getting.result(TIMEOUT)
    receipt.wait(timeout=TIMEOUT)
    done = time.monotonic_ns()
    committed = int(1e9 * (receipt.expires - TTL))
    seconds |= _phases(receipt.ledger, called, committed, reader)
    seconds |= {"put": 1e-9 * (returned - called), "release": 1e-9 * (done - reader["dropped"])}
    producer_faults = page_faults(own_thread=pair.own_thread) - faults_before
    spent = {"producer": used + time.process_time(), "reader": 1e-9 * reader["cpu"]}
    if pair.own_thread:
        spent = {"both": spent["producer"]}
    faults = {"producer": producer_faults, "reader": reader["faults"]}
    return seconds, faults, receipt.ledger, spent


def _fresh(pair: Pair, data: Payload, setup: LatencySetup) -> float:
    """Seconds from the making of a new payload object until a reader that slept has its views."""
    getting = pair.begin("get", key=KEY, verify=setup.verify)
    time.sleep(ASLEEP)
    called = time.monotonic_ns()
    if isinstance(data, KVCacheTransferData):
        made: Payload = KVCacheTransferData(KEY, data.layer_blocks, data.block_ids, data.metadata)
    else:
        assert isinstance(data, KVCacheBundle)
        made = KVCacheBundle(KEY, data.branches)
    receipt = pair.link.put(made, direct=setup.direct, ttl=TTL, timeout=TIMEOUT)
    reader = getting.result(TIMEOUT)
    receipt.wait(timeout=TIMEOUT)
    return 1e-9 * float(reader["returned"] - called)


def _put_others(pair: Pair, data: Payload) -> None:
    """Put and abort payloads that nobody waits for, as an engine with many requests does."""
    other = copy.copy(data)
    other.request_id = OTHER
    for _ in range(OTHERS):
        pair.link.put(other, ttl=TTL, timeout=TIMEOUT)
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
