"""The command of mutation testing: what it calls caught, and what fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "mutants.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without the sources")

MUTANT = """
[[mutant]]
name = "{name}"
file = "omni_kvlink/sums.py"
old = '''{old}'''
new = '''{new}'''
tests = ["tests/test_sums.py::{test}"]
"""
TESTS = """
import pytest
from omni_kvlink import sums

def test_two():
    assert sums.add(2, 3) == 5

@pytest.mark.skip(reason="not here")
def test_skipped():
    assert sums.add(2, 3) == 5
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("omni_kvlink", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "omni_kvlink" / "__init__.py").touch()
    (tmp_path / "omni_kvlink" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests" / "test_sums.py").write_text(TESTS)
    return tmp_path


def run(project: Path, *arguments: str, **mutant: str) -> subprocess.CompletedProcess[str]:
    row = {"name": "one", "old": "a + b", "new": "a - b", "test": "test_two", **mutant}
    (project / "list.toml").write_text(MUTANT.format(**row))
    command = [sys.executable, str(SCRIPT), "--list", str(project / "list.toml")]
    command += ["--root", str(project), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("mutant", "status", "text"),
    [
        ({}, 0, "1 of 1 caught"),
        ({"new": "b + a"}, 1, "SURVIVED"),
        ({"new": "c"}, 1, "it does not run: NameError"),
        ({"old": "a * b"}, 1, "occurs 0 times"),
        ({"test": "test_skipped"}, 1, "none of its tests runs here"),
    ],
    ids=["caught", "survives", "broken", "not there", "skipped"],
)
def test_verdicts(project: Path, mutant: dict[str, str], status: int, text: str) -> None:
    done = run(project, **mutant)
    assert text in done.stdout
    assert done.returncode == status
    assert (project / "omni_kvlink" / "sums.py").read_text().count("a + b") == 1


def test_a_red_test_stops_it(project: Path) -> None:
    (project / "tests" / "test_sums.py").write_text("def test_two():\n    assert False\n")
    done = run(project)
    assert "without a mutant: tests.test_sums::test_two" in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("mutant", "text"),
    [
        ({"old": "a * b"}, "occurs 0 times"),
        ({"old": "a"}, "occurs 3 times"),
        ({"new": "a +"}, "invalid syntax"),
        ({"new": "a + b"}, "occurs 1 times"),
        ({"test": "test_three"}, "there is no test"),
        ({"test": "test_two[3]"}, "there is no test"),
    ],
    ids=["not there", "twice", "syntax", "the same", "no test", "no such parameter"],
)
def test_the_check_names_the_problem(project: Path, mutant: dict[str, str], text: str) -> None:
    done = run(project, "--check", **mutant)
    assert text in done.stdout
    assert done.returncode == 1


@pytest.mark.slow  # `make mutants-check` is the same
def test_the_list_of_this_project_is_applicable() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout
