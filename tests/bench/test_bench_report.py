"""The report fits the terminal, and the document is written whole, or is not begun."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench import report
from omni_kvlink.bench.cases import cases
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.verify import Outcome, Verdict
from omni_kvlink.cli import terminal
from omni_kvlink.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD = ["ms", "p50", "p99 of all rounds", "what"]
ROWS = [
    ["plain copy", "9.1", "10 [9..11]", "as many bytes, by one thread of this process"],
    ["at once", "10.25", "1234.5 [9..11]", "both copies at the same moment, nothing between them"],
]


@pytest.mark.parametrize("columns", [*range(30, 100, 7), 200])
def test_a_table_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = terminal.table(HEAD, ROWS)
    assert max(map(len, text.splitlines())) <= min(columns, terminal.MAX_WIDTH)
    parts = text.split()
    for row in ROWS:
        for cell in row:
            assert all(parts.count(one) >= 1 for one in cell.split()), "nothing is cut"


def test_a_wide_table_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "96")
    assert len(terminal.table(HEAD, ROWS).splitlines()) == 2 + len(ROWS)


def test_without_a_terminal_the_width_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    code = "from omni_kvlink.cli import terminal; print(terminal.width())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{terminal.PIPED_WIDTH}\n"


@pytest.mark.parametrize("columns", [50, 80])
def test_a_report_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command = "latency --preset tiny --rounds 2 --warmup 0 --idle 0.01 --connector inproc"
    assert run(command.split()) == 0
    some = list(cases(quick=True))[::40]
    wrong = [Outcome(one, 10, "tensors [1, 2] are not those that were put" * 3) for one in some]
    shown = (capsys.readouterr().out + Verdict(wrong).text()).splitlines()
    assert max(map(len, shown)) <= columns


# The document


def write(path: Path | str) -> None:
    report.write_json(str(path), "many", {"cores": 2}, {}, {"wrong": 0})


def is_document(path: Path) -> bool:
    found: dict[str, Any] = json.loads(path.read_text())
    return bool(found["command"] == "many")


def make_directory(folder: Path) -> Path:
    (folder / "x").mkdir()
    return folder / "x"


def make_file_above(folder: Path) -> Path:
    (folder / "x").touch()
    return folder / "x" / "y.json"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: folder / "nowhere" / "x.json", "make the directory"),
        (make_directory, "Is a directory"),
        (make_file_above, "make the directory"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda _: Path("/proc/version"), "/proc/version"),
        (lambda _: Path("/proc/x.json"), "/proc/x.json"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_it_is_measured(
    make: Callable[[Path], Path], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileError, match=f"--json {path}: ") as caught:
        report.check_json(str(path))
    assert text in str(caught.value)
    assert run(["latency", "--rounds", "1000000", "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"--json {path}" in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    report.check_json(str(tmp_path / "x.json"))
    assert list(tmp_path.iterdir()) == []


def test_the_document_replaces_another_one_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    path.write_text("old" * 10_000)
    path.chmod(0o640)
    link.symlink_to(path)
    with path.open() as reader:
        write(link)
        assert reader.read() == "old" * 10_000, "who reads the old one has it whole"
    assert is_document(path)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert {one.name for one in tmp_path.iterdir()} == {"x.json", "link.json"}


def test_a_write_that_fails_leaves_the_old_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(FileError, match="No space left on device; make room there, or give"):
        write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def fail(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    write("/dev/null")
    assert Path("/dev/null").is_char_device()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    report.check_json(str(fifo))  # does not wait for its reader
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write(fifo)
    assert json.loads(os.read(reader, 1 << 16))["command"] == "many"
    os.close(reader)
    assert fifo.is_fifo()


def test_a_document_that_cannot_be_written_does_not_lose_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "x.json"
    small = ("latency", "--preset", "tiny", "--rounds", "1", "--connector", "inproc")
    assert run([*small, "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert "put called → views in hand" in captured.out
    assert f"FileError: --json {path}: No space left" in captured.err
