"""Command lines: a parser whose errors are one line, and the types of its options."""

from __future__ import annotations

import argparse
import dataclasses
import os
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from omni_kvlink._version import __version__

STATUS = """exit status: 0 done, 1 what was checked is wrong, 2 wrong usage or an error, 130
interrupted (Ctrl-C)"""
"""The meaning of every command's exit status."""


class Parser(argparse.ArgumentParser):
    """A parser of a command, or of one of its subcommands.

    An error is one line that names the option and what it takes, no option can be abbreviated, and
    a text's indented lines are shown as they are.
    """

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self._groups: dict[str, argparse._ArgumentGroup] = {}

    def group(self, title: str, about: str | None = None) -> argparse._ArgumentGroup:
        """The group of options of a title; a new one if there is none yet."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title, about)
        return self._groups[title]

    def add_version(self) -> None:
        """Add `--version`."""
        version = f"{self.prog} {__version__}"
        about = "print the version, and exit"
        self.add_argument("--version", action="version", version=version, help=about)

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with 2."""
        line = " ".join(message.splitlines())
        self.exit(2, f"{self.prog}: {line}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what the subcommand does not know: its parent would name itself."""
        result, extra = super().parse_known_args(args, namespace)
        if extra:
            self.error(f"there is no option {extra[0]}{self._meant(extra[0])}")
        return result, extra

    def _meant(self, option: str) -> str:
        import difflib

        name = option.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, 1)
        return f", did you mean {close[0]}?" if close else ""


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each paragraph; keep indented lines, which are examples."""
        paragraphs = list[str]()
        for line in text.splitlines():
            is_raw = not line or line.startswith(" ") or not paragraphs
            if is_raw or not paragraphs[-1] or paragraphs[-1].startswith(" "):
                paragraphs.append(line)
            else:
                paragraphs[-1] += f" {line}"
        fill = super()._fill_text
        return "\n".join(
            indent + line if line.startswith(" ") else fill(line, width, indent)
            for line in paragraphs
        )

    def _format_usage(self, *arguments: Any) -> str:
        """Wrap a usage that was given, as argparse does one of its own."""
        lines = super()._format_usage(*arguments).splitlines()
        fill = partial(textwrap.fill, width=self._width, subsequent_indent=" " * len("usage: "))
        return "\n".join(map(fill, lines)) + "\n"


@dataclasses.dataclass(frozen=True)
class NumberArgument:
    """The type of an option that takes a number, named by `noun`, from `least` to `most`."""

    noun: str
    least: float
    most: float = 1_000_000_000
    kind: Callable[[str], float] = int
    step: float = 0
    """It must be a multiple of this, unless it is 0."""
    metavar: str = "N"

    def __call__(self, text: str) -> Any:
        """The number that a text says."""
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if (
            value is None
            or not self.least <= value <= self.most
            or (self.step and value % self.step)
        ):
            raise argparse.ArgumentTypeError(f"wanted {self}, got {text!r}")
        return value

    def __str__(self) -> str:
        return f"{self.noun} from {self.least:g} to {self.most:,.0f}"


POSITIVE, COUNT = NumberArgument("a whole number", 1), NumberArgument("a whole number", 0)
EVEN = NumberArgument("an even number", 2, step=2, metavar="BYTES")
THREADS = NumberArgument("a number of threads", 1, 1024)
SECONDS = NumberArgument("a number of seconds", 0, 86_400, float, metavar="SECONDS")
PERCENT = NumberArgument(
    "a percentage", 0, 100_000, lambda text: float(text.removesuffix("%")), metavar="PERCENT"
)
PER_SECOND = NumberArgument("a number a second", 0.001, 1_000_000, float)


def directory(text: str) -> str:
    """The type of an option that takes a directory which is there."""
    if not os.path.isdir(text):
        why = "it is a file" if os.path.exists(text) else "there is none"
        raise argparse.ArgumentTypeError(f"wanted a directory, got {text!r}: {why}")
    return text


def size(text: str) -> str:
    """The type of an option that takes a size; the text itself."""
    from omni_kvlink.errors import SchemaError
    from omni_kvlink.settings import Size

    rule = Size(least=1)
    try:
        rule.read(text, "size")
    except SchemaError:
        raise argparse.ArgumentTypeError(f"wanted {rule.allowed}, got {text!r}") from None
    return text


def examples(*lines: str) -> str:
    """The epilog of a parser: its examples, and the exit status."""
    head = "examples:" if len(lines) > 1 else "example:"
    return "\n".join([head, *(f"  {line}" for line in lines), "", STATUS])
