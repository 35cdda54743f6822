"""The rate at which a link transfers small payloads, singly and in batches, beside a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.chunks import ChunkBytes, make_fifos
from omni_kvlink.bench.machine import load_text
from omni_kvlink.bench.pair import Pair, open_setup
from omni_kvlink.bench.pipelined import (
    ReceiptPipe,
    SentRun,
    put_batch,
    put_batches,
    put_singly,
)
from omni_kvlink.bench.reader import freeze_gc
from omni_kvlink.bench.report import Progress, bar, document, progress, table, wrapped
from omni_kvlink.bench.setups import ManySetup, Paced
from omni_kvlink.bench.stats import Summary
from omni_kvlink.connectors.base import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

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


@dataclasses.dataclass(frozen=True)
class ManyRun:
    """One run of a kind: `transfers` payloads, nanoseconds, and how many payloads were wrong."""

    kind: str
    transfers: int
    sent: SentRun
    received: dict[str, int]

    @property
    def per_second(self) -> float:
        """Transfers a second, from the first call of the producer to the reader's last release."""
        return 1e9 * self.transfers / (self.received["ended"] - self.sent.began)

    @property
    def cpu(self) -> dict[str, float]:
        """Microseconds of CPU a transfer of each side."""
        spent = {"producer": self.sent.cpu, "reader": self.received["cpu"]}
        return {side: 1e-3 * nanoseconds / self.transfers for side, nanoseconds in spent.items()}


@dataclasses.dataclass(frozen=True)
class ManyResult:
    """All runs, kind by kind in the order of the rounds.

    `wrong_beside` counts the wrong payloads that were not measured: those of the runs to warm up,
    and those that were live meanwhile.
    """

    setup: ManySetup
    runs: list[ManyRun]
    copier: str
    one_process: bool
    wrong_beside: int = 0

    @property
    def failed(self) -> int:
        """The number of payloads that were wrong."""
        return self.wrong_beside + sum(run.received["wrong"] for run in self.runs)

    def of_kind(self, kind: str) -> list[ManyRun]:
        """The runs of a kind, round by round."""
        return [run for run in self.runs if run.kind == kind]

    def per_second(self, kind: str) -> Summary:
        """Transfers a second, by round."""
        return Summary.of([run.per_second for run in self.of_kind(kind)])

    def cpu(self, kind: str) -> dict[str, Summary]:
        """Microseconds of CPU a transfer of each side, all threads, by round."""
        by_round = [run.cpu for run in self.of_kind(kind)]
        return {
            side: Summary.of([sides[name] for sides in by_round])
            for side, name in self._sides.items()
        }

    def ratio(self, kind: str, other: str) -> dict[str, Summary]:
        """One kind over another one, round by round: transfers a second, CPU a transfer by side."""
        pairs = list(zip(self.of_kind(kind), self.of_kind(other), strict=True))
        rate = Summary.of([run.per_second / base.per_second for run, base in pairs])
        cpu = {
            side: Summary.of([run.cpu[name] / base.cpu[name] for run, base in pairs])
            for side, name in self._sides.items()
        }
        return {
            "transfers a second": rate,
            **{f"CPU {side}": summary for side, summary in cpu.items()},
        }

    @property
    def _sides(self) -> dict[str, str]:
        """The name of each side's CPU, and where a run has it."""
        if self.one_process:
            return {"both": "producer"}
        return {"producer": "producer", "reader": "reader"}

    def ratios(self) -> dict[str, dict[str, Summary]]:
        """The pairs of `RATIOS`; see `ratio`."""
        return {" / ".join(pair).replace("_", " "): self.ratio(*pair) for pair in RATIOS}

    def bars(self) -> list[dict[str, Any]]:
        """The bars of this setup, and whether they are met; empty for fewer live payloads."""
        setup = self.setup
        if setup.live < 10000:
            return []
        slower = self.ratio("few_live", "many_live")["transfers a second"].p50
        figures = [(f"{FEW} live / {setup.live} live, transfers a second", slower, 1.15)]
        if setup.connector == "shm" and setup.bytes <= 4096 and setup.digests:
            # 8,000 and 30,000 a second.
            figures.append(("single, µs a transfer", 1e6 / self.per_second("single").p50, 125.0))
            if setup.batch == 64:
                microseconds = 1e6 / self.per_second("batched").p50
                figures.append(("64 in a batch, µs a transfer", microseconds, 33.3))
        return [bar(*figure) for figure in figures]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        return {
            "payload_bytes": _paced(self.setup).nbytes,
            "transfers": sum(run.transfers for run in self.runs),
            "wrong": self.failed,
            "copier": self.copier,
            "transfers_per_second": {kind: self.per_second(kind).to_dict() for kind in KINDS},
            "cpu_us_per_transfer": {
                kind: {side: summary.to_dict() for side, summary in self.cpu(kind).items()}
                for kind in KINDS
            },
            "ratios": {
                name: {quantity: summary.to_dict() for quantity, summary in summaries.items()}
                for name, summaries in self.ratios().items()
            },
            "load": list(os.getloadavg()),
            "bars": self.bars(),
        }

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        rows = [
            [
                kind.replace("_", " "),
                _ranged(self.per_second(kind)),
                *(_ranged(summary) for summary in self.cpu(kind).values()),
                _text(self.setup, kind),
            ]
            for kind in KINDS
        ]
        sides = [f"{side}, µs CPU" for side in self.cpu("pipe")]
        head = ["", "transfers a second", *sides, "what"]
        compared = [
            [name, *(_ranged(summary) for summary in summaries.values())]
            for name, summaries in self.ratios().items()
        ]
        ratios = table(["×, by round", *self.ratio("single", "pipe")], compared)
        tables = f"{table(head, rows)}\n\n{ratios}"
        return document(_setup_lines(self), tables, _result_lines(self), self.bars())

    def drawn(self) -> tuple[list[tuple[str, float]], str]:
        """The bars to draw, and their unit."""
        bars = [(kind.replace("_", " "), self.per_second(kind).p50) for kind in KINDS]
        return bars, "transfers a second"


