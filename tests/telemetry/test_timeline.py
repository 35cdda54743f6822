"""The timeline: files of processes, merged to one that follows the Trace Event Format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVCacheTransferData, KVLink, TensorTransferData, TransferTimeout
from omni_kvlink.cli.commands import run
from omni_kvlink.errors import FileError, MissingFileError
from omni_kvlink.telemetry import timeline
from omni_kvlink.telemetry.timeline import SUFFIX, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 9
READER = """
import sys
from omni_kvlink import KVLink
url, directory = sys.argv[1:]
with KVLink.connect(url, timeout=60, directory=directory) as consumer:
    with consumer.stream_get("cache", timeout=60) as stream:
        for layer in stream:
            pass
    consumer.get("whole", timeout=60).release()
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """A directory that this process records to."""
    timeline.record(tmp_path / "trace")
    yield tmp_path / "trace"
    timeline.stop()


def send(sockets: str, *, reader: Path | None = None) -> None:
    """Send a cache layer by layer, and a payload, to a reader: in this process, or another one."""
    rows = torch.ones(4, 2, 4)
    about = {"kv_lens": [4], "ropes": [4], "num_layers": LAYERS}
    cache = KVCacheTransferData.blank("cache", row=(2, 4), dtype=torch.float32, metadata=about)
    with KVLink.serve("shm://timed", directory=sockets) as producer:
        environment = {**os.environ, "KVLINK_TRACE": str(reader)}
        child = subprocess.Popen(
            [sys.executable, "-c", READER, producer.url, sockets], env=environment
        )
        with producer.stream_put(cache) as out:
            for layer in range(LAYERS):
                out.write_layer(layer, rows, rows)
        receipt = producer.put(TensorTransferData("whole", {"h": rows}))
        receipt.wait(timeout=60)
        assert child.wait() == 0


