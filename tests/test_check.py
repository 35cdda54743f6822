"""`make check`: which tests belong to a changed file."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "check.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without the sources")


@pytest.fixture(scope="module")
def check() -> Any:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        (
            "omni_kvlink/connectors/runtime/user_dirs.py",
            "tests/connectors/runtime/test_user_dirs.py",
        ),
        (
            "omni_kvlink/connectors/runtime/event_loop.py",
            "tests/connectors/runtime/test_event_loop.py",
        ),
        ("omni_kvlink/engine/ray/actor.py", "tests/engine/ray/test_actor.py"),
        ("tests/link/test_path.py", "tests/link/test_path.py"),
        ("tests/support/connectors/zmq_addresses.py", "tests/e2e/test_any_engine.py"),
        ("docs/sending.md", "tests/test_doc_blocks.py"),
    ],
)
def test_a_changed_file_has_its_tests(check: Any, changed: str, test: str) -> None:
    found = check["tests_of"]([changed])
    assert test in found
    assert len(found) < 60


def test_a_changed_test_comes_first(check: Any) -> None:
    assert check["tests_of"](["docs/sending.md", "tests/test_check.py"])[0] == "tests/test_check.py"


def test_the_layout_is_checked_whatever_changed(check: Any) -> None:
    assert check["steps_of"]([], []) == [["tests/layout.py"]]
    steps = check["steps_of"](["docs/conf.py", "omni_kvlink/errors.py"], ["tests/test_errors.py"])
    assert [step[step[0] == "-m"] for step in steps] == [
        "tests/layout.py",
        "ruff",
        "ruff",
        "mypy",
        "pytest",
    ]
    assert "docs/conf.py" in steps[1]
    assert "docs/conf.py" not in steps[3]


def test_what_make_help_lists_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = makefile.partition("define targets\n")[2].partition("\nendef")[0].splitlines()
    targets = [
        target for line in lines for target in line.split("  ")[0].removeprefix("make ").split()
    ]
    assert {"demo", "check", "test", "lint", "docs"} <= set(targets)
    for target in targets:
        assert f"\n{target}:" in makefile, target
