"""docs/engine_coverage.md names files, names in them and tests that exist, and three states."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import omni_kvlink

ROOT = Path(__file__).parents[2]
PACKAGE = Path(omni_kvlink.__file__).parent
PAGE = ROOT / "docs" / "engine_coverage.md"
if not PAGE.parent.exists():
    pytest.skip("installed without the sources", allow_module_level=True)
STATE = re.compile(r"works|missing|refused: `\w+`")
SPAN = re.compile(r"`([^`]+)`")
Row = tuple[str, str, str, str]


def rows() -> list[Row]:
    """What is asked for, where it is, what shows it, and the state: of all tables."""
    found: list[Row] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "what it asks for":
            found.append((cells[0], cells[1], cells[2], cells[3]))
    return found


def has_word(source: str, word: str) -> bool:
    """Whether a name is in a source, not as a part of another name."""
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


@cache
def bound_names() -> frozenset[str]:
    """Names that the package binds, and keys in its texts."""
    names: set[str] = set()
    for node in (
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Attribute(attr=name, ctx=context) | ast.Name(id=name, ctx=context):
                if isinstance(context, ast.Load):
                    continue
                names.add(name)
            case ast.Constant(value=str(name)) if name.isidentifier():  # a key of a configuration
                names.add(name)
    return frozenset(names)


@cache
def renamed_words() -> dict[str, list[str]]:
    """The words of the last table, and the names that each has here."""
    _, _, table = PAGE.read_text().partition("\n## Words with another name here\n")
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {word: SPAN.findall(here) for cell, here in lines for word in SPAN.findall(cell)}


def absent_words(text: str) -> list[str]:
    """Names in a row's first column that are neither here nor in the last table."""
    spans = [span for span in SPAN.findall(text) if not span.endswith((".py", ".yaml"))]
    names = {name for span in spans for name in re.findall(r"[A-Za-z_]\w+", span)} - {"True"}
    return sorted(names - bound_names() - renamed_words().keys())


def has_attribute(path: str, dotted: str) -> bool:
    """Whether a class of a file has an attribute, a field or an instance's attribute."""
    owner, _, name = dotted.partition(".")
    module = importlib.import_module(f"omni_kvlink.{path.removesuffix('.py').replace('/', '.')}")
    classes = [c for c in getattr(module, owner).__mro__ if c.__module__.startswith("omni_kvlink")]
    return any(
        name in vars(c) or name in c.__annotations__ or f"self.{name}" in inspect.getsource(c)
        for c in classes
    )


def errors_in(row: Row) -> list[str]:
    """What a row names that does not exist."""
    requirement, where, shown, state = row
    wrong = [] if STATE.fullmatch(state) else [f"state {state!r}"]
    if (where == "-") != (state == "missing"):
        wrong.append(f"{state}, and where is {where!r}")
    wrong += absent_words(requirement) if state == "works" else []
    path = source = sources = ""
    for span in SPAN.findall(where):
        if span.endswith(".py"):
            path = span
            source = (PACKAGE / path).read_text() if (PACKAGE / path).is_file() else ""
            sources += source
            wrong += [] if source else [span]
        else:
            absent = [part for part in span.split(".") if not has_word(source, part)]
            wrong += [span] if absent or ("." in span and not has_attribute(path, span)) else []
    wrong += [error for error in SPAN.findall(state) if not has_word(sources, error)]
    for span in SPAN.findall(shown):
        file, _, test = span.partition("::")
        tests = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        wrong += [] if f"\ndef {test}(" in tests else [span]
    is_named = all(text == "-" or SPAN.sub("", text).strip(" ,;") == "" for text in (where, shown))
    return wrong if is_named else [*wrong, f"more than names: {where} {shown}"]


def test_all_names_exist() -> None:
    """A path and its names, a test, a state: one that is wrong is listed with its row."""
    wrong = {row[0]: found for row in rows() if (found := errors_in(row))}
    assert wrong == {}
    assert len(rows()) > 60


def test_words_with_another_name_have_one() -> None:
    """The last table names what exists, and no word that needs no other name."""
    names = {word: [n for n in here if "." not in n] for word, here in renamed_words().items()}
    assert {
        word: absent for word, here in names.items() if (absent := set(here) - bound_names())
    } == {}
    assert names.keys() & bound_names() == set()


@pytest.mark.parametrize(
    ("where", "shown", "state"),
    [
        ("`engine/config.py` `StageConfig.from`", "-", "works"),  # a word of the file, no attribute
        ("`engine/nowhere.py`", "-", "works"),
        ("`engine/config.py` `StageConfig.no_such_field`", "-", "works"),
        ("`engine/config.py`", "`tests/engine/test_small.py::test_no_such_test`", "works"),
        ("`engine/config.py`", "`tests/test_nowhere.py::test_a`", "works"),
        ("`engine/config.py`", "-", "refused"),
        ("`engine/config.py`", "-", "refused: `NoSuchError`"),
        ("`engine/config.py`", "-", "partly"),
        ("`engine/config.py`", "-", "missing"),
        ("-", "-", "works"),
        ("engine/config.py", "-", "works"),
    ],
)
def test_a_wrong_row_is_found(where: str, shown: str, state: str) -> None:
    """Each rule of the page can fail."""
    assert errors_in(("a row", where, shown, state)) != []


def test_a_word_that_is_not_there_is_found() -> None:
    assert absent_words("`is_sleeping`, `no_such_word`") == ["no_such_word"]