def check_format(events: list[dict[str, Any]]) -> None:
    """Check what viewers require of a document in the Trace Event Format.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in "XMsfi"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            assert isinstance(event["id"], int)
    for slices in tracks.values():  # of one thread they lie in or behind each other
        opened: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while opened and opened[-1] <= start:
                opened.pop()
            assert not opened or end <= opened[-1]
            opened.append(end)
    slices_of = [event for event in events if event["ph"] == "X"]
    for arrow in (event for event in events if event["ph"] in "sf"):
        around = [
            each["name"]
            for each in slices_of
            if (each["pid"], each["tid"]) == (arrow["pid"], arrow["tid"])
            and each["ts"] <= arrow["ts"] < each["ts"] + each["dur"]
        ]
        assert {"s": "put", "f": "get"}[arrow["ph"]] in around


def test_two_processes_on_one_axis(recorded: Path, sockets: str, tmp_path: Path) -> None:
    """The reader records because of its environment; the verb merges, and the copy is found."""
    send(sockets, reader=recorded)
    timeline.stop()
    assert run(["trace", str(recorded), "-o", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_format(events)
    processes = {event["pid"] for event in events}
    assert len(processes) == 2
    slices = [event for event in events if event["ph"] == "X"]
    [copy] = [event for event in slices if event["name"] == "copy layer 7"]
    assert copy["pid"] == os.getpid()
    assert copy["args"] == {**copy["args"], "key": "cache", "layer": 7, "branch": "kv"}
    [arrived] = [event for event in slices if event["name"] == "wait for layer 7"]
    assert arrived["pid"] != os.getpid()
    assert arrived["ts"] + arrived["dur"] >= copy["ts"]  # one clock
    [put] = [e for e in slices if e["name"] == "put" and e["args"]["key"] == "cache"]
    assert put["ts"] <= copy["ts"]
    assert copy["ts"] + copy["dur"] <= put["ts"] + put["dur"]
    by_arrow: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            by_arrow.setdefault(event["id"], []).append(event["ph"])
    assert sorted(map(sorted, by_arrow.values())) == [["f", "s"], ["f", "s"]]


def test_failures_and_phases(recorded: Path, sockets: str) -> None:
    with (
        KVLink.serve("shm://timed", directory=sockets) as producer,
        KVLink.connect("shm://timed", timeout=60, directory=sockets) as consumer,
    ):
        receipt = producer.put(TensorTransferData("a", {"h": torch.ones(1 << 18)}))
        with (received := consumer.get("a", timeout=60)):
            received.scatter([torch.empty(1 << 18)])
        receipt.wait(timeout=60)
        with pytest.raises(TransferTimeout):
            consumer.get("none", timeout=0)
    timeline.stop()
    events = Timeline(recorded).events
    check_format(events)
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert set(names) == {
        *("put", "plan", "reserve", "copy", "publish"),
        *("get", "wait", "view", "scatter"),
    }
    failed = [e for e in events if "error" in e.get("args", {})]
    assert [event["args"]["key"] for event in failed] == ["none"]
    assert failed[0]["args"]["error"].startswith("TransferTimeout: ")
    assert [event["name"] for event in events if event["ph"] == "i"] == ["receipt released"]


HEAD = {"kvlink_trace": 1, "pid": 5, "process": "p", "host": "h", "boot": "x", "wall": 1000.0}


def write(directory: Path, name: str, head: dict[str, Any], *events: dict[str, Any]) -> None:
    lines = [json.dumps(each) for each in ({**HEAD, **head}, *events)]
    (directory / f"{name}{SUFFIX}").write_text("\n".join(lines) + "\n")


def event(ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    about = {"args": {"key": "k"}, "pid": 5, "tid": tid, "cat": "kvlink"}
    return {"ph": "X", "name": "get", "ts": ts, "dur": dur, **about}


def test_another_machine_is_aligned_by_its_wall_clock(tmp_path: Path) -> None:
    write(tmp_path, "a", {}, event(10, 1))
    write(tmp_path, "b", {"wall": 990.0}, event(11, 1))  # the same clock, and another pid's name
    write(tmp_path, "c", {"boot": "y", "wall": 5000.0}, event(10, 1))
    merged = Timeline(tmp_path)
    assert (merged.processes, merged.machines, merged.torn) == (3, 2, 0)
    slices = [each for each in merged.events if each["ph"] == "X"]
    assert [each["ts"] for each in slices] == [10, 11, 4010]
    assert len({each["pid"] for each in slices}) == 3


def test_slices_that_overlap_lie_beside_each_other(tmp_path: Path) -> None:
    """As the gets of asyncio's tasks, which have one thread."""
    write(tmp_path, "a", {}, event(10, 5), event(12, 5), event(13, 1), event(18, 1))
    merged = Timeline(tmp_path)
    check_format(merged.events)
    lanes = [each["tid"] for each in merged.events if each["ph"] == "X"]
    assert lanes[0] == lanes[2] == lanes[3] == 1
    assert lanes[1] != 1


def test_a_process_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a", {}, event(10, 1))
    with (tmp_path / f"a{SUFFIX}").open("a") as file:
        file.write('{"ph": "X", "na')
    assert run(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    assert "1 lines are torn" in capsys.readouterr().out
    check_format(json.loads((tmp_path / "out.json").read_text())["traceEvents"])


def test_what_is_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingFileError, match="KVLINK_TRACE"):
        Timeline(tmp_path)
    assert run(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    write(tmp_path, "a", {"kvlink_trace": 2})
    with pytest.raises(FileError, match="version 2"):
        Timeline(tmp_path)
    (tmp_path / f"a{SUFFIX}").write_text("")
    with pytest.raises(FileError, match="no timeline"):
        Timeline(tmp_path)


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that would record says so when it is opened."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLINK_TRACE", str(tmp_path / "file" / "trace"))
    with pytest.raises(FileError, match="trace"):
        KVLink.serve("shm://timed")


def test_a_process_is_named_without_its_arguments(tmp_path: Path) -> None:
    """They may have secrets."""
    secret = "--token=1234"
    program = "import sys; from omni_kvlink.telemetry import timeline; timeline.record(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path), secret], check=True)
    timeline.record(tmp_path, "prefill-0")
    timeline.stop()
    heads = [json.loads(path.read_bytes().splitlines()[0]) for path in tmp_path.iterdir()]
    names = {head["process"] for head in heads}
    assert len(names) == 2
    assert "prefill-0" in names
    assert not any(secret in name for name in names)
