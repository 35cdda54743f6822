"""The latency of chunks of append streams, many streams at once, beside a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.bench.chunks import ChunkBytes, Pipe
from omni_kvlink.bench.machine import load_line
from omni_kvlink.bench.pace import Sent, send_all
from omni_kvlink.bench.pair import TIMEOUT, Pair, open_pipe, open_setup
from omni_kvlink.bench.result import Result
from omni_kvlink.bench.stats import Run, Runs, Timings
from omni_kvlink.cli.terminal import Progress, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.bench.result import Lines
    from omni_kvlink.bench.setups import AppendStreamSetup, Paced
    from omni_kvlink.bench.stats import Summary
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


@dataclasses.dataclass(frozen=True)
class Round(Run):
    """One round of a kind: the seconds of its `TIMES`, and each side's CPU by wall time."""

    seconds: dict[str, list[float]]
    cores: dict[str, float]

    @classmethod
    def of(cls, kind: str, sent: Sent, received: dict[str, Any]) -> Round:
        """Join what both sides noted; the CPU of the reader begins with the first chunk."""
        arrived = received["received"]
        pairs = list(zip(sent.called, arrived, strict=True))
        calls = zip(sent.called, sent.returned, strict=True)
        seconds = {
            kind: [1e-9 * (moment - called) for called, moment in pairs if moment],
            "append" if kind == "link" else "write": [1e-9 * (b - a) for a, b in calls],
            f"{kind}_late": [1e-9 * delay for delay in sent.delays],
        }
        cpu = {"producer": sent.cpu, "reader": received["cpu"]}
        wall = {"producer": sent.wall, "reader": max(1, received["wall"])}
        cores = {side: cpu[side] / wall[side] for side in cpu}
        span = min(sent.called), max(arrived)
        return cls(kind, len(pairs), *span, cpu, received["wrong"], seconds, cores)


