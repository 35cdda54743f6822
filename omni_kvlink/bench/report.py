"""What the terminal and the JSON file get to see."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omni_kvlink.bench.machine import one_line

SCHEMA = "kvlink-bench/1"
WIDTH = 96


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as needed: numbers to the right, words to the left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    words = [not any(row[i][:1].isdigit() for row in rows) for i in range(len(head))]
    lines = []
    for row in [head, ["─" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if is_words else cell.rjust(width)
            for cell, width, is_words in zip(row, widths, words, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def wrapped(label: str, text: str) -> str:
    """A label and a text that goes on in its own column."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<10}", subsequent_indent=" " * 10)


def document(
    command: str, machine: dict[str, Any], setup: dict[str, Any], results: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document, the same four parts for every command."""
    return {
        "schema": SCHEMA,
        "command": command,
        "machine": machine,
        "setup": setup,
        "results": results,
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """To a file, or for "-" to standard output."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w") as file:
            file.write(text)


def heading(command: str, machine: dict[str, Any]) -> str:
    return f"kvlink-bench {command}\n" + wrapped("machine", one_line(machine))


def draw(bars: Sequence[tuple[str, float]], unit: str) -> None:
    """Bars on a terminal, where rich is installed."""
    if not sys.stdout.isatty():
        return
    try:
        from rich.bar import Bar
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return  # the extra [bench] has it; the figures are in the table
    top = max(value for _, value in bars)
    grid = Table.grid(padding=(0, 2))
    for label, value in bars:
        bar = Bar(top, 0, value, width=48, color="green" if value >= bars[0][1] else "cyan")
        grid.add_row(label, bar, f"{value:.1f} {unit}")
    Console().print("", grid)


@contextlib.contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` steps: a bar on a terminal, else a few lines."""
    bar = None if quiet or not sys.stdout.isatty() else _rich_bar(what, total)
    if bar is not None:
        with bar as advance:
            yield advance
    else:
        yield _lines(what, total, quiet)


def _rich_bar(what: str, total: int) -> contextlib.AbstractContextManager[Any] | None:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    except ImportError:
        return None  # the extra [bench] has it; lines will do

    @contextlib.contextmanager
    def shown() -> Iterator[Callable[[], None]]:
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as display:
            task = display.add_task(what, total=total)
            yield lambda: display.advance(task)

    return shown()


def _lines(what: str, total: int, quiet: bool) -> Callable[[], None]:
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if not quiet and (done == total or done % max(1, total // 4) == 0):
            print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

    return advance
