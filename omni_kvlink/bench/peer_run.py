"""`kvlink-bench peers`: the same blocks by several systems, in turn, beside a plain copy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench import peers
from omni_kvlink.bench.baselines import ASLEEP
from omni_kvlink.bench.environments import System, default_folder
from omni_kvlink.bench.membench import PlainCopy
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.result import Lines, Result
from omni_kvlink.bench.setups import BLOCK, PEERS, PeersSetup
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli.terminal import Progress, progress, table
from omni_kvlink.testing.peer_harness import PeerError, PeerExited, ProcessPeer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TIMEOUT, OPENING = 60.0, 300.0
"""Seconds of one command of an end, and of its opening, which imports the system."""
PLAIN = "plain copy"
_SIDES = ("sender", "receiver")


@dataclasses.dataclass
class Row:
    """The measurements of one system; `reason` says why there are none, or no more."""

    system: System
    reason: str = ""
    wrong: int = 0
    milliseconds: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"arrived": [], "scattered": []}
    )
    cpu: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {side: [] for side in _SIDES}
    )
    ratios: list[float] = dataclasses.field(default_factory=list)

    @property
    def p50(self) -> float:
        """Milliseconds until the bytes are in the target blocks; infinite without measurements."""
        scattered = self.milliseconds["scattered"]
        return Summary.of(scattered).p50 if scattered else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a `Summary` stands for its fields, None for no measurement."""

        def summary(values: list[float]) -> Summary | None:
            return Summary.of(values) if values else None

        return {
            "copies": self.system.fact("COPIES"),
            "verifies": self.system.fact("VERIFIES"),
            "waits": self.system.fact("WAITS"),
            "reason": self.reason,
            "wrong": self.wrong,
            **{f"{moment}_ms": summary(values) for moment, values in self.milliseconds.items()},
            "ratio": summary(self.ratios),
            "cpu_seconds_per_gigabyte": {side: summary(used) for side, used in self.cpu.items()},
        }


