"""The engine stays small enough to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import omni_kvlink.engine

FILES = sorted(Path(omni_kvlink.engine.__file__).parent.rglob("*.py"))
MOST = 15


def public_methods(tree: ast.AST) -> dict[str, int]:
    return {
        node.name: sum(
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and child.name[0] != "_"
            for child in node.body
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_no_class_does_everything(path: Path) -> None:
    found = public_methods(ast.parse(path.read_text()))
    assert {name: count for name, count in found.items() if count > MOST} == {}


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_function_fits_a_screen(path: Path) -> None:
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    }
    assert {name: lines for name, lines in long.items() if lines > 60} == {}


def test_the_public_names_are_few() -> None:
    assert len(omni_kvlink.engine.__all__) <= 28
    assert all(hasattr(omni_kvlink.engine, name) for name in omni_kvlink.engine.__all__)


# The table of names that were moved: each is to say its import, so that all are needed.
@pytest.mark.parametrize("module", omni_kvlink.engine._ELSEWHERE)
def test_a_name_of_another_module_says_its_import_line(module: str) -> None:
    # As above.
    for name in omni_kvlink.engine._ELSEWHERE[module].split():
        line = f"from omni_kvlink.engine.{module} import {name}"
        exec(line)
        with pytest.raises(ImportError, match=f"^{name}: {line}$"):
            exec(f"from omni_kvlink.engine import {name}")
