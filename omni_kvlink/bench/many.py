"""The rate at which a link transfers small payloads, singly and in batches, beside a pipe."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from omni_kvlink.bench.chunks import ChunkBytes, Pipe
from omni_kvlink.bench.machine import load_line
from omni_kvlink.bench.pair import Pair, open_pipe, open_setup
from omni_kvlink.bench.pipelined import put_batch, put_run
from omni_kvlink.bench.put_times import NUM_TENSORS, PutTimes, measure_puts
from omni_kvlink.bench.reader import freeze_gc
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.setups import ManySetup, Paced
from omni_kvlink.bench.stats import Run, Runs, Summary
from omni_kvlink.cli.terminal import Progress, progress, table
from omni_kvlink.connectors.base import Options

if TYPE_CHECKING:
    import torch

    from omni_kvlink.bench.result import Bars

KINDS = ("pipe", "single", "batched", "few_live", "many_live")
RATIOS = (
    ("single", "pipe"),
    ("batched", "pipe"),
    ("batched", "single"),
    ("many_live", "few_live"),
)
FEW = 10
"""Live payloads beside those that are transferred, to compare with `ManySetup.live`."""
_LIVE_BATCH = 250
_SLOT_SPACE = 8 << 10
"""Bytes of memory that a small payload takes besides its tensors, at most."""
_TIMEOUT = 120.0
_CACHE_TEXT = f"KVCacheTransferData of {NUM_TENSORS} tensors of 512 bytes, new each time"


def _paced(setup: ManySetup) -> Paced:
    """The payloads of all runs; a run is a stream, and so are those that are live meanwhile."""
    runs = (setup.rounds + 1) * 2 * len(KINDS)
    return Paced(runs, setup.transfers, tokens=1, hidden=setup.bytes // 2)


def _quota(setup: ManySetup) -> int:
    """Bytes of memory for all that is live at once."""
    payloads = setup.live + setup.outstanding + 2 * setup.batch
    return max(Options.quota, 2 * payloads * (setup.bytes + _SLOT_SPACE))


def measure(setup: ManySetup, progress: Progress = progress) -> Result:
    """Run all rounds, every second one in reverse, after one run of each kind to warm up."""
    with (
        open_setup(setup, quota=_quota(setup)) as pair,
        open_pipe(pair) as pipe,
        progress("runs", len(KINDS) * setup.rounds) as step,
    ):
        sender = ManySender(pair, setup, pipe)
        warm = [sender.run(kind) for kind in ("pipe", "single", "batched")]
        puts = sender.measure_puts()  # before `freeze_gc`: collections count
        pair.peer.call("freeze_gc")
        freeze_gc()
        runs = list[Run]()
        for number in range(setup.rounds):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                sender.keep_live({"few_live": FEW, "many_live": setup.live}.get(kind, 0))
                runs.append(sender.run(kind))
                step()
        sender.keep_live(0)
        wrong = sender.wrong_beside + sum(run.wrong for run in warm)
        found = Runs(runs, one_process=pair.own_thread)
        return result_of(setup, found, puts, sender.copier, wrong)


class ManySender:
    """The producer of all runs.

    `wrong_beside` counts the wrong ones among the payloads that `keep_live` put.
    """

    def __init__(self, pair: Pair, setup: ManySetup, pipe: Pipe):
        self._pair, self._setup, self._pipe = pair, setup, pipe
        self._data = ChunkBytes(_paced(setup))
        pair.peer.call("open_runs", **self._data.paced._asdict())
        self._number = self._live = self._live_run = 0
        self.copier, self.wrong_beside = "", 0

    def run(self, kind: str) -> Run:
        """One run of a kind; returns when every payload has been read, and released."""
        setup, run = self._setup, self._number
        self._number += 1
        method = kind if kind in ("pipe", "batched") else "single"
        receiving = self._pair.peer.submit(
            "receive_run",
            kind=method,
            run=run,
            count=setup.transfers,
            outstanding=setup.outstanding,
            batch=setup.batch,
        )
        items = self._data.raw_run(run, setup.transfers) if method == "pipe" else []
        tensors = [] if items else self._tensors(run, setup.transfers)
        (self._pipe.wait_until_ready if items else self._pair.wait_until_requested)()
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        if method == "pipe":
            self._pipe.send(items, setup.outstanding)
        else:
            batch = setup.batch if method == "batched" else 0
            put_run(self._pair.link, run, tensors, setup.outstanding, batch)
        spent = time.process_time_ns() - cpu
        received = receiving.result(_TIMEOUT)
        sides = {"producer": spent, "reader": received["cpu"]}
        return Run(kind, setup.transfers, began, received["ended"], sides, received["wrong"])

    def measure_puts(self) -> PutTimes:
        """The times of puts of the setup's tensor."""
        return measure_puts(self._pair.link, self._data.tensor(0, 0), self._setup.live)

    def keep_live(self, count: int) -> None:
        """Let `count` payloads be live that nobody reads; those there were before are read."""
        if count == self._live:
            return
        if self._live:
            counts = {"count": self._live, "outstanding": self._live, "batch": _LIVE_BATCH}
            reading = {"kind": "batched", "run": self._live_run, **counts}
            received = self._pair.peer.submit("receive_run", **reading).result(_TIMEOUT)
            self.wrong_beside += received["wrong"]
        self._live, self._live_run = count, self._number
        self._number += 1
        tensors = self._tensors(self._live_run, count)
        for start in range(0, count, _LIVE_BATCH):
            batch = tensors[start : start + _LIVE_BATCH]
            receipts = put_batch(self._pair.link, self._live_run, start, batch)
            self.copier = receipts[0].ledger.copier

    def _tensors(self, run: int, count: int) -> list[torch.Tensor]:
        chunks, corrupt = self._data.paced.chunks, self._setup.corrupt
        tensors = [self._data.tensor(run, number % chunks) for number in range(count)]
        if 0 <= corrupt < count:
            tensors[corrupt] = self._data.flip(run, corrupt % chunks)
        return tensors


