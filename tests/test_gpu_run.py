"""`make gpu`: without a device it says so; a step that fails, or tests nothing, fails the run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "gpu.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without the sources")
FIGURES = {"rate_of_plain_out": 0.95, "added_streamed_ms": 0.4}
EVERY_STEP = ["install", "build", "test", "measure", "sanitize"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script as a module, with a folder of its own, on a machine that has a device."""
    spec = importlib.util.spec_from_file_location("ci_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ci_gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(module, "find_device", lambda: "NVIDIA H100 80GB (PCIe)")
    return module


def with_steps(gpu: Any, monkeypatch: pytest.MonkeyPatch, **failing: str) -> list[str]:
    """Replace the steps; return the list of those that ran. `failing` says why one fails."""
    ran = list[str]()

    def step(name: str) -> Any:
        def do(*args: object) -> str:
            ran.append(name)
            if name in failing:
                raise gpu.NotDone(failing[name])
            return f"{name} was done"

        return do

    for name in EVERY_STEP:
        monkeypatch.setattr(gpu, name, step(name))
    return ran


def main(gpu: Any, monkeypatch: pytest.MonkeyPatch, results: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(results), *arguments])
    status: int = gpu.main()
    return status


def test_without_a_device() -> None:
    """One sentence, status 2, and nothing is built."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=hidden, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("nothing was built, tested or measured: ")


def test_every_step(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = with_steps(gpu, monkeypatch)
    assert main(gpu, monkeypatch, tmp_path) == 0
    assert ran == EVERY_STEP
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split()[:2] for row in table] == [[name, "ok"] for name in EVERY_STEP]
    machine = json.loads((tmp_path / "nvidia-h100-80gb-pcie" / "machine.json").read_text())
    assert machine["device"] == "NVIDIA H100 80GB (PCIe)"
    assert machine["command"] == "make gpu"
    assert machine["steps"]["test"] == [True, "test was done"]


def test_a_step_that_fails(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = with_steps(gpu, monkeypatch, build="no nvcc")
    assert main(gpu, monkeypatch, tmp_path) == 1
    assert ran == EVERY_STEP
    assert "FAILED" in capsys.readouterr().out.splitlines()[-4]
    machine = json.loads(next(tmp_path.glob("nvidia*/machine.json")).read_text())
    assert machine["steps"]["build"] == [False, "no nvcc"]


def test_some_steps(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = with_steps(gpu, monkeypatch)
    assert main(gpu, monkeypatch, tmp_path, "build", "test") == 0
    assert ran == ["build", "test"]
    with pytest.raises(SystemExit):
        main(gpu, monkeypatch, tmp_path, "polish")


def test_a_command(gpu: Any) -> None:
    """Its output is kept; a status other than 0 fails the step, with the last line."""
    assert gpu.run("works", [sys.executable, "-c", "print('fine')"]) == "fine\n"
    assert (gpu.WORK / "works.log").read_text() == "fine\n"
    with pytest.raises(gpu.NotDone, match=r"status 3: too bad \(all of it: work/breaks.log\)"):
        gpu.run("breaks", [sys.executable, "-c", "print('too bad'); exit(3)"])
    shown = gpu.run("told", [sys.executable, "-c", "import os; print(os.environ['KEY'])"], KEY="v")
    assert shown == "v\n"


REPORT = "<testsuites><testsuite tests='{}' failures='{}' errors='0' skipped='{}'/></testsuites>"


@pytest.mark.parametrize(
    ("counts", "text"),
    [((5, 0, 1), "4 passed, 0 failed, 1 skipped"), ((5, 2, 0), "3 passed, 2 failed, 0 skipped")],
)
def test_a_report(gpu: Any, tmp_path: Path, counts: tuple[int, ...], text: str) -> None:
    report = tmp_path / "report.xml"
    assert gpu.summary(report) == "0 passed"
    report.write_text(REPORT.format(*counts))
    assert gpu.summary(report) == text


def test_a_run_of_skipped_tests_fails(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipped(log: str, command: list[str]) -> str:
        report = next(each for each in command if each.startswith("--junitxml="))
        Path(report.partition("=")[2]).write_text(REPORT.format(3, 0, 3))
        return ""

    monkeypatch.setattr(gpu, "run", skipped)
    with pytest.raises(gpu.NotDone, match="no test ran: 0 passed, 0 failed, 3 skipped"):
        gpu.test()


def test_what_is_missing_is_installed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list[list[str]]()
    monkeypatch.setattr(gpu, "run", lambda log, command: commands.append(command))
    monkeypatch.setattr(gpu, "NEEDED", {"zmq": "pyzmq", "no_such_module": "no-such"})
    monkeypatch.setattr(gpu, "FIND", gpu.FIND.replace("torch.cuda.is_available()", "True"))
    assert gpu.install() == "pip installed no-such"
    assert commands[0][-1] == "no-such"
    assert str(gpu.PACKAGES) in commands[0]
    monkeypatch.setattr(gpu, "FIND", gpu.FIND.replace("found = True", "found = False"))
    assert gpu.install() == "pip installed no-such, torch"  # one without CUDA does not count
    monkeypatch.setattr(gpu, "FIND", "")
    assert gpu.install() == "nothing was missing"


def test_the_bars(gpu: Any) -> None:
    results = {
        "28 layers × 4096 tokens, dense": {**FIGURES, "rate_of_plain_out": 0.2},
        "28 layers × 4096 tokens, paged": FIGURES,
        "36 layers × 4096 tokens, paged": {**FIGURES, "added_streamed_ms": 1.5},
    }
    stages = {"dense": {"added_after_ms": 0.25}, "paged": {"added_after_ms": 1.25}}
    assert gpu.bars(results, stages) == (
        "paged 0.95 of a plain copy (bar 0.90), pass + 1.50 ms (bar 1), "
        "runner's step + 1.25 ms (bar 5)"
    )


def test_the_sanitizer_must_be_there_and_say_so(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.shutil, "which", lambda name: "/nowhere/compute-sanitizer")
    with pytest.raises(gpu.NotDone, match="was not found; it comes with the CUDA toolkit"):
        gpu.sanitize()
    monkeypatch.setattr(gpu.shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(gpu, "run", lambda log, command: "3 passed")
    with pytest.raises(gpu.NotDone, match="printed no summary"):
        gpu.sanitize()
    monkeypatch.setattr(gpu, "run", lambda log, command: "ERROR SUMMARY: 0 errors")
    assert gpu.sanitize() == "0 errors"
