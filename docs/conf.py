"""Sphinx configuration: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

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

autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"
intersphinx_mapping: dict[str, tuple[str, None]] = {}

README_SECTION = re.compile(r"<!-- README: ([\w -]+) -->")
LINK = re.compile(r"\]\((?!https?:|#)([\w./-]+)(#[\w-]+)?\)")


def _insert_readme(_: Sphinx, docname: str, source: list[str]) -> None:
    """Replace `<!-- README: Section -->` by that section of the README."""
    text = (ROOT / "README.md").read_text()

    def section(match: re.Match[str]) -> str:
        body = text.partition(f"\n## {match[1]}\n")[2]
        if not body:
            raise ValueError(f"{docname}: the README has no section {match[1]!r}")
        body = re.sub("^###", "##", body.partition("\n## ")[0], flags=re.MULTILINE)
        return _local_links(body)

    source[0] = README_SECTION.sub(section, source[0])


def _local_links(text: str) -> str:
    """Links of the README, relative to `docs/`; files outside `docs/` become plain names."""

    def target(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if path.startswith("docs/"):
            return f"]({path.removeprefix('docs/')}{anchor})"
        return f"](../{path})"

    return LINK.sub(target, text)


def _drop_module_text(_app: Sphinx, what: str, _name: str, _object: object, *rest: Any) -> None:
    """A module's docstring may have a Markdown table; its reference page has its own text."""
    if what == "module":
        rest[-1].clear()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _insert_readme)
    app.connect("autodoc-process-docstring", _drop_module_text)
