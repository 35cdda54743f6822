"""Tables, and the progress of work, as a command shows them on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.process import show

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PIPED_WIDTH, MAX_WIDTH = 80, 96
"""Columns of a report that goes to no terminal, and those that it has at most on a wide one."""
_NARROW = 16
"""Columns that the last one of a table needs, if it has longer texts."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Takes the name and number of steps; the function of its `with` block is called after each."""


def width() -> int:
    """Columns of the terminal, or of the environment's COLUMNS, that a report may take."""
    return min(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, MAX_WIDTH)


def folded(text: str, first: str = "", indent: str = "") -> str:
    """A text, wrapped to the width; its first line and the others are indented by these texts.

    A path is not cut.
    """
    return textwrap.fill(
        text,
        width(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose numbers are aligned right and whose words are aligned left.

    The words of the last column are wrapped to the `width`; where not even the others fit, each row
    is a list.
    """
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    textual = [not any(row[i][:1].isdigit() for row in rows) for i in range(len(head))]
    available = width() - sum(columns + 2 for columns in widths[:-1])
    if available < min(widths[-1], _NARROW if textual[-1] else widths[-1]):
        return "\n".join(line for row in rows for line in _list(head, row))
    widths[-1] = min(widths[-1], available)
    lines = []
    for line in [head, ["─" * columns for columns in widths], *rows]:
        *cells, last = line
        first, *continuation = textwrap.wrap(last, widths[-1]) or [""]
        padded = [
            cell.ljust(columns) if is_text else cell.rjust(columns)
            for cell, columns, is_text in zip([*cells, first], widths, textual, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
        indent = sum(columns + 2 for columns in widths[:-1])
        lines += [" " * indent + part for part in continuation]
    return "\n".join(lines)


def _list(head: Sequence[str], row: Sequence[str]) -> list[str]:
    """A row of a table that is too wide: its first cell, and below it the others by their heads."""
    pairs = zip(head[1:], row[1:], strict=True)
    fill, columns = textwrap.fill, width()
    return [
        fill(row[0], columns),
        *(
            fill(f"{name}: {cell}", columns, initial_indent="  ", subsequent_indent="    ")
            for name, cell in pairs
        ),
    ]


@contextlib.contextmanager
def progress(name: str, total: int, *, quiet: bool = True) -> Iterator[Callable[[], None]]:
    """Show progress: a bar on a terminal, else a few lines; call the function after each step."""
    display = None if quiet or not sys.stdout.isatty() else _rich_display()
    if display is None:
        yield _lines(name, total, quiet)
    else:
        with display:
            task = display.add_task(name, total=total)
            yield lambda: display.advance(task)


def _rich_display() -> Any:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        return None  # only the extra [bench] installs rich
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True)


def _lines(name: str, total: int, quiet: bool) -> Callable[[], None]:
    numbers = itertools.count(1)

    def advance() -> None:
        done = next(numbers)
        if not quiet and (done == total or done % max(1, total // 4) == 0):
            show(f"{done}/{total} {name}", to_stderr=True)

    return advance
