"""`kvlink record` and `kvlink replay` as processes: every connector, wrong usage, kills."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink
from omni_kvlink.cli.commands import run
from omni_kvlink.inspection import Recorder, read_recording
from omni_kvlink.testing.caches import Recipe
from support.connectors.zmq_addresses import free_port
from support.payloads.payload_files import flip
from support.payloads.small_payloads import MAKERS, tensors
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
SCHEMES = ["shm", "zmq+ipc", "zmq+tcp"] + ["ucx"] * bool(importlib.util.find_spec("ucxx"))


def address(scheme: str, folder: Path) -> str:
    if scheme == "zmq+ipc":
        return f"zmq+ipc://{folder}/s"
    options = "?trusted_network=1" if scheme == "ucx" else ""
    where = folder.name if scheme == "shm" else f"127.0.0.1:{free_port()}"
    return f"{scheme}://{where}{options}"


PROGRAM = """
import signal, sys
from omni_kvlink.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what ends in &
sys.exit(main())
"""


@contextlib.contextmanager
def kvlink(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of `kvlink`; one that is left running is killed."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with new_interpreters():
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    with process:
        try:
            yield process
        finally:
            process.kill()


def written_to(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def lines_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def record(folder: Path, count: int = 3) -> list[str]:
    """A recording of small payloads of each kind; their keys."""
    keys, makers, choose = list[str](), list(MAKERS.values()), random.Random(5)
    with (
        KVLink.serve("inproc://recorded") as producer,
        Recorder(KVLink.connect("inproc://recorded", timeout=5.0), folder) as consumer,
    ):
        for number in range(count):
            keys.append(f"req-{number}")
            producer.put(makers[number % len(makers)](keys[-1], seed=choose.randrange(1 << 20)))
            consumer.get(keys[-1], timeout=5.0).release()
    return keys


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_recorded_transfers_are_replayed_bit_for_bit(
    scheme: str, count: int, tmp_path: Path
) -> None:
    first, again, sent = tmp_path / "first", tmp_path / "again", tmp_path / "sent.txt"
    keys = record(first, count)
    url = address(scheme, tmp_path)
    (tmp_path / "keys").write_text("\n".join(keys) + "\n")
    options = "--speed", "max", "--digests", sent
    with (
        kvlink("replay", first, url, *options) as replay,
        kvlink("record", url, again, "--keys-from", tmp_path / "keys") as recorder,
    ):
        received, errors = recorder.communicate()
        assert recorder.returncode == 0, errors
        served, errors = replay.communicate()
        assert replay.returncode == 0, errors
    committed = (first / "digests.txt").read_text()
    assert len(committed.splitlines()) == count
    assert committed == sent.read_text() == served == received
    assert committed == (again / "digests.txt").read_text()
    for entry in read_recording(first):
        assert (first / entry.file).read_bytes() == (again / entry.file).read_bytes()


def test_a_recorder_is_a_second_reader(tmp_path: Path) -> None:
    url = address("shm", tmp_path)
    with (
        KVLink.serve(url) as producer,
        KVLink.connect(url, timeout=5.0) as consumer,
        kvlink("record", url, tmp_path / "r", "--keys-from", "-") as recorder,
    ):
        keys = written_to(recorder)
        for number in range(3):
            receipt = producer.put(tensors(f"req-{number}"), readers=2)
            print(f"req-{number}", file=keys, flush=True)
            data: Any
            with consumer.get(f"req-{number}", timeout=60.0) as data:
                assert not data.difference(tensors(f"req-{number}"))
            assert lines_of(recorder).readline().endswith(f"  req-{number}\n")
            receipt.wait(timeout=60.0)
        keys.close()
        assert recorder.wait() == 0
    assert [one.key for one in read_recording(tmp_path / "r")] == ["req-0", "req-1", "req-2"]


def test_a_killed_recorder_leaves_what_came_before(tmp_path: Path) -> None:
    url = address("shm", tmp_path)
    with (
        KVLink.serve(url) as producer,
        kvlink("record", url, tmp_path / "r", "--key", "a", "--key", "never") as recorder,
    ):
        producer.put(tensors("a"))
        assert lines_of(recorder).readline().endswith("  a\n")
        recorder.send_signal(signal.SIGKILL)
        recorder.wait()
    [entry] = read_recording(tmp_path / "r")
    assert run(["inspect", str(tmp_path / "r" / entry.file)]) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_ended_gives_its_name_back(number: signal.Signals, tmp_path: Path) -> None:
    record(tmp_path / "r")
    url = address("shm", tmp_path)
    for _ in range(2):
        with kvlink("replay", tmp_path / "r", url, "--speed", "max") as replay:
            for _ in range(3):
                assert lines_of(replay).readline()
            replay.send_signal(number)
            assert replay.wait() == 128 + number


def test_a_payload_that_is_not_received_ends_with_1(tmp_path: Path, capsys: Captured) -> None:
    record(tmp_path / "r", 1)
    url = address("shm", tmp_path)
    assert run(["replay", str(tmp_path / "r"), url, "--speed", "max", "--ttl", "0.05"]) == 1
    assert "'req-0' was not received" in capsys.readouterr().err


def test_wrong_bytes_end_with_1_and_name_the_file(tmp_path: Path, capsys: Captured) -> None:
    url = address("shm", tmp_path)
    with KVLink.serve(url) as producer:
        plan = Recipe("r").make()
        allocation = producer.allocate(plan)
        engine: Any = allocation.data.tensors()[0]
        producer.put(allocation.data)
        engine[0] = 5
        assert run(["record", url, str(tmp_path / "r"), "--key", "r"]) == 1
        del engine, allocation
    assert "000001.safetensors is not as it was committed" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "r" / "000001.safetensors")]) == 1


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["record", "shm://none", "{r}", "--key", "a", "--timeout", "0.05"], "Timeout"),
        (["record", "zmq+tcp://127.0.0.1:1", "{r}", "--key", "a", "--timeout", "0.05"], "Timeout"),
        (["record", "shm://none", "{file}", "--key", "a"], "exists"),
        (["record", "shm://none", "{old}", "--key", "a"], "give another directory"),
        (["record", "shm://none", "{r}", "--keys-from", "{r}/none"], "another --keys-from"),
        (["record", "shm://none", "{r}", "--keys-from", "{binary}"], "is no text"),
        (["record", "shm://none", "{r}", "--keys-from", "{dir}"], "another --keys-from"),
        (["record", "none://none", "{r}", "--key", "a"], "no connector"),
        (["record", "shm://none", "{r}", "--key", "a", "--keys-from", "x"], "not allowed with"),
        (["replay", "{dir}", "shm://x"], "index.jsonl"),
        (["replay", "{file}", "shm://x"], "index.jsonl"),
        (["replay", "{old}", "none://x"], "no connector"),
        (["replay", "{old}", "shm://x", "--speed", "0"], "max or a number"),
        (["replay", "{old}", "shm://x", "--speed", "fast"], "max or a number"),
        (["replay", "{old}", "shm://x", "--digests", "{dir}"], "--digests"),
        (["replay", "{old}", "zmq+tcp://127.0.0.1:{port}"], "in use"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line(
    command: list[str], text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("x\n")
    (tmp_path / "binary").write_bytes(b"\xff\n")
    (tmp_path / "dir").mkdir()
    record(tmp_path / "old")
    paths = {name: str(tmp_path / name) for name in ("r", "file", "binary", "dir", "old")}
    with KVLink.serve("zmq+tcp://127.0.0.1:0") as producer:
        paths["port"] = producer.url.rpartition(":")[2]
        try:
            status = run([part.format(**paths) for part in command])
        except SystemExit as ended:
            status = int(ended.code or 0)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert text in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_hostile_index_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "r").mkdir()
    for text in (b"\xff\n", b"[" * 100_000 + b"\n", b"{}\n", b'{"file": 1}\n', b"null\n"):
        (tmp_path / "r" / "index.jsonl").write_bytes(text)
        assert run(["replay", str(tmp_path / "r"), "shm://hostile"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_recorded_file_that_is_gone_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    record(tmp_path / "r")
    os.unlink(tmp_path / "r" / "000001.safetensors")
    assert run(["replay", str(tmp_path / "r"), address("shm", tmp_path)]) == 2
    assert "000001.safetensors: No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bit_of_a_recorded_large_payload_is_located(tmp_path: Path, capsys: Captured) -> None:
    url = address("shm", tmp_path)
    shape = {"layers": 28, "tokens": 4096, "heads": 4, "dim": 128}
    with (
        KVLink.serve(url, quota="1GB") as producer,
        kvlink("record", url, tmp_path / "r", "--key", "large") as recorder,
    ):
        producer.put(Recipe("large", **shape).make())  # type: ignore[arg-type]
        _, errors = recorder.communicate()
        assert recorder.returncode == 0, errors
    path = tmp_path / "r" / "000001.safetensors"
    nbytes = path.stat().st_size
    assert nbytes > 234e6
    choose = random.Random(11)
    offset, bit = choose.randrange(8192, nbytes), choose.randrange(8)
    flip(path, offset, 1 << bit)
    assert run(["inspect", str(path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "WRONG: 1 of " in printed
    assert f"it is bit {bit} of byte" in printed
    assert f"byte {offset} of the file" in printed
