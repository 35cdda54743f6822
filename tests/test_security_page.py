"""Each cell of the table in SECURITY.md names tests, and those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
CLAIMS, TESTS = PAGE.split("## The tests")


def names_in(row: str) -> list[tuple[str, str]]:
    """The path and name of each test of a row; `::name` is in the file before it."""
    found, path = [], ""
    for own_path, name in re.findall(r"`(tests/\S+?\.py)?::(test_\w+)`", row):
        path = own_path or path
        found.append((path, name))
    return found


ROWS = {
    number: names_in(row) for number, row in re.findall(r"^\| \[(\d+)\] \| (.*) \|$", TESTS, re.M)
}


def test_every_claim_has_tests_and_every_test_a_claim() -> None:
    assert set(re.findall(r"\[(\d+)\]", CLAIMS)) == set(ROWS)
    assert len(ROWS) >= 13
    assert all(ROWS.values())


def test_the_tests_exist() -> None:
    for path, name in {test for tests in ROWS.values() for test in tests}:
        functions = [
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{path}::{name}"