def measure(setup: AppendStreamSetup, progress: Progress = progress) -> Result:
    """Run all rounds, after a short one of each kind to warm up."""
    rounds, copier = list[Round](), ""
    with (
        open_setup(setup) as pair,
        open_pipe(pair) as pipe,
        progress("rounds", 2 * setup.rounds) as step,
    ):
        warm = setup.paced._replace(chunks=max(1, setup.paced.chunks // 4))
        _link_round(pair, setup, warm, "warm")
        _pipe_round(pair, setup, warm, pipe)
        for number in range(setup.rounds):
            round_, copier = _link_round(pair, setup, setup.paced, f"round-{number}")
            rounds.append(round_)
            step()
            rounds.append(_pipe_round(pair, setup, setup.paced, pipe))
            step()
        return _result(setup, rounds, copier, one_process=pair.own_thread)


def _result(
    setup: AppendStreamSetup, rounds: list[Round], copier: str, *, one_process: bool
) -> Result:
    runs, times = Runs(rounds, one_process=one_process), Timings()
    for round_ in rounds:
        for name, values in round_.seconds.items():
            times.setdefault(name, []).extend(values)
    cores = {kind: runs.by_side(kind, "cores") for kind in KINDS}
    costs = {kind: _cpu_per_chunk(runs, kind) for kind in KINDS}
    pace = setup.rate * setup.streams  # the last period of a round ends with a send
    rates = {kind: runs.per_second(kind, most=pace) for kind in KINDS}
    link, pipe = (times.milliseconds(kind) for kind in KINDS)
    ratios = {"latency p50": link.p50 / pipe.p50, "latency p99": link.p99 / pipe.p99} | {
        f"CPU {side}": cores["link"][side].p50 / cores["pipe"][side].p50 for side in runs.sides
    }
    ratio = ", ".join(f"{name} {value:.2f} ×" for name, value in ratios.items())
    wrong = f"{runs.wrong} of {runs.total} chunks WRONG"
    usual = pace <= 3200 and setup.paced.nbytes <= 4096
    is_apart = setup.together and not setup.steps
    bars = [
        ("chunk p99, ms", link.p99, 2.0),
        *(
            (f"cores that this pace needs, {side}", 1e-6 * pace * cost, 0.6)
            for side, cost in costs["link"].items()
        ),
    ]
    drawn = {f"{kind}, {side}": v for kind in KINDS for side, v in costs[kind].items()}
    return Result(
        figures={
            "chunk_bytes": setup.paced.nbytes,
            "chunks": len(times["link"]),
            "wrong": runs.wrong,
            "copier": copier,
            "milliseconds": {name: times.milliseconds(name) for name in TIMES},
            "chunks_per_second": rates,
            "cores": cores,
            "cpu_us_per_chunk": costs,
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
            "load": list(os.getloadavg()),
        },
        head=_head(setup, copier),
        tables=times.table(TIMES),
        lines=[
            *((kind, _kind_text(rates[kind], cores[kind], costs[kind])) for kind in KINDS),
            ("ratio", f"link by pipe: {ratio}"),
            ("bytes", wrong if runs.wrong else f"all {runs.total} equal"),
            load_line(),
        ],
        bars=bars if setup.connector == "shm" and usual and not is_apart else (),
        drawn=(drawn, "µs of CPU a chunk"),
        failed=runs.wrong,
    )


def _cpu_per_chunk(runs: Runs, kind: str) -> dict[str, float]:
    """Microseconds of CPU a chunk of each side, also where the pace was not reached."""
    rounds = runs.of_kind(kind)
    chunks = 1e3 * sum(run.count for run in rounds)
    spent = {side: sum(run.cpu[name] for run in rounds) for side, name in runs.sides.items()}
    return {side: round(nanoseconds / chunks, 1) for side, nanoseconds in spent.items()}


def _kind_text(rate: Summary, cores: dict[str, Summary], costs: dict[str, float]) -> str:
    cpu = ", ".join(
        f"{side} {summary.p50:.3f} cores ({summary.min:.3f} to {summary.max:.3f}), "
        f"{costs[side]:.0f} µs a chunk"
        for side, summary in cores.items()
    )
    return f"{rate.p50:.0f} chunks a second ({rate.min:.0f} to {rate.max:.0f}); CPU: {cpu}"


def _head(setup: AppendStreamSetup, copier: str) -> Lines:
    paced = setup.paced
    pace = "all at the same moment" if setup.is_together else "evenly spread"
    streams = (
        f"{setup.streams}, {setup.rate:g} chunks a second each, {pace}; a chunk is "
        f"[{setup.tokens}, {setup.hidden}] bfloat16 = {paced.nbytes} bytes"
    )
    reader = "a chunk has the rows of all" if setup.steps else setup.reader
    link = f"{setup.text(copier)}; one thread appends, one receives ({reader})"
    rounds = (
        f"{setup.rounds} of each kind in turn, {paced.chunks} chunks a stream in each, after a "
        "short one to warm up"
    )
    return [("streams", streams), ("link", link), ("rounds", rounds)]


def _link_round(pair: Pair, setup: AppendStreamSetup, paced: Paced, name: str) -> tuple[Round, str]:
    """Open the streams on both sides, send every chunk, and commit; also the copier's name."""
    data = ChunkBytes(paced)
    spec = {"hidden": torch.empty(0, setup.hidden, dtype=torch.bfloat16)}
    count = 1 if setup.steps else setup.streams
    names = [f"{name}-stream-{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(pair.link.open_stream(key, spec)) for key in names]
        pair.peer.call("open_streams", names=names, timeout=TIMEOUT)
        receiving = pair.peer.submit("receive_streams", reader=setup.reader, **paced._asdict())
        append = (_append_step if setup.steps else _append)(outs, data, setup.corrupt)
        sent = send_all(setup, paced, append, steps=setup.steps)
    received = receiving.result(TIMEOUT)
    for out in outs:
        out.commit().wait(timeout=TIMEOUT)
    return Round.of("link", sent, received), outs[0].ledger.copier


def _append_step(outs: list[AppendStream], data: ChunkBytes, corrupt: int) -> Callable[[int], None]:
    paced = data.paced
    requests = {str(number): paced.tokens for number in range(paced.streams)}
    steps = [data.step(number) for number in range(paced.chunks)]
    if corrupt >= 0:
        stream, number = divmod(corrupt, paced.chunks)
        rows = slice(stream * paced.tokens, (stream + 1) * paced.tokens)
        steps[number][rows] = data.flip(stream, number)

    def append(number: int) -> None:
        outs[0].append_requests(requests, {"hidden": steps[number]})

    return append


def _append(outs: list[AppendStream], data: ChunkBytes, corrupt: int) -> Callable[[int, int], None]:
    def append(stream: int, number: int) -> None:
        outs[stream].append({"hidden": data.tensor(stream, number)})

    def append_or_flip(stream: int, number: int) -> None:
        is_wrong = data.paced.position(stream, number) == corrupt
        make = data.flip if is_wrong else data.tensor
        outs[stream].append({"hidden": make(stream, number)})

    return append if corrupt < 0 else append_or_flip


def _pipe_round(pair: Pair, setup: AppendStreamSetup, paced: Paced, pipe: Pipe) -> Round:
    data = ChunkBytes(paced)
    receiving = pair.peer.submit("receive_pipe", **paced._asdict())
    sent = send_all(setup, paced, lambda stream, number: pipe.write(data.raw(stream, number)))
    return Round.of("pipe", sent, receiving.result(TIMEOUT))
