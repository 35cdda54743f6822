"""`benchmarks/kept.py`: one payload for many readers, and many pages; no figure is judged here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kept
from kept import GROWTH, run
from kept_reader import number_page

if TYPE_CHECKING:
    import pytest

PAYLOAD = ["--layers", "2", "--tokens", "64", "--readers", "2"]
PAGES = ["--pages", "12", "--few", "3", "--page-bytes", "65536", "--batch", "4", "--gets", "4"]


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert run([*PAYLOAD, *PAGES, "--rounds", "2", "--json", str(path)]) == 0
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    shared, pages = results["shared"], results["pages"]
    assert (shared["readers"], shared["differing"], len(shared["by_reader"])) == (2, 0, 2)
    assert set(shared["last_reader_ms"]) == {"first", "again"}
    assert shared["machine"].keys() == {"shmem", "used"}
    assert (pages["pages"], pages["few"], pages["wrong"]) == (12, 3, 0)
    assert set(pages["many_over_few"]) == set(GROWTH)
    for side in ("few", "many"):
        assert all(one["min"] > 0 for one in pages["milliseconds"][side].values())
    assert results["bars"] == []  # of the sizes that they are set for
    text = capsys.readouterr().out
    for word in ("PSS of all processes", "contains of 256 keys", "growth", "bytes a page"):
        assert word in text


def test_a_page_that_is_wrong_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark compares every page with the bytes that its number demands."""
    path = tmp_path / "result.json"
    monkeypatch.setattr(kept, "number_page", lambda page, number: number_page(page, number + 1))
    assert run([*PAGES, "--readers", "0", "--rounds", "1", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["results"]["pages"]["wrong"] > 0


def test_more_than_the_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--readers", "0", "--pages", "1000000", "--page-bytes", "2000000"]) == 2
    assert "GB of memory are available: give fewer --pages" in capsys.readouterr().err
