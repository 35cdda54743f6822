"""The suite of hostile neighbours runs, and finds nothing; its times are not judged here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hostile.py"


TCP = ("zmq+tcp", "zmq+tcp-keys", "ucx", "auto")


REPEATED = ("shm-sealed", "zmq+ipc", "zmq+tcp")
"""Whose code the others run, too."""


@pytest.mark.parametrize(
    "connector",
    [
        pytest.param(each, marks=pytest.mark.slow) if each in REPEATED else each
        for each in ("shm", "shm-sealed", "zmq+ipc", *TCP)
    ],
)
def test_an_honest_pair_beside_an_attacker(tmp_path: Path, connector: str) -> None:
    if connector == "ucx" and importlib.util.find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed: make test-ucx")
    document = tmp_path / "hostile.json"
    options = ["--connector", connector, "--minutes", "0.03", "--no-times"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (row,) = json.loads(document.read_text())["results"]["rows"]
    assert row["problems"] == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert row["read"]["right"] > 0
    assert sum(row["made"]["reached"].values()) + sum(row["made"]["denied"].values()) > 0
    if connector in TCP:
        assert row["made"]["reached"]["ZMTP 2"] > 0
