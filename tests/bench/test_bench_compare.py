"""`kvlink-bench compare`: which rows of two documents are slower, and the exit status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench.commands import run

if TYPE_CHECKING:
    from pathlib import Path


def summary(p50: float) -> dict[str, float]:
    return {"p50": p50, "p90": p50, "p99": p50, "min": 0.5 * p50, "max": 2 * p50}


def document(path: Path, results: dict[str, Any], command: str = "latency") -> str:
    path.write_text(json.dumps({"command": command, "results": results}))
    return str(path)


@pytest.fixture
def before(tmp_path: Path) -> str:
    results = {
        "rounds": 3,
        "milliseconds": {"total": summary(10), "put": summary(4), "none": summary(0)},
        "per_second": {"single": summary(100)},
        "absent": None,
    }
    return document(tmp_path / "before.json", results)


@pytest.mark.parametrize(
    ("total", "rate", "options", "status"),
    [
        (11.4, 100, [], 0),
        (11.6, 100, [], 1),
        (11.6, 100, ["--fail-over", "20%"], 0),
        (11.6, 100, ["--row", "put"], 0),
        (5, 100, [], 0),
        (10, 200, [], 0),
        (10, 80, ["--fail-over=20"], 1),
    ],
)
def test_the_exit_status(
    before: str, total: float, rate: float, options: list[str], status: int, tmp_path: Path
) -> None:
    results = {
        "milliseconds": {"total": summary(total), "put": summary(4)},
        "per_second": {"single": summary(rate)},
    }
    assert run(["compare", before, document(tmp_path / "b.json", results), *options]) == status


def test_ratios_have_their_spread_and_rows_without_a_pair_are_named(
    before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"milliseconds": {"total": summary(20), "other": summary(1)}}
    after = document(tmp_path / "b.json", results)
    assert run(["compare", before, after, "--json", str(tmp_path / "out.json")]) == 1
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["ratios"] == {"milliseconds.total": {"p50": 2.0, "min": 0.5, "max": 8.0}}
    assert found["slower"] == ["milliseconds.total"]
    unpaired = ["milliseconds.other", "milliseconds.put", "per_second.single"]
    assert found["unpaired"] == unpaired
    shown = capsys.readouterr().out
    assert "milliseconds.total   2.00  0.50  8.00  slower" in shown
    assert "slower    1 of 1 rows by more than 15 %" in shown


@pytest.mark.parametrize(
    ("results", "command", "message"),
    [
        ({"total": summary(1)}, "stream", "wanted two documents of one command"),
        ({"other": summary(1)}, "latency", "have no row in common"),
        ([], "latency", "wanted a document of kvlink-bench --json"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    before: str,
    results: Any,
    command: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", before, document(tmp_path / "b.json", results, command)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_document_that_is_not_there_is_named(
    before: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", before, str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
