"""The latency of chunks of append streams, many streams at once, beside a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.bench.chunks import ChunkBytes, ChunkPipe, Sent, make_fifos, send_all, send_steps
from omni_kvlink.bench.machine import load_text
from omni_kvlink.bench.pair import Pair, open_setup
from omni_kvlink.bench.report import Progress, bar, document, progress, times_table, wrapped
from omni_kvlink.bench.setups import GrowingSetup, Paced
from omni_kvlink.bench.stats import COLUMNS, Summary, Timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.link import AppendStream

KINDS = ("link", "pipe")
TIMES = {
    "link": "append called → tensor in hand",
    "pipe": "write called → bytes in hand",
    "append": "append called → returned",
    "write": "write called → returned",
    "link_late": "due → append called",
    "pipe_late": "due → write called",
}
_TIMEOUT = 60.0
_LEAD_TIME = 50_000_000
"""Nanoseconds in which the reader's first requests arrive."""


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a kind, on both sides."""

    kind: str
    sent: Sent
    received: dict[str, Any]
    copier: str = ""

    @property
    def cores(self) -> dict[str, float]:
        """CPU by wall time of each side."""
        reader = self.received
        return {
            "producer": self.sent.cpu / self.sent.wall,
            "reader": reader["cpu"] / max(1, reader["wall"]),
        }

    @property
    def per_second(self) -> float:
        """Chunks a second, from the pace's beginning to the last one received."""
        begin = min(self.sent.called)
        last: int = max(self.received["received"])
        return 1e9 * len(self.sent.called) / (last - begin)

    def seconds(self) -> dict[str, list[float]]:
        """The `TIMES` of this kind, chunk by chunk."""
        sent, call = self.sent, "append" if self.kind == "link" else "write"
        pairs = list(zip(sent.called, self.received["received"], strict=True))
        return {
            self.kind: [1e-9 * (arrived - called) for called, arrived in pairs if arrived],
            call: [1e-9 * (b - a) for a, b in zip(sent.called, sent.returned, strict=True)],
            f"{self.kind}_late": [1e-9 * delay for delay in sent.delays],
        }


