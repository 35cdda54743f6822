"""`kvlink-bench latency` of 4 KB beside vLLM-Omni's SharedMemoryConnector, where that is there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench.commands import run

if TYPE_CHECKING:
    from pathlib import Path

INSTALLED = importlib.util.find_spec("vllm_omni") is not None
TINY = ["latency", "--preset", "tiny", "--rounds", "3", "--warmup", "1"]
CONNECTOR = """
import os

import numpy as np
import torch

print("vllm_omni prints at its import")


class SharedMemoryConnector:
    def __init__(self, config):
        self._folder = os.environ["SUBSTITUTE_FOLDER"]

    def put(self, from_stage, to_stage, key, data):
        arrays = {name: one.numpy() ^ FLIP for name, one in data.items()}
        path = os.path.join(self._folder, key)
        np.savez(path + ".new.npz", **arrays)
        os.rename(path + ".new.npz", path)
        return True, 0, {}

    def get(self, from_stage, to_stage, key):
        path = os.path.join(self._folder, key)
        if not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            found = {name: torch.from_numpy(one) for name, one in np.load(file).items()}
        os.remove(path)
        return found, 0

    def close(self):
        pass
"""
"""A substitute with the calls of vLLM-Omni's, for machines without it."""


def measure(folder: Path, *, flip: int) -> subprocess.CompletedProcess[str]:
    """Run the command with the substitute."""
    package = folder / "vllm_omni" / "distributed" / "omni_connectors" / "connectors"
    package.mkdir(parents=True)
    (package / "shm_connector.py").write_text(CONNECTOR.replace("FLIP", str(flip)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "SUBSTITUTE_FOLDER": str(folder)}
    command = [sys.executable, "-m", "omni_kvlink.bench", *TINY, "--json", "-"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.skipif(INSTALLED, reason="vLLM-Omni is installed")
def test_a_substitute_is_polled_and_measured(tmp_path: Path) -> None:
    done = measure(tmp_path, flip=0)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    check(results)
    assert os.listdir(tmp_path) == ["vllm_omni"]


@pytest.mark.skipif(INSTALLED, reason="vLLM-Omni is installed")
def test_a_wrong_byte_of_a_substitute_is_found(tmp_path: Path) -> None:
    done = measure(tmp_path, flip=1)
    assert done.returncode == 1
    assert "other bytes came through vLLM-Omni's connector" in done.stderr


@pytest.mark.skipif(INSTALLED, reason="vLLM-Omni is installed")
def test_the_report_says_that_it_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TINY) == 0
    assert "its SharedMemoryConnector is not compared" in capsys.readouterr().out


@pytest.mark.skipif(not INSTALLED, reason="vllm_omni")
def test_the_installed_one_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert run([*TINY, "--json", str(path)]) == 0
    check(json.loads(path.read_text())["results"])
    assert "vllm omni shm" in capsys.readouterr().out


def check(results: dict[str, Any]) -> None:
    theirs, ours = results["vllm_omni_shm_ms"], results["milliseconds"]["total"]
    assert 0 < theirs["min"] <= theirs["p50"] <= theirs["p99"]
    assert results["vllm_omni_shm_ratio"] == pytest.approx(ours["p50"] / theirs["p50"], rel=0.01)
    assert not any("not installed" in note for note in results["notes"])