class PeerPair:
    """The two processes of a system; they are stopped while others have their turn."""

    def __init__(self, python: str, system: System, folder: Path, geometry: dict[str, Any]):
        os.mkfifo(folder / "fifo", 0o600)
        self._log = folder / "log"
        program = (python, str(Path(peers.__path__[0]) / "end.py"))
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if not system.fact("REQUIRES"):  # it may be this library itself
            env["PYTHONPATH"] = str(Path(peers.__path__[0]).parents[2])
        self._ends = list[ProcessPeer]()
        try:
            for side in _SIDES:
                arguments = (side, str(system.path), str(self._log))
                end = ProcessPeer(env, program=program, arguments=arguments, concurrent=False)
                self._ends.append(end)
            self.sender, self.receiver = self._ends
            opening = [
                end.submit("open", folder=str(folder), geometry=geometry) for end in self._ends
            ]
            for opened in opening:
                opened.result(OPENING)
        except BaseException:
            self.kill()
            raise

    def transfer(self, number: int) -> tuple[dict[str, float], dict[str, float], str]:
        """Run one transfer: seconds and CPU seconds of both sides, and what is wrong afterwards."""
        self.sender.call("fill", number=number)
        receiving = self.receiver.submit("receive")
        time.sleep(ASLEEP)
        used = -self.sender.call("cpu")
        called = self.sender.submit("send").result(TIMEOUT)
        got = receiving.result(TIMEOUT)
        used += self.sender.call("cpu")
        seconds = {moment: 1e-9 * (got[moment] - called) for moment in ("arrived", "scattered")}
        errors = self.receiver.call("errors", number=number)
        return seconds, {"sender": 1e-9 * used, "receiver": 1e-9 * got["cpu"]}, errors

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the processes run within the block, and stop them at its end."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Close both ends at the same time, and end their processes."""
        self._signal(signal.SIGCONT)
        try:
            for closed in [end.submit("close") for end in self._ends]:
                with contextlib.suppress(PeerError):
                    closed.result(TIMEOUT)
        except (PeerExited, futures.TimeoutError):
            pass
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._signal(signal.SIGKILL)
        for end in self._ends:
            end.close()

    def log(self) -> str:
        """The last line that the system has printed."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _signal(self, number: signal.Signals) -> None:
        for end in self._ends:
            if end.process.poll() is None:
                end.process.send_signal(number)


def measure(setup: PeersSetup, progress: Progress = progress) -> Result:
    """Open every system, and run the rounds; the order of the systems rotates."""
    names = setup.peer or PEERS
    rows = [Row(System(name)) for name in names]
    plain, copies = PlainCopy(setup.shape.nbytes), list[float]()
    geometry = _geometry(setup)
    with contextlib.ExitStack() as opened:
        pairs = dict[str, PeerPair]()
        with progress("systems opened", len(rows)) as step:
            for row in rows:
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvl-")))
                with _reasons(row, is_opening=True):
                    pairs[row.system.name] = _open(setup, row.system, folder, geometry)
                    opened.callback(pairs[row.system.name].close)
                step()
        with progress("rounds", setup.warmup + setup.rounds) as step:
            for number in range(setup.warmup + setup.rounds):
                copied = plain.seconds()
                turn = number % len(rows)
                for row in (*rows[turn:], *rows[:turn]):
                    if not row.reason:
                        pair = pairs[row.system.name]
                        with _reasons(row, is_opening=False), pair.running():
                            _measure_turn(row, pair, number, setup, copied)
                if number >= setup.warmup:
                    copies.append(1e3 * copied)
                step()
    return _result(setup, rows, copies, plain.text)


def _open(setup: PeersSetup, system: System, folder: Path, geometry: dict[str, Any]) -> PeerPair:
    environments = Path(setup.environments) if setup.environments else default_folder()
    python = system.python(environments, setup.python)
    pair = PeerPair(python, system, folder, geometry)
    with pair.running():
        return pair


def _measure_turn(row: Row, pair: PeerPair, number: int, setup: PeersSetup, copied: float) -> None:
    seconds, used, errors = pair.transfer(number)
    if errors:
        row.wrong += 1
        raise BenchError(errors)
    if number < setup.warmup:
        return
    for moment, value in seconds.items():
        row.milliseconds[moment].append(1e3 * value)
    for side, value in used.items():
        row.cpu[side].append(1e9 * value / setup.shape.nbytes)
    row.ratios.append(seconds["scattered"] / copied)


@contextlib.contextmanager
def _reasons(row: Row, *, is_opening: bool) -> Iterator[None]:
    """Have an error of a system be the reason of its row."""
    try:
        yield
    except (BenchError, PeerError, PeerExited, OSError, futures.TimeoutError) as error:
        text = str(error) or "an end did not answer in time"
        hint = row.system.fact("HINT") if is_opening else ""
        row.reason = f"{text}; {hint}" if hint else text


def _geometry(setup: PeersSetup) -> dict[str, Any]:
    shape, tokens = setup.shape, min(BLOCK, setup.shape.tokens)
    if shape.tokens % tokens:
        raise BenchError(f"--tokens {shape.tokens}: wanted a multiple of {BLOCK}, or less than it")
    return {
        "tensors": shape.layers * len(shape.parts),
        "blocks": shape.tokens // tokens,
        "tokens": tokens,
        "nbytes": tokens * shape.row_nbytes,
        "paged": setup.paged,
        "seed": setup.seed,
    }


def _result(setup: PeersSetup, rows: Sequence[Row], copies: list[float], plain: str) -> Result:
    ordered = sorted(rows, key=lambda row: row.p50)
    copied = Summary.of(copies)
    names = ("system", "ms", "min", "max", "in hand", "× copy", "CPU s/GB")
    cells = [[PLAIN, *_numbers(copied), "–", "1.00", "–"]]
    cells += [_cells(row) for row in ordered if row.ratios]
    kind = f"blocks of {BLOCK} tokens in random order" if setup.paged else "dense tensors"
    return Result(
        figures={
            "payload_bytes": setup.shape.nbytes,
            "rounds": setup.rounds,
            "plain_copy": plain,
            "plain_copy_ms": copied,
            "peers": {row.system.name: row.to_dict() for row in ordered},
        },
        head=[
            ("payload", f"{setup.shape.text}, {kind} at both ends, seed {setup.seed}"),
            ("copy", f"{plain}, as many bytes, one thread"),
            ("rounds", f"{setup.rounds}, each with a transfer of every system, in turn"),
            ("ms", "send called → all bytes in the target blocks, median"),
            ("in hand", "send called → the receiver can read them in its own process, ms"),
            ("CPU", "sender + receiver, the waiting of a receiver that polls included"),
        ],
        tables="\n\n".join((table(names, cells), _facts(ordered))),
        lines=_lines(ordered),
        drawn=({row.system.name: row.p50 for row in ordered if row.ratios}, "ms"),
        failed=sum(row.wrong for row in rows),
    )


def _numbers(summary: Summary) -> list[str]:
    return [f"{value:.3g}" for value in (summary.p50, summary.min, summary.max)]


def _cells(row: Row) -> list[str]:
    scattered, arrived = (Summary.of(row.milliseconds[name]) for name in ("scattered", "arrived"))
    used = (f"{Summary.of(seconds).p50:.3g}" for seconds in row.cpu.values())
    return [
        row.system.name,
        *_numbers(scattered),
        f"{arrived.p50:.3g}",
        f"{Summary.of(row.ratios).p50:.2f}",
        " + ".join(used),
    ]


def _facts(rows: Sequence[Row]) -> str:
    """A table of what each system does with the bytes."""
    facts = ("VERIFIES", "WAITS", "COPIES")
    cells = [[row.system.name, *(row.system.fact(name) for name in facts)] for row in rows]
    return table(("system", *(name.lower() for name in facts)), cells)


def _lines(rows: Sequence[Row]) -> Lines:
    ran = [row for row in rows if row.ratios and not row.reason]
    lines: Lines = [("first", ran[0].system.name)] if ran else []
    failed = [row for row in rows if row.reason]
    return lines + [
        ("WRONG" if row.wrong else "not run", f"{row.system.name}: {row.reason}") for row in failed
    ]