def result_of(
    setup: ManySetup, runs: Runs, puts: PutTimes, copier: str, wrong_beside: int = 0
) -> Result:
    """Compute the figures of runs.

    `wrong_beside` counts the wrong payloads that were not measured: those of the runs to warm up,
    and those that were live meanwhile.
    """
    wrong, nbytes = runs.wrong + wrong_beside, _paced(setup).nbytes
    rates = {kind: runs.per_second(kind) for kind in KINDS}
    cpu = {kind: runs.by_side(kind, "cpu_per_item") for kind in KINDS}
    ratios = {" / ".join(pair).replace("_", " "): _ratio(runs, *pair) for pair in RATIOS}
    texts = {
        "pipe": "bare bytes, one byte back",
        "single": "put, begin_get",
        "batched": "put_many, begin_get_many",
        "few_live": f"single, {FEW} others live",
        "many_live": f"single, {setup.live} others live",
    }
    rows = [
        [kind.replace("_", " "), *map(_ranged, (rates[kind], *cpu[kind].values())), text]
        for kind, text in texts.items()
    ]
    head = ["", "transfers a second", *(f"{side}, µs CPU" for side in runs.sides), "what"]
    compared = [[name, *map(_ranged, ratio.values())] for name, ratio in ratios.items()]
    compared_head = ["×, by round", *ratios["single / pipe"]]
    rounds = (
        f"{setup.rounds}, every second one in reverse; in each {setup.transfers} transfers of each "
        f"kind, at most {setup.outstanding} outstanding, {setup.batch} in a batch"
    )
    payload = f"TensorTransferData of one tensor, [1, {setup.bytes // 2}] bfloat16 = {nbytes} bytes"
    return Result(
        figures={
            "payload_bytes": nbytes,
            "transfers": runs.total,
            "wrong": wrong,
            "copier": copier,
            "transfers_per_second": rates,
            "cpu_us_per_transfer": cpu,
            "ratios": ratios,
            "put_cpu_us": puts._asdict(),
            "load": list(os.getloadavg()),
        },
        head=[
            ("payload", payload),
            ("link", setup.text(copier)),
            ("rounds", rounds),
            ("gc", "gc.freeze() in both processes after the puts; see docs/operations.md"),
        ],
        tables="\n\n".join(
            (table(head, rows), table(compared_head, compared), _put_table(setup, puts))
        ),
        lines=[
            ("bytes", f"{wrong} payloads WRONG" if wrong else f"all {runs.total} equal"),
            load_line(),
        ],
        bars=_bars(setup, runs, puts) if setup.live >= 10000 else (),
        drawn=({kind.replace("_", " "): rates[kind].p50 for kind in KINDS}, "transfers a second"),
        failed=wrong,
    )


def _ratio(runs: Runs, kind: str, other: str) -> dict[str, Summary]:
    """One kind over another one, round by round: transfers a second, CPU a transfer by side."""
    pairs = list(zip(runs.of_kind(kind), runs.of_kind(other), strict=True))
    ratios = {
        "transfers a second": Summary.of([run.per_second / base.per_second for run, base in pairs])
    }
    for side, name in runs.sides.items():
        cpu = [run.cpu_per_item[name] / base.cpu_per_item[name] for run, base in pairs]
        ratios[f"CPU {side}"] = Summary.of(cpu)
    return ratios


def _put_table(setup: ManySetup, puts: PutTimes) -> str:
    rows = [
        ["a put among few", _ranged(puts.few), "a new TensorTransferData each time"],
        ["a put among many", _ranged(puts.many), f"with up to {setup.live} live"],
        ["longest put", f"{puts.longest:.0f}", f"of {setup.live}, with the garbage collector"],
        ["a tensor", _ranged(puts.tensor), _CACHE_TEXT],
    ]
    return table(["", "producer, µs CPU", "made and put, nobody reads it"], rows)


def _bars(setup: ManySetup, runs: Runs, puts: PutTimes) -> Bars:
    slower = _ratio(runs, "few_live", "many_live")["transfers a second"].p50
    yield f"{FEW} live / {setup.live} live, transfers a second", slower, 1.1
    yield f"a put among {setup.live} / among few, CPU", puts.many.p50 / puts.few.p50, 1.1
    if setup.live >= 50000:
        yield f"longest put of {setup.live}, ms CPU", 1e-3 * puts.longest, 5.0
    if setup.connector == "shm" and setup.bytes <= 4096 and setup.digests:
        yield f"{NUM_TENSORS} tensors of 512 bytes, µs CPU a tensor", puts.tensor.p50, 5.0
        # 8,000 and 30,000 a second; 4 and 10 % of a pipe's.
        yield "single, µs a transfer", 1e6 / runs.per_second("single").p50, 125.0
        yield "pipe / single", 1 / _rate_ratio(runs, "single"), 25.0
        if setup.batch == 64:
            yield "64 in a batch, µs a transfer", 1e6 / runs.per_second("batched").p50, 33.3
            yield "pipe / 64 in a batch", 1 / _rate_ratio(runs, "batched"), 10.0


def _rate_ratio(runs: Runs, kind: str) -> float:
    return _ratio(runs, kind, "pipe")["transfers a second"].p50


def _ranged(summary: Summary) -> str:
    p50, least, greatest = (
        f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        for value in (summary.p50, summary.min, summary.max)
    )
    return f"{p50} [{least}..{greatest}]"
