"""`kvlink store` as a process: its lines, its signals, and a directory that outlives SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink.cli.commands import run
from omni_kvlink.kept import StoreClient
from omni_kvlink.testing.rig import until
from support.kept.store_process import (
    KEEPER,
    STORE,
    next_line,
    program,
    store_process,
    until_reachable,
)
from support.payloads.small_payloads import tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def root() -> Iterator[str]:
    """A directory of sockets, which processes may leave there when they are killed."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as root:
        yield root


def test_sigterm_drains_and_ends_with_0(root: str, tmp_path: Path) -> None:
    files, where = tmp_path / "files", f"?directory={root}"
    options = "--budget", "8MiB", "--directory", files
    with store_process(f"shm://s{where}", *options) as store:
        with program(KEEPER, f"shm://w{where}", 0, 20, f"shm://s{where}") as writer:
            assert next_line(writer) == "kept\n"
            output, _ = writer.communicate("drain\n")
            assert output == "drained True\n"
        store.send_signal(signal.SIGTERM)
        output, errors = store.communicate()
        assert store.returncode == 0, errors
        assert "20 in files" in output.splitlines()[-1]
        assert errors == "writing what is in memory alone\n"
    assert len([name for name in os.listdir(files) if name.endswith(".safetensors")]) == 20
    with store_process(f"shm://s{where}", *options) as store:
        with StoreClient("shm://r", stores=["shm://s"], directory=root, timeout=60.0) as reader:
            until_reachable(reader)
            received = reader.get_many([f"k{number}" for number in range(20)])
            for number, data in enumerate(received):
                assert data is not None
                assert data.data.difference(tensors(f"k{number}", seed=number)) == ""  # type: ignore[arg-type]
                data.release()
        store.send_signal(signal.SIGINT)
        assert store.wait() == 0


def test_what_a_full_disk_refused_is_written_at_the_end(root: str, tmp_path: Path) -> None:
    """The disk is a file system of 64 KiB, which has grown before the store ends."""
    files = tmp_path / "files"
    files.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(files)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system here")
    where = f"?directory={root}"
    try:
        with store_process(f"shm://s{where}", "--budget", "8MiB", "--directory", files) as store:
            with program(KEEPER, f"shm://w{where}", 0, 30, f"shm://s{where}") as writer:
                writer.communicate("drain\n")
            assert 0 < len(os.listdir(files)) < 30
            with StoreClient("shm://r", stores=["shm://s"], directory=root) as reader:
                until_reachable(reader)
                assert all(reader.contains([f"k{number}" for number in range(30)]))
            grow = ["mount", "-o", "remount,size=1m", str(files)]
            subprocess.run(grow, check=True)
            store.send_signal(signal.SIGTERM)
            output, errors = store.communicate()
            assert store.returncode == 0, errors
            assert "30 in files" in output.splitlines()[-1]
    finally:
        subprocess.run(["umount", str(files)], check=True)


def test_lines_of_progress(root: str) -> None:
    where = f"?directory={root}"
    arguments = "store", f"shm://s{where}", "--budget", "8MiB", "--stats-seconds", "0.05"
    with program(STORE, *arguments) as store:
        assert (
            next_line(store) == f"serving shm://s{where} for writers at shm://*; Ctrl-C ends it\n"
        )
        assert next_line(store).startswith("0 payloads in memory, 0.0 MB; 0 writers; 0 fetched")
        with StoreClient("shm://w", stores=["shm://s"], directory=root) as writer:
            writer.put("a", {"x": torch.ones(100_000)})
            assert writer.drain(timeout=60)
            line = ""
            while "1 payloads in memory, 0.4 MB; 1 writers; 1 fetched" not in line:
                line = next_line(store)
        store.send_signal(signal.SIGTERM)
        assert store.wait() == 0


def test_two_stores_of_one_directory(root: str, tmp_path: Path) -> None:
    options = "--budget", "8MiB", "--directory", tmp_path / "files"
    with (
        store_process(f"shm://a?directory={root}", *options),
        program(STORE, "store", f"shm://b?directory={root}", *options) as second,
    ):
        _, errors = second.communicate()
        assert second.returncode == 2
        assert "BusyError" in errors
        assert "another store uses this directory" in errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["shm://s"], "--budget"),
        (["shm://s", "--budget", "much"], "much"),
        (["shm://s", "--budget", "1GB", "--writers", "nothing://*"], "no connector nothing"),
        (["shm://s", "--budget", "1GB", "--directory", "/proc/x"], "/proc/x"),
        (["nothing://s", "--budget", "1GB"], "nothing"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str, capsys: Captured) -> None:
    try:
        status = run(["store", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    assert status == 2
    assert text in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_a_store_that_is_killed_while_it_writes(seed: int, root: str, tmp_path: Path) -> None:
    """What is there after it is bit-equal; no file is torn; what is not there is a miss."""
    choose, files, where = random.Random(seed), tmp_path / "files", f"?directory={root}"
    options = f"shm://s{where}", "--budget", "8MiB", "--directory", files
    last = 0
    with program(KEEPER, f"shm://w{where}", 0, 2000, f"shm://s{where}") as writer:
        for _ in range(3):
            with store_process(*options) as store:
                first, more = last, choose.randrange(1, 60)
                until(lambda first=first, more=more: count(files) > first + more, "more files")  # type: ignore[misc]
                store.kill()
                store.wait()
            last = count(files)
        assert writer.poll() is None
    with (
        store_process(*options),
        StoreClient("shm://r", stores=["shm://s"], directory=root, timeout=60.0) as reader,
    ):
        until_reachable(reader)
        found = 0
        for first in range(0, 2000, 64):
            keys = [f"k{number}" for number in range(first, min(first + 64, 2000))]
            for number, data in enumerate(reader.get_many(keys), first):
                if data is not None:
                    found += 1
                    expected = tensors(f"k{number}", seed=number)
                    assert data.data.difference(expected) == ""  # type: ignore[arg-type]
                    data.release()
        assert found >= last
        missed = reader.stats()["misses"]
        assert missed["absent"] == 2000 - found
        assert missed["damaged"] == missed["unreachable"] == 0


def count(files: Path) -> int:
    """Payloads in a directory."""
    return len([name for name in os.listdir(files) if name.endswith(".safetensors")])