def _paced(setup: ManySetup) -> Paced:
    """The payloads of all runs; a run is a stream, and so are those that are live meanwhile."""
    runs = (setup.rounds + 1) * 2 * len(KINDS)
    return Paced(runs, setup.transfers, tokens=1, hidden=setup.bytes // 2)


def _quota(setup: ManySetup) -> int:
    """Bytes of memory for all that is live at once."""
    payloads = setup.live + setup.outstanding + 2 * setup.batch
    return max(Options.quota, 2 * payloads * (setup.bytes + _SLOT_SPACE))


def _text(setup: ManySetup, kind: str) -> str:
    """A kind in words."""
    return {
        "pipe": "bare bytes, one byte back",
        "single": "put, begin_get",
        "batched": "put_many, begin_get_many",
        "few_live": f"single, {FEW} others live",
        "many_live": f"single, {setup.live} others live",
    }[kind]


def measure(setup: ManySetup, progress: Progress = progress) -> ManyResult:
    """Run all rounds, every second one in reverse, after one run of each kind to warm up."""
    with (
        open_setup(setup, quota=_quota(setup)) as pair,
        _open_pipe(pair, _paced(setup)) as pipe,
        progress("runs", len(KINDS) * setup.rounds) as step,
    ):
        sender = ManySender(pair, setup, pipe)
        warm = [sender.run(kind) for kind in ("pipe", "single", "batched")]
        pair.peer.call("freeze_gc")
        freeze_gc()
        runs = list[ManyRun]()
        for number in range(setup.rounds):
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                sender.keep_live({"few_live": FEW, "many_live": setup.live}.get(kind, 0))
                runs.append(sender.run(kind))
                step()
        sender.keep_live(0)
        wrong = sender.wrong_beside + sum(run.received["wrong"] for run in warm)
        return ManyResult(setup, runs, sender.copier, pair.own_thread, wrong)


class ManySender:
    """The producer of all runs.

    `wrong_beside` counts the wrong ones among the payloads that `keep_live` put.
    """

    def __init__(self, pair: Pair, setup: ManySetup, pipe: ReceiptPipe):
        self._pair, self._setup, self._pipe = pair, setup, pipe
        self._data = ChunkBytes(_paced(setup))
        self._number = self._live = self._live_run = 0
        self.copier, self.wrong_beside = "", 0

    def run(self, kind: str) -> ManyRun:
        """One run of a kind; returns when every payload has been read, and released."""
        setup, run = self._setup, self._number
        self._number += 1
        counts = {"count": setup.transfers, "outstanding": setup.outstanding, "batch": setup.batch}
        kinds = {"pipe": "pipe", "batched": "batched"}
        receiving = self._pair.peer.submit(
            "receive_run", kind=kinds.get(kind, "single"), run=run, **counts
        )
        sent = self._write(run) if kind == "pipe" else self._put(kind, run)
        return ManyRun(kind, setup.transfers, sent, receiving.result(_TIMEOUT))

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
        chunks, corrupt = _paced(self._setup).chunks, self._setup.corrupt
        tensors = [self._data.tensor(run, number % chunks) for number in range(count)]
        if 0 <= corrupt < count:
            tensors[corrupt] = self._data.flip(run, corrupt % chunks)
        return tensors

    def _put(self, kind: str, run: int) -> SentRun:
        link, setup = self._pair.link, self._setup
        tensors = self._tensors(run, setup.transfers)
        self._pair.wait_until_requested()
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        if kind == "batched":
            put_batches(link, run, tensors, setup.outstanding, setup.batch)
        else:
            put_singly(link, run, tensors, setup.outstanding)
        return SentRun(began, time.process_time_ns() - cpu)

    def _write(self, run: int) -> SentRun:
        setup = self._setup
        items = [self._data.raw(run, number) for number in range(setup.transfers)]
        self._pipe.wait_until_ready()
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        self._pipe.send(items, setup.outstanding)
        return SentRun(began, time.process_time_ns() - cpu)


@contextlib.contextmanager
def _open_pipe(pair: Pair, paced: Paced) -> Iterator[ReceiptPipe]:
    with (
        make_fifos("", "-back") as path,
        contextlib.closing(ReceiptPipe(path, is_sender=True)) as pipe,
    ):
        pair.peer.call("open_runs", path=path, **paced._asdict())
        pipe.connect()
        yield pipe


def _ranged(summary: Summary) -> str:
    p50, least, greatest = (
        f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        for value in (summary.p50, summary.min, summary.max)
    )
    return f"{p50} [{least}..{greatest}]"


def _setup_lines(result: ManyResult) -> list[str]:
    setup = result.setup
    payload = f"TensorTransferData of one tensor, [1, {setup.bytes // 2}] bfloat16"
    link = (
        f"{setup.connector}, mode {setup.mode}, copier {result.copier}, digests "
        f"{'crc32c' if setup.digests else 'off'}, inline up to {setup.inline} bytes"
    )
    rounds = (
        f"{setup.rounds}, every second one in reverse; in each {setup.transfers} transfers of each "
        f"kind, at most {setup.outstanding} outstanding, {setup.batch} in a batch"
    )
    return [
        wrapped("payload", f"{payload} = {_paced(setup).nbytes} bytes"),
        wrapped("link", link),
        wrapped("rounds", rounds),
        wrapped("gc", "gc.freeze() in both processes after the warm-up; see docs/operations.md"),
    ]


def _result_lines(result: ManyResult) -> list[str]:
    total = sum(run.transfers for run in result.runs)
    verdict = f"{result.failed} payloads WRONG" if result.failed else f"all {total} equal"
    return [wrapped("bytes", verdict), wrapped("load", load_text())]
