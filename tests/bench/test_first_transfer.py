"""`benchmarks/first_transfer.py`: the first and the tenth transfer of links, prefaulted and not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from first_transfer import run

SMALL = ["--layers", "3", "--tokens", "300", "--rounds", "2", "--wait", "0.1"]


@pytest.mark.parametrize("connector", ["shm", "inproc", "zmq+tcp"])
def test_the_document(connector: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run([*SMALL, "--connector", connector, "--json", str(path)]) == 0
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    assert (results["rounds"], results["bars"]) == (2, [])
    names = {f"{kind}_{name}" for kind in ("prefault", "without") for name in ("first", "tenth")}
    assert set(results["milliseconds"]) == names | {"process_vm_readv"}
    assert results["first_over_peer"]["process_vm_readv"]["min"] > 0
    assert all(0 < one["min"] <= one["max"] for one in results["milliseconds"].values())
    assert all(one["min"] > 0 for one in results["first_over_tenth"].values())
    sides = {"producer"} if connector == "inproc" else {"producer", "reader"}
    assert set(results["mapping_ms"]) == sides
    assert all(len(times) == 2 for times in results["mapping_ms"].values())


def test_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--rounds", "1", "--connector", "inproc"]) == 0
    text = capsys.readouterr().out
    for word in (
        "first transfer",
        "tenth transfer",
        "prefault= at both ends",
        "without",
        "mapping",
    ):
        assert word in text


def test_a_python_without_nixl_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--rounds", "1", "--connector", "inproc", "--nixl", sys.executable]) == 2
    assert "first_peers.py" in capsys.readouterr().err
