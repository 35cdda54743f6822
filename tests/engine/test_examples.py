"""The engine's examples run, and say that what they made is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.engine.fixtures import WAIT
from support.processes.fork_server import NESTED

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, where: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=2 * WAIT,
        env={**os.environ, NESTED: "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_many_requests_over_three_connectors(tmp_path: Path) -> None:
    output = run("engine_two_stage.py", tmp_path, "--requests", "4", "--steps", "4", "--batch", "1")
    assert output.count("4 of 4 images bit-exact") == 3
    assert output.count(" 0 held at the end") == 3


def test_the_same_with_workers_in_processes_of_their_own(tmp_path: Path) -> None:
    how = ("--executor", "mp", "--requests", "2", "--steps", "3", "--batch", "1")
    output = run("engine_two_stage.py", tmp_path, *how)
    assert output.count("2 of 2 images bit-exact") == 3


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    output = run("add_model.py", tmp_path, "--steps", "3")
    assert "3 of 3 images bit-exact" in output


def test_three_stages(tmp_path: Path) -> None:
    assert "both as in one process: bit-exact" in run("intermediate_stage.py", tmp_path)
    assert (tmp_path / "out" / "final.png").exists()
