"""The example of prefill and decode apart: its verdict over each connector; it can be lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kvlink import UnavailableError
from omni_kvlink.connectors.registry import backend, split_url
from support.processes.fork_server import NESTED

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: make test-hf"
)
IS_OLD = int(transformers.__version__.split(".")[0]) < 5

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pd_transformers.py"
URLS = ["shm://pd", "zmq+tcp://127.0.0.1:0", "ucx://127.0.0.1:0?trusted_network=1"]


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XDG_RUNTIME_DIR": str(root), NESTED: "1"},
        check=False,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("url", URLS, ids=lambda url: split_url(url)[0])
def test_two_processes_equal_one(tmp_path: Path, url: str, dtype: str) -> None:
    try:
        backend(split_url(url)[0])
    except UnavailableError as error:
        pytest.skip(str(error))
    done = run(tmp_path, "--connector", url, "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 prompts complete" in done.stdout  # the forward pass was left out
    assert "tokens  identical: 1 of 1" in done.stdout
    assert "logits  identical: 1 of 1" in done.stdout


@pytest.mark.skipif(IS_OLD, reason="two minutes, with the newest transformers alone")
@pytest.mark.timeout(400)
def test_two_hundred_prompts(tmp_path: Path) -> None:
    """Two producers and two consumers; every kind of match occurs, and evictions."""
    sides = ("--producers", "2", "--consumers", "2")
    done = run(tmp_path, "--prompts", "200", *sides, "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits  identical: 200 of 200" in done.stdout
    numbers = re.search(
        r"(\d+) prompts complete, (\d+) in part, (\d+) missed\n  evicted (\d+)", done.stdout
    )
    assert numbers
    assert all(int(number) >= 5 for number in numbers.groups()), done.stdout


def test_the_verdict_can_be_lost(tmp_path: Path) -> None:
    """One bit of one K is another when it arrives."""
    wrong = tmp_path / "sitecustomize.py"
    wrong.write_text(
        "import sys\n"
        "if '--stage' in sys.argv and 'D0' in sys.argv:\n"
        "    from omni_kvlink.adapters import hf\n"
        "    right = hf._set\n"
        "    def flip(cache, index, key, value, seen):\n"
        "        key = key.clone()\n"
        "        key[0, 0, 3, 0] += 1 if index == 1 else 0\n"
        "        right(cache, index, key, value, seen)\n"
        "    hf._set = flip\n"
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        check=False,
    )
    assert "logits  DIFFERENT: 0 of 1" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1


def test_a_failed_stage_ends_the_example(tmp_path: Path) -> None:
    """The store is too small for the prompt: an error, no verdict, and no long wait."""
    done = run(tmp_path, "--budget", "0.01", "--timeout", "20")
    assert done.returncode != 0
    assert "CapacityError" in done.stderr
    assert "identical" not in done.stdout
