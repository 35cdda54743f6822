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
