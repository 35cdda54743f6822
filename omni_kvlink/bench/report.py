"""The output of a benchmark: tables, progress, the JSON document, or the error that ends it."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.errors import KVLinkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SCHEMA = "kvlink-bench/1"
WIDTH = 96
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Takes the name and number of steps; the function of its `with` block is called after each."""


class BenchError(KVLinkError):
    """The benchmark could not be set up, or its reader failed; its text is all that is printed."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose numbers are aligned right and whose words are aligned left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    textual = [not any(row[i][:1].isdigit() for row in rows) for i in range(len(head))]
    lines = []
    for line in [head, ["─" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, is_text in zip(line, widths, textual, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def row(name: str, values: Iterable[float], what: str) -> list[str]:
    """The cells of a measurement in a table of milliseconds."""
    return [name.replace("_", " "), *(f"{value:.3f}" for value in values), what]


def wrapped(label: str, text: str) -> str:
    """A label, and beside it a text of several lines."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<9} ", subsequent_indent=" " * 10)


def bar(name: str, got: float, limit: float) -> dict[str, Any]:
    """A figure beside the limit that the project sets for it, as JSON values."""
    return {"bar": name, "got": round(got, 4), "limit": limit, "met": got <= limit}


def bar_line(one: dict[str, Any]) -> str:
    """A `bar` in one line."""
    state = "met" if one["met"] else "MISSED"
    return wrapped("bar", f"{one['bar']}: {one['got']:g}, limit {one['limit']:g}: {state}")


def write_json(
    path: str, command: str, machine: dict[str, Any], setup: dict[str, Any], results: dict[str, Any]
) -> None:
    """Write the document, the same parts for every command, to a file; "-": standard output."""
    named = {"schema": SCHEMA, "command": command, "machine": machine}
    text = json.dumps({**named, "setup": setup, "results": results}, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def draw(bars: Sequence[tuple[str, float]], unit: str) -> None:
    """Draw a bar chart, if standard output is a terminal and rich is installed."""
    if not sys.stdout.isatty():
        return
    try:
        from rich.bar import Bar
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return  # only the extra [bench] installs rich; the figures are in the table
    top = max(value for _, value in bars)
    grid = Table.grid(padding=(0, 2))
    for label, value in bars:
        bar = Bar(top, 0, value, width=48, color="green" if value >= bars[0][1] else "cyan")
        grid.add_row(label, bar, f"{value:.1f} {unit}")
    Console().print("", grid)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool = True) -> Iterator[Callable[[], None]]:
    """Show progress: a bar on a terminal, else a few lines; call the function after each step."""
    display = None if quiet or not sys.stdout.isatty() else _rich_display()
    if display is None:
        yield _lines(what, total, quiet)
    else:
        with display:
            task = display.add_task(what, total=total)
            yield lambda: display.advance(task)


def _rich_display() -> Any:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        return None  # only the extra [bench] installs rich
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, transient=True)


def _lines(what: str, total: int, quiet: bool) -> Callable[[], None]:
    numbers = itertools.count(1)

    def advance() -> None:
        done = next(numbers)
        if not quiet and (done == total or done % max(1, total // 4) == 0):
            print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

    return advance
