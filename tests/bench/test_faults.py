"""The campaign of random faults finds nothing, over each connector; its judge has its own tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "connector", ["shm", "shm-sealed", "shm-contained", "zmq+ipc", "zmq+tcp", "auto"]
)
def test_random_faults(tmp_path: Path, connector: str) -> None:
    document = tmp_path / "faults.json"
    options = ["--connector", connector, "--faults", "4", "--kind", "kill", "--kind", "freeze"]
    options += ["--kind", "cut"]  # over TCP
    if connector != "zmq+ipc":
        options += ["--kind", "descriptors"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (run,) = json.loads(document.read_text())["results"]["runs"]
    assert run["problems"] == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert len(run["faults"]) == 4
    assert run["events"]["read"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["shm", "zmq+tcp"])
def test_random_faults_of_a_store(tmp_path: Path, connector: str) -> None:
    document = tmp_path / "faults.json"
    options = ["--topology", "store", "--connector", connector, "--faults", "4"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(document)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (run,) = json.loads(document.read_text())["results"]["runs"]
    assert run["problems"] == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert len(run["faults"]) == 4
    assert run["topology"] == "store"
    assert f"{connector}, store" in done.stdout
    assert run["events"]["found"] > 20
    assert run["events"]["read"] > 20
