"""Checks of names and docstrings; `python tests/vocabulary.py [PATH …]` lists what is to be mended.

`layout.py` runs them as rules: hardly a name is a pronoun, an adverb or a preposition, and no
docstring begins with a word that makes a fragment of its first sentence.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[1] / "omni_kvlink"
_EMPTY = """
    found one at own each left what here there others these this those both which again once also
    only more most same such it they them who whose where when how so too yet still already ever
    never away back behind before after ahead together apart alone further meanwhile rest whole
    given made known to of by with without over under within along until since than any some none
    every many much few several either neither anything something nothing everything anyone nobody
    itself elsewhere early late soon later
"""
EMPTY_NAMES = frozenset(_EMPTY.split())
"""Words that say nothing of what they name."""
MOST_EMPTY_NAMES = 0.01
"""Their share of all names that are bound."""
FRAGMENTS = ("What", "How", "Which", "Those", "Of", "As", "Whose", "Where", "That", "These")


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a module binds, with its line: functions, classes, arguments, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, (ast.Load, ast.Del)):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, (ast.Load, ast.Del)):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def is_empty(name: str) -> bool:
    """Whether a name is a pronoun, an adverb, a preposition or a bare participle."""
    return name.strip("_") in EMPTY_NAMES


def fragments(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The first words of docstrings that begin a fragment, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            is_text = isinstance(statement, ast.Expr) and isinstance(value, ast.Constant)
            if is_text and isinstance(value.value, str):  # type: ignore[union-attr]
                first = value.value.split()[:1]  # type: ignore[union-attr]
                if first and first[0] in FRAGMENTS:
                    yield first[0], statement.lineno


def main(paths: list[str]) -> int:
    """Print the empty names and the fragments of files and folders."""
    files = [
        file
        for path in map(Path, paths or [str(PACKAGE)])
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]
    names, empty, begun = 0, Counter[str](), 0
    for file in files:
        tree = ast.parse(file.read_text())
        for name, line in bound_names(tree):
            names += 1
            if is_empty(name):
                empty[name.strip("_")] += 1
                print(f"{file}:{line}: {name}")
        for word, line in fragments(tree):
            begun += 1
            print(f"{file}:{line}: a docstring begins with {word!r}")
    total = sum(empty.values())
    print(f"{total} of {names} names ({total / max(1, names):.1%}), {begun} docstrings")
    print(", ".join(f"{name} {count}" for name, count in empty.most_common(30)))
    return int(total > MOST_EMPTY_NAMES * names or begun > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
