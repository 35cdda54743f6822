"""The table of CI: tests that no suite ran, suites that ran nothing or never ended."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "suites.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without the sources")

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_runs"/>
<testcase classname="tests.test_a" name="test_fails"><failure message="no"/></testcase>
<testcase classname="tests.test_a" name="test_skips"><skipped message="no ray"/></testcase>
<testcase classname="" name="tests.test_ray"><skipped message="no ray"/></testcase>
</testsuite></testsuites>"""

WAITS = """
import pathlib, sys, threading

def waits():
    pathlib.Path(sys.argv[1]).write_text("runs")
    threading.Event().wait()

waits()
"""


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("ci_suites", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ci_suites", module)
    spec.loader.exec_module(module)
    return module


def outcome(suites: Any, tmp_path: Path, report: str) -> Any:
    file = tmp_path / "report.xml"
    file.write_text(report)
    found = suites.Outcome("test", 1.0, 0)
    suites.read(file, found)
    return found


def test_a_report_is_sorted(suites: Any, tmp_path: Path) -> None:
    found = outcome(suites, tmp_path, REPORT)
    assert found.passed == {"tests.test_a::test_runs"}
    assert found.failed == {"tests.test_a::test_fails"}
    assert set(found.skipped.values()) == {"no ray"}
    assert not found.is_green
    assert "2 × no ray" in found.row()


def test_what_no_suite_ran_is_found(suites: Any, tmp_path: Path) -> None:
    first = outcome(suites, tmp_path, REPORT)
    assert set(suites.never_run([first])) == {"tests.test_a::test_skips", "::tests.test_ray"}
    second = outcome(
        suites,
        tmp_path,
        '<s><testcase classname="tests.test_ray" name="test_one"/>'
        '<testcase classname="tests.test_a" name="test_skips"/></s>',
    )
    assert not suites.never_run([first, second])


def test_what_the_processor_lacks_is_no_error(suites: Any, tmp_path: Path) -> None:
    report = REPORT.replace('message="', f'message="{suites.HARDWARE}')
    assert report != REPORT
    assert not suites.never_run([outcome(suites, tmp_path, report)])


def test_a_suite_that_ran_no_test_is_not_green(suites: Any, tmp_path: Path) -> None:
    assert not outcome(suites, tmp_path, "<s/>").is_green
    assert suites.Outcome("lint", 1.0, 0).is_green
    assert not suites.Outcome("lint", 1.0, 2).is_green


def test_a_suite_that_never_ends_says_where_it_is(
    suites: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, log = tmp_path / "runs", tmp_path / "log"
    os.mkfifo(fifo)
    real = subprocess.Popen.wait

    def once_it_runs(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == suites.LIMIT:
            fifo.read_text()
            timeout = 0.01
        return real(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", once_it_runs)
    command = [sys.executable, "-X", "faulthandler", "-c", WAITS, str(fifo)]
    with log.open("wb") as output:
        status = suites.finish(command, output)
    assert status == suites.NO_END
    assert "in waits" in log.read_text()


def test_a_failure_is_shown_at_the_end(
    suites: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(suites, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["suites.py", "tsan", "lint"])
    monkeypatch.setattr(suites, "run_all", lambda names: [one(name) for name in names])

    def one(name: str) -> Any:
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {n}" for n in range(100)))
        outcome = suites.Outcome(name, 1.0, 2 if name == "tsan" else 0)
        outcome.failed |= {"tests.test_a::test_fails"} if name == "tsan" else set()
        return outcome

    assert suites.main() == 1
    shown = capsys.readouterr().out
    assert f"tsan {100 - suites.ENDING}\n" in shown
    assert f"tsan {99 - suites.ENDING}\n" not in shown
    assert "failed: tests.test_a::test_fails\n" in shown
    assert "lint 99" not in shown
