"""The output of a benchmark: tables, progress, the JSON document, or the error that ends it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.cli.process import show
from omni_kvlink.cli.terminal import width
from omni_kvlink.errors import FileError, KVLinkError, MissingFileError
from omni_kvlink.system.failures import translate_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA = "kvlink-bench/1"


class BenchError(KVLinkError):
    """The benchmark could not be set up, or its reader failed; its text is all that is printed."""


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
