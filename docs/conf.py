"""Sphinx configuration: `make docs`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink import __version__
from omni_kvlink.bench.commands import run as kvlink_bench
from omni_kvlink.cli.commands import run as kvlink

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
os.environ["COLUMNS"] = "90"  # of the commands' help

project = "omni_kvlink"
author = "The omni_kvlink authors"
copyright = f"2026 {author}"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "fieldlist"]
nitpicky = False
html_theme = "furo"
html_title = f"omni_kvlink {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
copybutton_selector = "div:not(.highlight-output, .highlight-text) > div.highlight pre"

autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"
intersphinx_mapping: dict[str, tuple[str, None]] = {}

WHOLE_FILE = re.compile(r"<!-- FILE: ([\w./-]+) -->")
HELP = re.compile(r"<!-- HELP: ([\w -]+) -->")
LINK = re.compile(r"\]\((?!https?:|#)([\w./-]+)(#[\w-]+)?\)")
PAGES = {
    "CHANGELOG.md": "docs/changelog.md",
    "CODE_OF_CONDUCT.md": "docs/code_of_conduct.md",
    "CONTRIBUTING.md": "docs/contributing.md",
    "README.md": "docs/index.md",
    "SECURITY.md": "docs/security.md",
    "benchmarks/README.md": "docs/benchmark_method.md",
}
"""Files outside `docs/` that are pages of the site."""


def _insert_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Insert files where a page names them; adjust the links."""
    here = f"docs/{docname}"
    text = _local_links(source[0], here, here)
    for path in WHOLE_FILE.findall(text):
        app.env.note_dependency(str(ROOT / path))  # else a change of the file leaves the old page
    text = WHOLE_FILE.sub(lambda m: _local_links(_body(m[1]), m[1], here), text)
    source[0] = HELP.sub(lambda m: f"```text\n{_help(*m[1].split())}```", text)


def _body(path: str) -> str:
    """A file without its first line, the title."""
    return (ROOT / path).read_text().partition("\n")[2]


def _help(command: str, *argv: str) -> str:
    """What a command prints when it is asked for help."""
    run = {"kvlink": kvlink, "kvlink-bench": kvlink_bench}[command]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        run([*argv, "--help"])
    return output.getvalue()


def _local_links(text: str, written_in: str, shown_in: str) -> str:
    """Links as they are in one file, relative to another; both relative to the root."""

    def target(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(written_in), match[1]))
        path = os.path.relpath(PAGES.get(path, path), os.path.dirname(shown_in))
        return f"]({path}{match[2] or ''})"

    return LINK.sub(target, text)


LINK_URL = re.compile(r'"((?:file|tcp|shm)://[^"]*)"')


def _fix_docstring(_app: Sphinx, what: str, _name: str, _object: object, *rest: Any) -> None:
    """Drop a module's text, which its page has in another form; make no link of an example."""
    lines: list[str] = rest[-1]
    lines[:] = [] if what == "module" else [LINK_URL.sub(r"``\1``", line) for line in lines]


MADE_BY_LINKS = {
    "Allocation",
    "AsyncKVConsumer",
    "AsyncKVProducer",
    "AsyncPutStream",
    "AsyncReceivedStream",
    "Delivery",
    "KVConsumer",
    "KVProducer",
    "PutStream",
    "Receipt",
    "Received",
    "ReceivedLayer",
    "ReceivedStream",
}
"""Classes whose constructors are not for callers."""


def _hide_constructor(_: Sphinx, what: str, name: str, *rest: Any) -> tuple[str, str] | None:
    is_hidden = what == "class" and name.rpartition(".")[2] in MADE_BY_LINKS
    return ("", "") if is_hidden else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _insert_files)
    app.connect("autodoc-process-docstring", _fix_docstring)
    app.connect("autodoc-process-signature", _hide_constructor)
