"""How long a put takes until the other side holds the views, phase by phase."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from omni_kvlink.bench.baselines import SMALL, YARDSTICKS, Bare, Baseline, open_bare, yardsticks_of
from omni_kvlink.bench.pair import Pair, open_pair
from omni_kvlink.bench.payloads import BLOCK, Shape, Sources, make_bundle, make_sample
from omni_kvlink.bench.peer import Message, faults
from omni_kvlink.bench.plain import PlainCopy
from omni_kvlink.bench.stats import Summary
from omni_kvlink.bench.threads import torch_threads
from omni_kvlink.bench.timestamps import Timestamps
from omni_kvlink.connectors.base import Receipt
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.link import Payload
from omni_kvlink.memory.region import PAGE

KEY = "bench"
PHASES = ("prepare", "copy", "publish", "wake", "view", "verify", "total")
BESIDE = ("put", "release", "plain_copy", "pipe_wake")


@dataclasses.dataclass(frozen=True)
class Setup:
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
class Round:
    """One transfer. Times in seconds; the phases up to `verify` add up to `total`."""

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
    bare: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """All rounds of one setup; `cold` is the first warm-up round, if there was one."""

    setup: Setup
    rounds: list[Round]
    cold: Round | None
    ledger: Ledger
    plain: str
    idle: dict[str, float] | None

    @property
    def ratio(self) -> float:
        """Median of the whole trip over the median of the plain copy, of the same rounds."""
        return self.milliseconds("total").p50 / self.milliseconds("plain_copy").p50

    @property
    def ratio_by_round(self) -> Summary:
        return Summary.of([round.total / round.plain_copy for round in self.rounds])

    @property
    def yardsticks(self) -> tuple[Baseline, ...]:
        return yardsticks_of(self.setup.connector, self.setup.shape.nbytes)

    def bare(self, yardstick: Baseline) -> Summary:
        """Milliseconds that a yardstick took."""
        return Summary.of([1e3 * round.bare[yardstick.name] for round in self.rounds])

    def bare_ratio(self, yardstick: Baseline) -> float:
        """Median of the trip, or of its waking, over that of a yardstick."""
        return self.milliseconds(yardstick.phase).p50 / self.bare(yardstick).p50

    @property
    def beyond_copy(self) -> Summary:
        """Milliseconds of a trip that are not the copy."""
        return Summary.of([1e3 * (round.total - round.copy) for round in self.rounds])

    @property
    def rate(self) -> float:
        """Bytes of tensors a second, of the median trip."""
        return 1e3 * self.setup.shape.nbytes / self.milliseconds("total").p50

    def milliseconds(self, name: str) -> Summary:
        return Summary.of([1e3 * float(getattr(round, name)) for round in self.rounds])

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        names = (*PHASES, *BESIDE)
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
            **{key: value for one in YARDSTICKS for key, value in self._beside(one).items()},
            "beyond_copy_ms": self.beyond_copy.to_dict(),
            "gigabytes_per_second": round(self.rate / 1e9, 3),
            "minor_faults": {
                side: Summary.of([getattr(r, f"{side}_faults") for r in self.rounds]).to_dict()
                for side in ("producer", "reader")
            },
            "idle_cpu_percent": self.idle,
        }

    def _beside(self, yardstick: Baseline) -> dict[str, Any]:
        ran, name = yardstick in self.yardsticks, yardstick.name
        return {
            f"{name}_ms": self.bare(yardstick).to_dict() if ran else None,
            f"{name}_ratio": round(self.bare_ratio(yardstick), 4) if ran else None,
        }


def measure(setup: Setup, step: Callable[[], None] = lambda: None) -> Result:
    """Run all rounds; `step` is called after each."""
    with torch_threads(setup.threads):
        return _measure(setup, step)


def _measure(setup: Setup, step: Callable[[], None]) -> Result:
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
        bares = {
            yardstick.name: open_bare(yardstick, pair.peer, nbytes)
            for yardstick in yardsticks_of(setup.connector, nbytes)
        }
        rounds = list[Round]()
        for _ in range(setup.warmup + setup.rounds):
            one, receipt = _round(pair, data, setup, plain, bares)
            rounds.append(one)
            step()
        idle = _idle(pair, setup.idle) if setup.idle else None
        for bare in bares.values():
            bare.close()
    cold = rounds[0] if setup.warmup else None
    return Result(setup, rounds[setup.warmup :], cold, receipt.ledger, plain.name, idle)


def _round(
    pair: Pair, data: Payload, setup: Setup, plain: PlainCopy, bares: dict[str, Bare]
) -> tuple[Round, Receipt]:
    plain_copy, pipe_wake = plain.seconds(), _pipe_wake(pair)
    bare_seconds = {name: bare.seconds() for name, bare in bares.items()}
    pair.peer.tell(do="get", key=KEY, timeout=60.0, verify=setup.verify)
    pair.await_reader()
    before = faults(own_thread=pair.own_thread)
    with Timestamps() as marks:
        called = time.monotonic_ns()
        receipt = pair.link.put(data, direct=setup.direct, timeout=60.0)
        returned = time.monotonic_ns()
    reader = pair.peer.answer(timeout=60.0)
    receipt.wait(timeout=60.0)
    settled = time.monotonic_ns()
    times = _phases(receipt.ledger, called, marks.at["put.encoded"], reader)
    return (
        Round(
            **times,
            put=1e-9 * (returned - called),
            release=1e-9 * (settled - reader["dropped"]),
            plain_copy=plain_copy,
            pipe_wake=pipe_wake,
            producer_faults=faults(own_thread=pair.own_thread) - before,
            reader_faults=reader["faults"],
            bare=bare_seconds,
        ),
        receipt,
    )


def _phases(ledger: Ledger, called: int, committed: int, reader: Message) -> dict[str, float]:
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
    pair.settle()
    told = time.monotonic_ns()
    answer = pair.peer.ask(do="ping")
    return 1e-9 * (int(answer["received"]) - told)


def _idle(pair: Pair, seconds: float) -> dict[str, float]:
    """CPU of a connected pair whose reader waits for a payload that does not come, in percent."""
    pair.peer.tell(do="idle", key="never", seconds=seconds)
    before = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - before
    reader = pair.peer.answer(timeout=seconds + 10)["cpu"]
    percent = {"producer": 100 * used / seconds, "reader": 100 * reader / seconds}
    if pair.own_thread:
        percent = {"both": 100 * used / seconds}
    return {side: round(value, 4) for side, value in percent.items()}


def bars(result: Result) -> list[dict[str, Any]]:
    """What this setup is held to, where it is one that has a bar."""
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
    for yardstick in result.yardsticks if has_bar and setup.digests else ():
        if yardstick.limit is not None:
            label = f"{yardstick.phase} / {yardstick.text}"
            found.append((label, result.bare_ratio(yardstick), yardstick.limit))
    if result.idle:
        found.append(("idle CPU, percent of a core", max(result.idle.values()), 1.0))
    return [
        {"bar": bar, "got": round(got, 4), "limit": limit, "met": got <= limit}
        for bar, got, limit in found
    ]


def notes(setup: Setup) -> Sequence[str]:
    """What a reader of the figures must know about this setup."""
    said = []
    if setup.paged:
        said.append(
            f"paged: K and V of each layer lie in pools of their own, in blocks of {BLOCK} tokens "
            "in random order; the same blocks in every layer"
        )
    if setup.connector == "inproc":
        said.append("inproc: both ends are threads of one process")
    return said
