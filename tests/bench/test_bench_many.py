"""`kvlink-bench many`: every payload is compared, and the figures are computed from the runs."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink
from omni_kvlink.bench.chunks import ChunkBytes, ChunkRecorder, Pipe
from omni_kvlink.bench.commands import run as bench
from omni_kvlink.bench.many import KINDS, RATIOS, result_of
from omni_kvlink.bench.pipelined import (
    get_singly,
    key_of,
    payload_of,
    put_run,
)
from omni_kvlink.bench.put_times import PutTimes
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.setups import ManySetup, Paced
from omni_kvlink.bench.stats import Run, Runs, Summary
from omni_kvlink.connectors.base import Options
from support.bench_document import bench_document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_kvlink import KVConsumer, KVProducer

SMALL = ["many", "--transfers", "50", "--outstanding", "8", "--batch", "12", "--live", "30"]
SMALL += ["--rounds", "2"]
CASES = {
    "shm": ["--connector", "shm"],
    "sealed, inline": ["--connector", "shm", "--mode", "sealed", "--inline", "--bytes", "600"],
    "zmq": ["--connector", "zmq+ipc", "--no-digests", "--bytes", "70000"],
    "inproc": ["--connector", "inproc", "--outstanding", "1", "--batch", "1"],
}


def run(path: Path, *arguments: str) -> dict[str, Any]:
    return bench_document(path, *SMALL, *arguments)


@pytest.mark.parametrize("case", CASES)
def test_the_document(case: str, tmp_path: Path) -> None:
    document = run(tmp_path / "result.json", *CASES[case])
    setup, results = document["setup"], document["results"]
    assert setup["inline"] == (32 << 10 if "inline" in case else Options.inline)
    assert results["payload_bytes"] == setup["bytes"]
    assert results["transfers"] == 2 * 50 * len(KINDS)
    assert (results["wrong"], results["bars"]) == (0, [])
    sides = ["both"] if case == "inproc" else ["producer", "reader"]
    for kind in KINDS:
        assert results["transfers_per_second"][kind]["min"] > 0
        cpu = results["cpu_us_per_transfer"][kind]
        assert list(cpu) == sides
        assert all(one["min"] > 0 for one in cpu.values())
    puts = results["put_cpu_us"]
    assert puts["longest"] >= puts["many"]["max"] >= puts["many"]["min"] > 0
    assert puts["tensor"]["min"] > 0
    assert len(results["ratios"]) == len(RATIOS)
    for ratio in results["ratios"].values():
        assert list(ratio) == ["transfers a second", *(f"CPU {side}" for side in sides)]
        assert all(one["min"] > 0 for one in ratio.values())


def test_the_text_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([*SMALL, "--connector", "inproc"]) == 0
    text = capsys.readouterr().out
    for word in (*KINDS, "10 others live", "30 others live", "both, µs CPU"):
        assert word.replace("_", " ") in text
    assert f"all {2 * 50 * len(KINDS)} equal" in text
    assert max(map(len, text.splitlines())) <= 96


def test_a_wrong_byte_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each run over the link, also of the two to warm up, and of what was live meanwhile."""
    assert bench([*SMALL, "--corrupt", "17"]) == 1
    live = 1  # put in the first round, and still there in the second
    assert f"{2 + 2 * 4 + live} payloads WRONG" in capsys.readouterr().out


def test_odd_bytes_are_wrong_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        bench(["many", "--bytes", "4095"])
    assert caught.value.code == 2


