"""docs/engine_coverage.md names files, names in them and tests that exist, and three states."""

from __future__ import annotations

import re
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


def errors_in(row: Row) -> list[str]:
    """What a row names that does not exist."""
    _, where, shown, state = row
    wrong = [] if STATE.fullmatch(state) else [f"state {state!r}"]
    if (where == "-") != (state == "missing"):
        wrong.append(f"{state}, and where is {where!r}")
    source = sources = ""
    for span in SPAN.findall(where):
        if span.endswith(".py"):
            path = PACKAGE / span
            source = path.read_text() if path.is_file() else ""
            sources += source
            wrong += [] if source else [span]
        else:
            wrong += [span for part in span.split(".") if not has_word(source, part)]
    wrong += [error for error in SPAN.findall(state) if not has_word(sources, error)]
    for span in SPAN.findall(shown):
        file, _, test = span.partition("::")
        path = ROOT / file
        wrong += [] if path.is_file() and f"\ndef {test}(" in path.read_text() else [span]
    is_named = all(text == "-" or SPAN.sub("", text).strip(" ,;") == "" for text in (where, shown))
    return wrong if is_named else [*wrong, f"more than names: {where} {shown}"]


def test_all_names_exist() -> None:
    """A path and its names, a test, a state: one that is wrong is listed with its row."""
    wrong = {row[0]: found for row in rows() if (found := errors_in(row))}
    assert wrong == {}
    assert len(rows()) > 60


@pytest.mark.parametrize(
    ("where", "shown", "state"),
    [
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
