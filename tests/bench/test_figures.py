"""`benchmarks/figures.py`: the documents of all claims, and how far each bar is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from omni_kvlink.bench.commands import run

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import figures  # noqa: E402


def test_each_document_has_a_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in figures.COMMANDS.items():
        program, *options = shlex.split(command)
        if program == "kvlink-bench":
            with pytest.raises(SystemExit) as ended:
                run([*options, "--help"])
            assert ended.value.code == 0, name
        else:
            assert (ROOT / program).exists(), name
    capsys.readouterr()


def test_a_document_is_measured_and_its_bars_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = "kvlink-bench latency --preset tiny --rounds 2 --warmup 1"
    monkeypatch.setitem(figures.COMMANDS, "tiny", quick)
    assert figures.measure("tiny", tmp_path / "tiny.json") == 0
    document = json.loads((tmp_path / "tiny.json").read_text())
    shown = figures.bars(tmp_path, figures.COMMANDS)
    assert len(document["results"]["bars"]) == 3
    assert all(bar["bar"] in shown for bar in document["results"]["bars"])


def test_the_worst_bar_is_at_the_top(tmp_path: Path) -> None:
    bars = [
        {"bar": "met", "got": 1.0, "limit": 2.0, "met": True},
        {"bar": "missed", "got": 3.0, "limit": 2.0, "met": False},
    ]
    (tmp_path / "bagel.json").write_text(json.dumps({"results": {"bars": bars}}))
    shown = figures.bars(tmp_path, ["bagel", "small"]).splitlines()
    assert shown[2].split() == ["1.50", "3", "2", "bagel:", "missed"]
    assert shown[3].split() == ["0.50", "1", "2", "bagel:", "met"]


def test_an_unknown_name_is_refused() -> None:
    argv = [sys.executable, str(ROOT / "benchmarks" / "figures.py"), "nothing"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "no such document: nothing" in done.stderr
