"""Ctrl-C, pressed in a terminal at given moments of real commands: one line, nothing is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from omni_kvlink.testing.rig import until
from support.faults.leak_checks import left_over, shm_files
from support.processes.command_process import Terminal
from support.processes.fork_server import new_interpreters

if TYPE_CHECKING:
    from collections.abc import Iterator

VERIFY = ("-m", "omni_kvlink.bench", "verify", "--quick", "--corrupt", "7")
ENDLESS = ("kvlink-bench", "latency", "--preset", "tiny", "--rounds", "1000000")
SPAWN = f"subprocess.Popen {sys.executable}"


@pytest.fixture
def folder(sockets: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a command's sockets and temporary files; it must be empty at the end."""
    before = shm_files()
    yield Path(sockets)
    until(lambda: not left_over(before), "no file in /dev/shm is left")


def check_interrupted(terminal: Terminal, command: str) -> None:
    """One line after what the terminal itself echoes, the terminal as before, and no process."""
    status, shown = terminal.wait()
    assert status == 130, shown
    assert lines_of(shown) == [f"{command}: interrupted"], shown
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l"), "the cursor is hidden"
    assert terminal.after == terminal.before
    assert terminal.session() == []


def lines_of(shown: str) -> list[str]:
    """What can be read, without the terminal's echo and the progress bar."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\^C", "", shown)
    return [one for one in re.split(r"[\r\n]+", text) if one and not one.startswith("rounds ")]


@pytest.mark.parametrize(
    "event", ["import argparse", "import torch", pytest.param(SPAWN, marks=pytest.mark.slow)]
)
def test_ctrl_c_while_a_benchmark_starts(event: str, folder: Path) -> None:
    check_interrupted(Terminal(ENDLESS, folder, event=event), "kvlink-bench")


def test_ctrl_c_while_a_benchmark_measures(folder: Path) -> None:
    terminal = Terminal(ENDLESS, folder)
    terminal.wait_for(b"rounds")
    terminal.press_ctrl_c()
    check_interrupted(terminal, "kvlink-bench")


def test_ctrl_c_while_a_checkpoint_is_checked(folder: Path) -> None:
    command = ("kvlink", "check-checkpoint", str(folder))
    check_interrupted(Terminal(command, folder, event="import torch"), "kvlink")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_ctrl_c_at_any_event(seed: int, folder: Path) -> None:
    """An audit event is an import, an opened file, a socket, a process, …: there are thousands."""
    number = int(10 ** random.Random(seed).uniform(1, 4.3))
    terminal = Terminal(ENDLESS, folder, event="", number=number)
    check_interrupted(terminal, "kvlink-bench")


def test_ctrl_c_before_the_work_begins_does_nothing(folder: Path, tmp_path: Path) -> None:
    command = ("kvlink", "keygen", str(tmp_path / "keys"), "a")
    check_interrupted(Terminal(command, folder, event=""), "kvlink")
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("number", range(10, 900, 220))
def test_ctrl_c_leaves_both_keys_or_none(number: int, folder: Path, tmp_path: Path) -> None:
    command = ("kvlink", "keygen", str(tmp_path / "keys"), "a")
    terminal = Terminal(command, folder, event="", number=number)
    status, shown = terminal.wait()
    made = sorted(one.name for one in tmp_path.glob("keys/*"))
    assert made in ([], ["a.public", "a.secret"])
    assert status == 130 or made, shown
    assert "Traceback" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGTERM, 143, "ended by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_for_the_command_alone(number: int, status: int, text: str, folder: Path) -> None:
    terminal = Terminal(ENDLESS, folder)
    terminal.wait_for(b"rounds")
    terminal.process.send_signal(number)
    found, shown = terminal.wait()
    assert (found, terminal.session()) == (status, [])
    assert shown.endswith(f"kvlink-bench: {text}\r\n")


@pytest.mark.slow
def test_a_measuring_process_that_is_killed_is_reported(folder: Path) -> None:
    terminal = Terminal(ENDLESS, folder)
    terminal.wait_for(b"rounds")
    children = Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    status, shown = terminal.wait()
    assert (status, terminal.session()) == (2, [])
    assert shown.endswith("the process was ended by SIGKILL; is there enough memory (`dmesg`)?\r\n")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_that_goes_is_no_error(option: str, folder: Path) -> None:
    assert status_without_a_reader("-m", "omni_kvlink.bench", option, folder=folder) == 0


def test_a_text_that_nobody_reads_is_no_error(folder: Path) -> None:
    program = "from omni_kvlink.cli.process import show; show('one'); show('two')"
    assert status_without_a_reader("-c", program, folder=folder) == 0


@pytest.mark.slow
def test_a_reader_that_goes_hides_no_failure(folder: Path) -> None:
    assert status_without_a_reader(*VERIFY, folder=folder) == 1


def status_without_a_reader(*arguments: str, folder: Path) -> int:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    read, write = os.pipe()
    os.close(read)
    with new_interpreters():
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert b"Broken" not in done.stderr
    assert b"Traceback" not in done.stderr
    return done.returncode


def test_a_full_disk_is_one_line(folder: Path) -> None:
    with new_interpreters(), open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "omni_kvlink.bench", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("kvlink-bench: FileError: standard output: No space left")
    assert done.stderr.count("\n") == 1
