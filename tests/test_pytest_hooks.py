"""What conftest.py does for every run: a failure is named at once, and late tests are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support import FOLDER
from support.processes.fork_server import SWITCH

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
import subprocess, time

def test_wrong():
    assert 1 + 1 == 3, "a sum"

def test_right():
    {right}
"""
SLEEP = "time.sleep(0)"
IS_PLAIN = "assert not subprocess.Popen.__module__.startswith('support')"


def run(folder: Path, *options: str, right: str = SLEEP, **environment: str) -> str:
    """The output of pytest with this conftest, for the two tests above."""
    (folder / "test_two.py").write_text(TESTS.format(right=right))
    path = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("options", [("-n", "0"), ("-n", "1")], ids=["here", "a worker"])
def test_a_failure_is_named_before_the_last_test(tmp_path: Path, options: tuple[str, ...]) -> None:
    lines = run(tmp_path, *options).splitlines()
    named = next(line for line in lines if line.startswith("FAILED"))
    assert named == "FAILED test_two.py::test_wrong (call): AssertionError: a sum"
    assert lines.index(named) < next(n for n, line in enumerate(lines) if "100%" in line)


def test_tests_that_would_begin_late_are_skipped(tmp_path: Path) -> None:
    assert "2 skipped" in run(tmp_path, "-n", "0", "--seconds", "0")


@pytest.mark.parametrize(("switch", "passed"), [("0", "1 passed"), ("1", "2 failed")])
def test_the_fork_server_can_be_switched_off(tmp_path: Path, switch: str, passed: str) -> None:
    assert passed in run(tmp_path, "-n", "0", right=IS_PLAIN, **{SWITCH: switch})