@dataclasses.dataclass(frozen=True)
class GrowingResult(Timings):
    """Seconds of every chunk, and the CPU of each side round by round."""

    setup: GrowingSetup
    rounds: list[Round]
    one_process: bool

    @property
    def copier(self) -> str:
        """The copier that moved the chunks."""
        return next(round_.copier for round_ in self.rounds)

    @property
    def failed(self) -> int:
        """Chunks that were wrong or did not come."""
        return sum(int(round_.received["wrong"]) for round_ in self.rounds)

    def cores(self, kind: str) -> dict[str, Summary]:
        """CPU seconds a second of each side, threads included, by round."""
        by_round = [round_.cores for round_ in self.rounds if round_.kind == kind]
        if self.one_process:
            return {"both": Summary.of([sides["producer"] for sides in by_round])}
        return {side: Summary.of([sides[side] for sides in by_round]) for side in by_round[0]}

    def per_second(self, kind: str) -> Summary:
        """Chunks a second, by round; not more than the pace, whose last period ends with a send."""
        pace = self.setup.rate * self.setup.streams
        rates = [round_.per_second for round_ in self.rounds if round_.kind == kind]
        return Summary.of([min(rate, pace) for rate in rates])

    def ratios(self) -> dict[str, float]:
        """Link over pipe: latency, and CPU of each side."""
        link, pipe = (self.milliseconds(kind) for kind in KINDS)
        ratios = {"latency p50": link.p50 / pipe.p50, "latency p99": link.p99 / pipe.p99}
        ours, bare = (self.cores(kind) for kind in KINDS)
        return ratios | {f"CPU {side}": ours[side].p50 / bare[side].p50 for side in ours}

    def bars(self) -> list[dict[str, Any]]:
        """The bars of this setup, and whether they are met; empty for a setup without one."""
        setup = self.setup
        usual = setup.rate * setup.streams <= 3200 and setup.paced.nbytes <= 4096
        is_apart = setup.together and not setup.steps
        if setup.connector != "shm" or is_apart or not usual:
            return []
        figures = [("chunk p99, ms", self.milliseconds("link").p99, 2.0)]
        needed = {
            side: 1e-6 * setup.rate * setup.streams * cost
            for side, cost in self.cpu_per_chunk("link").items()
        }
        figures += [(f"cores that this pace needs, {side}", n, 0.6) for side, n in needed.items()]
        return [bar(*figure) for figure in figures]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values; the keys are stable."""
        return {
            "chunk_bytes": self.setup.paced.nbytes,
            "chunks": len(self.seconds["link"]),
            "wrong": self.failed,
            "copier": self.copier,
            "milliseconds": {name: self.milliseconds(name).to_dict() for name in TIMES},
            "chunks_per_second": {kind: self.per_second(kind).to_dict() for kind in KINDS},
            "cores": {
                kind: {side: summary.to_dict() for side, summary in self.cores(kind).items()}
                for kind in KINDS
            },
            "cpu_us_per_chunk": {kind: self.cpu_per_chunk(kind) for kind in KINDS},
            "ratios": {name: round(value, 3) for name, value in self.ratios().items()},
            "load": list(os.getloadavg()),
            "bars": self.bars(),
        }

    def text(self) -> str:
        """Everything that was measured, as wide as the terminal at most."""
        times = times_table(self, TIMES, *COLUMNS)
        return document(_setup_lines(self), times, _result_lines(self), self.bars())

    def drawn(self) -> tuple[list[tuple[str, float]], str]:
        """The bars to draw, and their unit."""
        bars = [
            (f"{kind}, {side}", value)
            for kind in KINDS
            for side, value in self.cpu_per_chunk(kind).items()
        ]
        return bars, "µs of CPU a chunk"

    def cpu_per_chunk(self, kind: str) -> dict[str, float]:
        """Microseconds of CPU a chunk of each side, also where the pace was not reached."""
        rounds = [round_ for round_ in self.rounds if round_.kind == kind]
        chunks = 1e3 * sum(len(round_.sent.called) for round_ in rounds)
        producer = sum(round_.sent.cpu for round_ in rounds) / chunks
        reader = sum(int(round_.received["cpu"]) for round_ in rounds) / chunks
        costs = {"producer": round(producer, 1), "reader": round(reader, 1)}
        return {"both": costs["producer"]} if self.one_process else costs


def measure(setup: GrowingSetup, progress: Progress = progress) -> GrowingResult:
    """Run all rounds, after a short one of each kind to warm up."""
    rounds = list[Round]()
    with (
        open_setup(setup) as pair,
        _open_pipe(pair) as pipe,
        progress("rounds", 2 * setup.rounds) as step,
    ):
        warm = setup.paced._replace(chunks=max(1, setup.paced.chunks // 4))
        _link_round(pair, setup, warm, "warm")
        _pipe_round(pair, setup, warm, pipe)
        for number in range(setup.rounds):
            rounds.append(_link_round(pair, setup, setup.paced, f"round-{number}"))
            step()
            rounds.append(_pipe_round(pair, setup, setup.paced, pipe))
            step()
        seconds = {name: list[float]() for name in TIMES}
        for round_ in rounds:
            for name, values in round_.seconds().items():
                seconds[name] += values
        return GrowingResult(seconds, setup, rounds, pair.own_thread)


@contextlib.contextmanager
def _open_pipe(pair: Pair) -> Iterator[ChunkPipe]:
    with make_fifos("") as path:
        pair.peer.call("open_pipe", path=path)
        with contextlib.closing(ChunkPipe(path, is_sender=True)) as pipe:
            yield pipe


def _link_round(pair: Pair, setup: GrowingSetup, paced: Paced, name: str) -> Round:
    """Open the streams on both sides, send every chunk, and commit."""
    data = ChunkBytes(paced)
    spec = {"hidden": torch.empty(0, setup.hidden, dtype=torch.bfloat16)}
    count = 1 if setup.steps else setup.streams
    names = [f"{name}-stream-{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(pair.link.open_stream(key, spec)) for key in names]
        pair.peer.call("open_streams", names=names, timeout=_TIMEOUT)
        receiving = pair.peer.submit("receive_streams", reader=setup.reader, **paced._asdict())
        if setup.steps:
            append_step = _append_step(outs[0], data, paced, setup.corrupt)
            sent = send_steps(paced, append_step, begin=_begin(), per_second=setup.rate)
        else:
            sent = _send(setup, paced, _append(outs, data, paced, setup.corrupt))
    received = receiving.result(_TIMEOUT)
    for out in outs:
        out.commit().wait(timeout=_TIMEOUT)
    return Round("link", sent, received, outs[0].ledger.copier)


def _append_step(
    out: AppendStream, data: ChunkBytes, paced: Paced, corrupt: int
) -> Callable[[int], None]:
    requests = {str(number): paced.tokens for number in range(paced.streams)}
    steps = [data.step(number) for number in range(paced.chunks)]
    if corrupt >= 0:
        stream, number = divmod(corrupt, paced.chunks)
        rows = slice(stream * paced.tokens, (stream + 1) * paced.tokens)
        steps[number][rows] = data.flip(stream, number)

    def append(number: int) -> None:
        out.append_requests(requests, {"hidden": steps[number]})

    return append


def _append(
    outs: list[AppendStream], data: ChunkBytes, paced: Paced, corrupt: int
) -> Callable[[int, int], None]:
    def append(stream: int, number: int) -> None:
        outs[stream].append({"hidden": data.tensor(stream, number)})

    def append_or_flip(stream: int, number: int) -> None:
        is_wrong = paced.position(stream, number) == corrupt
        make = data.flip if is_wrong else data.tensor
        outs[stream].append({"hidden": make(stream, number)})

    return append if corrupt < 0 else append_or_flip


def _pipe_round(pair: Pair, setup: GrowingSetup, paced: Paced, pipe: ChunkPipe) -> Round:
    data = ChunkBytes(paced)
    receiving = pair.peer.submit("receive_pipe", **paced._asdict())

    def write(stream: int, number: int) -> None:
        pipe.send(stream, number, data.raw(stream, number))

    sent = _send(setup, paced, write)
    return Round("pipe", sent, receiving.result(_TIMEOUT))


def _send(setup: GrowingSetup, paced: Paced, send: Callable[[int, int], None]) -> Sent:
    together = setup.is_together
    return send_all(paced, send, begin=_begin(), per_second=setup.rate, together=together)


def _begin() -> int:
    return time.monotonic_ns() + _LEAD_TIME


def _setup_lines(result: GrowingResult) -> list[str]:
    setup, paced = result.setup, result.setup.paced
    pace = "all at the same moment" if setup.is_together else "evenly spread"
    streams = (
        f"{setup.streams}, {setup.rate:g} chunks a second each, {pace}; a chunk is "
        f"[{setup.tokens}, {setup.hidden}] bfloat16 = {paced.nbytes} bytes"
    )
    digests = "crc32c" if setup.digests else "off"
    reader = "a chunk has the rows of all" if setup.steps else setup.reader
    link = (
        f"{setup.connector}, mode {setup.mode}, copier {result.copier}, digests {digests}"
        f", inline up to {setup.inline} bytes; one thread appends, one receives ({reader})"
    )
    rounds = (
        f"{setup.rounds} of each kind in turn, {paced.chunks} chunks a stream in each, after a "
        "short one to warm up"
    )
    return [wrapped("streams", streams), wrapped("link", link), wrapped("rounds", rounds)]


def _result_lines(result: GrowingResult) -> list[str]:
    lines = list[str]()
    for kind in KINDS:
        rate, costs = result.per_second(kind), result.cpu_per_chunk(kind)
        cores = ", ".join(
            f"{side} {summary.p50:.3f} cores ({summary.min:.3f} to {summary.max:.3f}), "
            f"{costs[side]:.0f} µs a chunk"
            for side, summary in result.cores(kind).items()
        )
        text = f"{rate.p50:.0f} chunks a second ({rate.min:.0f} to {rate.max:.0f}); CPU: {cores}"
        lines.append(wrapped(kind, text))
    ratios = ", ".join(f"{name} {value:.2f} ×" for name, value in result.ratios().items())
    lines.append(wrapped("ratio", f"link by pipe: {ratios}"))
    total = sum(len(round_.sent.called) for round_ in result.rounds)
    verdict = f"{result.failed} of {total} chunks WRONG" if result.failed else f"all {total} equal"
    return [*lines, wrapped("bytes", verdict), wrapped("load", load_text())]
