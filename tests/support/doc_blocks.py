"""The code blocks of README and docs: found, and run with the page's lines in tracebacks."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"\{[\w-]+\}")
"""What Sphinx handles itself, such as {toctree}."""
FENCE = re.compile(r"^( *)(`{3,}|:{3,})([^\n`]*)\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)

FILE_NAME = re.compile(r"# (\w+\.py)$")
"""First line of a block that is a file; it is written to the working directory."""


class Block(NamedTuple):
    """A fenced block; `section` is the heading above it."""

    page: str
    section: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language}) {self.first!r}"


def pages() -> list[str]:
    """README, CONTRIBUTING and every page of the site, relative to the root."""
    site = (str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md") if "_build" not in str(path))
    return ["README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", *sorted(site)]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order, without Sphinx's directives."""
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        language = match[3].strip()
        if not DIRECTIVE.match(language):
            headings = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)
            line = text.count("\n", 0, match.start(4)) + 1
            section = headings[-1] if headings else ""
            found.append(Block(page, section, line, language, match[4]))
    return found


def execute(found: Sequence[Block], namespace: dict[str, Any]) -> None:
    """Run Python blocks in one namespace, in the working directory.

    An `output` block must be what the block before it printed.
    """
    printed = ""
    for block in found:
        if block.language == "output":
            assert printed == block.text, f"{block}: it printed\n{printed}"
        elif block.language == "python" and (name := FILE_NAME.match(block.first)):
            Path(name[1]).write_text(block.text)
        elif block.language == "python":
            source = "\n" * (block.line - 1) + block.text
            code = compile(source, str(ROOT / block.page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            printed = output.getvalue()


@contextlib.contextmanager
def directory(path: Path) -> Iterator[None]:
    """Work in a directory."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
