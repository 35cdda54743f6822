"""The comparison under faults runs; its judge counts what was lost, wrong or read again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fault_comparison.py"
sys.path.insert(0, str(SCRIPT.parent))

from fault_comparison import outcome  # noqa: E402

from support.network.evidence import Entry, Record  # noqa: E402


def reader(peer: str, *entries: Entry, killed: bool = False) -> Record:
    return Record("reader", peer, 0, killed, entries)


def test_the_judge() -> None:
    producer = Record(
        "producer",
        "P",
        0,
        False,
        [
            *(Entry(f"k{n}", "put", 1) for n in range(6)),
            Entry("k1", "expired"),
            Entry("k2", "refused"),
        ],
    )
    readers = [
        reader("A", Entry("k0", "read", 0), Entry("k0", "read", 0), Entry("k4", "WRONG", 0)),
        reader("B", Entry("k3", "read", 0), killed=True),
        reader("B", Entry("k3", "read", 0), Entry("k5", "TransferTimeout"), Entry("-", "BROKE")),
    ]
    orders = {f"k{n}": ["A" if n % 2 == 0 else "B"] for n in range(6)}
    found = outcome(orders, [producer, *readers])
    assert found["put"] == 6
    assert found["read"] == 2
    assert found["denied"] == 2, "k1 expired, k2 was refused"
    assert found["lost"] == 2, "of k4 and k5 nobody was told"
    assert found["wrong"] == found["broke"] == found["killed"] == 1
    assert found["again"] == 1, "k0; of k3 the killed reader's release may not have been sent"


@pytest.mark.slow
@pytest.mark.parametrize("system", ["omni_kvlink shm", "omni_kvlink zmq", "bare zmq"])
def test_a_campaign(tmp_path: Path, system: str) -> None:
    run = compare(tmp_path, system)
    assert run["read"] + run["lost"] + run["denied"] == 120
    assert run["wrong"] == run["broke"] == run["left"] == 0
    if system != "bare zmq":
        assert run["lost"] == run["again"] == 0


@pytest.mark.skipif(importlib.util.find_spec("vllm_omni") is None, reason="vllm_omni")
def test_a_campaign_of_vllm_omni(tmp_path: Path) -> None:
    run = compare(tmp_path, "vllm-omni shm")
    assert run["read"] + run["lost"] + run["denied"] == 120
    assert run["read"] > 60


def compare(tmp_path: Path, system: str) -> dict[str, int]:
    document = tmp_path / "comparison.json"
    command = [sys.executable, str(SCRIPT), "--system", system, "--faults", "3"]
    subprocess.run([*command, "--json", str(document)], check=True, capture_output=True)
    (run,) = json.loads(document.read_text())["results"]["runs"]
    assert not run["hung"]
    return dict(run)