def test_the_figures_come_from_the_runs() -> None:
    """1,000 transfers a run; in the second round each takes twice as long."""

    def one(kind: str, milliseconds: int, cpu: int, wrong: int = 0) -> Run:
        began = 5_000_000
        ended = began + 1_000_000 * milliseconds
        return Run(
            kind, 1000, began, ended, {"producer": 10**6 * cpu, "reader": 3 * 10**6 * cpu}, wrong
        )

    slower = {"pipe": 10, "single": 1000, "batched": 500, "few_live": 1000, "many_live": 1250}
    runs = [one(kind, n * ms, cpu=ms // 10) for n in (1, 2) for kind, ms in slower.items()]
    setup = ManySetup("shm", transfers=1000, rounds=2)
    puts = PutTimes(Summary.of([20, 10, 30]), Summary.of([25]), 7000, Summary.of([3, 4, 8]))
    result = result_of(setup, Runs(runs, one_process=False), puts, "native")
    found = result.to_dict()
    rate = found["transfers_per_second"]["single"]
    assert (rate["min"], rate["p50"], rate["max"]) == (500, 750, 1000)
    cpu = found["cpu_us_per_transfer"]["single"]
    assert {side: one["p50"] for side, one in cpu.items()} == {"producer": 100, "reader": 300}
    ratios = {
        name: [round(one["p50"], 4) for one in compared.values()]
        for name, compared in found["ratios"].items()
    }
    assert ratios == {
        "single / pipe": [0.01, 100, 100],
        "batched / pipe": [0.02, 50, 50],
        "batched / single": [2, 0.5, 0.5],
        "many live / few live": [0.8, 1.25, 1.25],
    }
    assert [(bar["got"], bar["limit"], bar["met"]) for bar in found["bars"]] == [
        (1.25, 1.1, False),
        (1.25, 1.1, False),
        (4, 5, True),
        (1333.3333, 125, False),
        (100, 25, False),
        (666.6667, 33.3, False),
        (50, 10, False),
    ]
    many = dataclasses.replace(setup, live=50_000)
    bars = result_of(many, Runs(runs, one_process=False), puts, "native").to_dict()["bars"]
    (longest,) = (bar for bar in bars if "longest" in bar["bar"])
    assert (longest["got"], longest["limit"]) == (7, 5)
    assert result.failed == 0
    wrong = Runs([*runs, one("pipe", 1, 1, wrong=3)], one_process=False)
    with pytest.raises(ValueError, match="zip"):  # a round without its other kinds
        result_of(setup, wrong, puts, "native")
    wrong = Runs([one(run.kind, 1, 1, wrong=run.kind == "pipe") for run in runs], one_process=False)
    assert result_of(setup, wrong, puts, "native", 1).failed == 2 + 1


def test_the_pipe_keeps_no_more_outstanding_than_it_may(tmp_path: Path) -> None:
    """Three items at once; the fourth is written when a byte has come back."""
    sender, receiver = _pipe(tmp_path)
    items = [bytes([number]) * 100 for number in range(6)]
    sending = threading.Thread(target=sender.send, args=(items, 3), daemon=True)
    sending.start()
    # The pipe's descriptors: `receive` would reply, and let the sender go on.
    fd, back = receiver._data, receiver._replies
    assert _read(fd, 300) == b"".join(items[:3])
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        os.read(fd, 1)
    os.set_blocking(fd, True)
    os.write(back, b"\0" * 3)
    assert _read(fd, 300) == b"".join(items[3:])
    assert sending.is_alive()
    os.write(back, b"\0" * 3)
    sending.join(10)
    assert not sending.is_alive()
    sender.close()
    receiver.close()


def test_the_pipe_compares_and_notices_its_end(tmp_path: Path) -> None:
    paced = Paced(streams=2, chunks=40, tokens=1, hidden=50)
    data = ChunkBytes(paced)
    sender, receiver = _pipe(tmp_path)
    into = ChunkRecorder(data.raw_run(1, 40))
    into.begin()
    receiving = threading.Thread(
        target=receiver.receive, args=(100, range(40), into, True), daemon=True
    )
    receiving.start()
    sender.wait_until_ready()
    items = [data.raw(1, number) for number in range(40)]
    items[7] = data.raw(0, 7)  # another run's
    sender.send(items, 4)
    receiving.join(10)
    into.end()
    assert into.result()["wrong"] == 1
    receiver.close()
    with pytest.raises(BenchError, match="closed its pipe"):
        sender.wait_until_ready()
    sender.close()


@pytest.fixture
def pair() -> Iterator[tuple[KVProducer, KVConsumer]]:
    with (
        KVLink.serve("inproc://many-outstanding") as producer,
        KVLink.connect(producer.url, timeout=5.0) as consumer,
    ):
        yield producer, consumer


PACED = Paced(streams=1, chunks=20, tokens=1, hidden=8)


def test_the_reader_requests_no_more_than_it_may(pair: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = pair
    data, most = ChunkBytes(PACED), 0
    into = ChunkRecorder(data.raw_run(0, 20))
    into.begin()
    getting = threading.Thread(target=get_singly, args=(consumer, 0, 4, into), daemon=True)
    getting.start()
    while producer.stats()["transfers"]["waiting"] < 4:
        assert getting.is_alive()
    for number in range(20):
        most = max(most, producer.stats()["transfers"]["waiting"])
        producer.put(payload_of(0, number, data.tensor(0, number)))
    getting.join(20)
    into.end()
    assert (most, into.result()["wrong"]) == (4, 0)


@pytest.mark.parametrize("batch", [0, 2])
def test_the_producer_keeps_no_more_live_than_it_may(
    pair: tuple[KVProducer, KVConsumer], batch: int
) -> None:
    """The reader begins when 4 payloads are live."""
    producer, consumer = pair
    data, live = ChunkBytes(PACED), list[int]()
    tensors = [data.tensor(0, number) for number in range(20)]

    def put() -> None:
        put_run(producer, 0, tensors, 4, batch)

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    while producer.stats()["transfers"]["live"] < 4:
        assert putting.is_alive()
    for number in range(20):
        with consumer.get(key_of(0, number), timeout=10.0) as payload:
            live.append(producer.stats()["transfers"]["live"])
            del payload
    putting.join(20)
    assert not putting.is_alive()
    assert max(live) == 4


def _pipe(folder: Path) -> tuple[Pipe, Pipe]:
    path = str(folder / "pipe")
    os.mkfifo(path)
    os.mkfifo(path + "-back")
    sender = Pipe(path, is_sender=True)
    receiver = Pipe(path, is_sender=False)
    sender.connect()
    return sender, receiver


def _read(fd: int, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        found += os.read(fd, nbytes - len(found))
    return found
