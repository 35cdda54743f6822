"""Summaries, tables, progress and the machine."""

from __future__ import annotations

import numpy as np
import pytest

from omni_kvlink.bench import machine
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal


@pytest.mark.parametrize("count", [1, 2, 3, 20, 101])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).exponential(size=count).tolist()
    summary = Summary.of(values)
    found = (summary.p50, summary.p90, summary.p99)
    assert found == tuple(np.percentile(values, percent) for percent in (50, 90, 99))


def test_a_summary_of_nothing_is_refused() -> None:
    with pytest.raises((IndexError, ValueError)):
        Summary.of([])


def test_a_summary_has_the_ends() -> None:
    summary = Summary.of([3.0, 1.0, 2.0]).to_dict()
    assert (summary["min"], summary["p50"], summary["max"]) == (1.0, 2.0, 3.0)


def test_numbers_stand_right_and_words_left() -> None:
    text = terminal.table(
        ["ms", "p50", "what"], [["copy", "9.1", "bytes"], ["a wake", "10.2", "x"]]
    )
    assert text.splitlines()[2:] == ["copy     9.1  bytes", "a wake  10.2  x"]


def test_without_a_terminal_progress_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress("rounds", 40, quiet=False) as step:
        for _ in range(40):
            step()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "40/40 rounds"
    assert len(captured.err.splitlines()) <= 5


def test_the_machine_is_described() -> None:
    here = machine.describe()
    assert here["cores"] >= 1
    assert here["memory_bytes"] > 1 << 28
    assert {"cpu_model", "kernel", "torch", "date"} <= set(here)
    assert str(here["torch"]) in machine.one_line(here)
