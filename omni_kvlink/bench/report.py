"""The output of a benchmark: tables, progress, the JSON document, or the error that ends it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.process import show
from omni_kvlink.errors import FileError, KVLinkError, MissingFileError
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SCHEMA = "kvlink-bench/1"
PIPED_WIDTH, MAX_WIDTH = 80, 96
"""Columns of a report that goes to no terminal, and those that it has at most on a wide one."""
_NARROW = 16
"""Columns that the last one of a table needs, if it has longer texts."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Takes the name and number of steps; the function of its `with` block is called after each."""


class BenchError(KVLinkError):
    """The benchmark could not be set up, or its reader failed; its text is all that is printed."""


def width() -> int:
    """Columns of the terminal, or of the environment's COLUMNS, that a report may take."""
    return min(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, MAX_WIDTH)


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


def row(name: str, values: Iterable[float], text: str) -> list[str]:
    """The cells of a measurement in a table of milliseconds."""
    return [name.replace("_", " "), *(f"{value:.3f}" for value in values), text]


def wrapped(label: str, text: str) -> str:
    """A label, and beside it a text of several lines."""
    return textwrap.fill(text, width(), initial_indent=f"{label:<9} ", subsequent_indent=" " * 10)


def filled(text: str) -> str:
    """A text, wrapped to the width."""
    return textwrap.fill(text, width())


def bar(name: str, got: float, limit: float) -> dict[str, Any]:
    """A figure beside the limit that the project sets for it, as JSON values."""
    return {"bar": name, "got": round(got, 4), "limit": limit, "met": got <= limit}


def bar_line(figure: dict[str, Any]) -> str:
    """A `bar` in one line."""
    state = "met" if figure["met"] else "MISSED"
    return wrapped("bar", f"{figure['bar']}: {figure['got']:g}, limit {figure['limit']:g}: {state}")


def check_json(path: str) -> None:
    """Raise FileError if `write_json` could not write there; "" and "-" are no files."""
    if path not in ("", "-"):
        with _as_json_errors(path), _draft(path):
            pass


def write_json(
    path: str, command: str, machine: dict[str, Any], setup: dict[str, Any], results: dict[str, Any]
) -> None:
    """Write the document, the same parts for every command, to a file; "-": standard output.

    The file has the whole document, or what it had before. It raises FileError.
    """
    named = {"schema": SCHEMA, "command": command, "machine": machine}
    text = json.dumps({**named, "setup": setup, "results": results}, indent=2) + "\n"
    if path == "-":
        show(text, end="")
        return
    with _as_json_errors(path), _draft(path) as draft:
        with open(draft, "w") as file:
            file.write(text)
            file.flush()
            if draft != path:
                os.fsync(
                    file.fileno()
                )  # after a power failure the name must not have an empty file
        if draft != path:
            os.replace(draft, os.path.realpath(path))


def _as_json_errors(path: str) -> AbstractContextManager[None]:
    return translate_errors(f"--json {path}", "give another file", FileError)


@contextlib.contextmanager
def _draft(path: str) -> Iterator[str]:
    """A new file beside a regular one, to replace it; of a device or a pipe, `path` itself."""
    is_there = os.path.exists(path)
    if is_there and not os.path.isfile(path):
        if not Path(path).is_fifo():  # its reader may come later
            os.close(os.open(path, os.O_WRONLY))
        yield path
        return
    target = os.path.realpath(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(target)  # its name may be too long
    if is_there:
        os.close(os.open(target, os.O_WRONLY))  # it may be written, not just replaced
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise MissingFileError(f"--json {path}: make the directory {folder}, or give another file")
    draft = os.path.join(folder, f".kvlink-bench-{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if is_there:
            os.fchmod(fd, os.stat(target).st_mode & 0o7777)
        os.close(fd)
        yield draft
    finally:
        with contextlib.suppress(FileNotFoundError):  # it is the document now
            os.unlink(draft)


def draw(bars: dict[str, float], unit: str) -> None:
    """Draw a chart of bars, if standard output is a terminal and rich is installed."""
    if not bars or not sys.stdout.isatty():
        return
    try:
        from rich.bar import Bar
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return  # only the extra [bench] installs rich; the figures are in the table
    top, (first, *_) = max(bars.values()), bars.values()
    grid = Table.grid(padding=(0, 2))
    for label, value in bars.items():
        bar = Bar(top, 0, value, width=48, color="green" if value >= first else "cyan")
        grid.add_row(label, bar, f"{value:.1f} {unit}")
    Console().print("", grid)


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
