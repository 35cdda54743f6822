"""Links of README and docs, as one reads them in the repository; `make docs` checks the site's."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.doc_blocks import DOCS, FENCE, ROOT, pages

if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = [*pages(), "CHANGELOG.md"]


def prose(page: str) -> str:
    return FENCE.sub("", (ROOT / page).read_text())


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub and MyST make them."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)
    return set(plain)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in LINK.findall(prose(page)):
        if urlsplit(link).scheme:
            continue
        name, _, anchor = link.partition("#")
        target = ROOT / page if not name else (ROOT / page).parent / name
        assert target.exists(), link
        assert str(target.resolve()).startswith(str(ROOT)), link
        if anchor:
            assert anchor in headings(target), link


def test_external_links_are_https() -> None:
    """Their form only: nothing is opened here."""
    found = {link for page in PAGES for link in LINK.findall(prose(page)) if urlsplit(link).scheme}
    assert found
    for link in found:
        assert urlsplit(link).scheme == "https", link
        assert "." in urlsplit(link).netloc, link


def test_every_page_is_in_the_navigation() -> None:
    listed = set()
    for index in (DOCS / "index.md", DOCS / "reference" / "index.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.DOTALL):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(index.parent / f"{name}.md").relative_to(ROOT) for name in names}
    on_site = {Path(page) for page in pages() if page.startswith("docs/")}
    assert on_site - {Path("docs/index.md")} == listed


def test_the_pictures_are_what_the_scripts_draw(tmp_path: Path) -> None:
    found = {path.name: path.read_bytes() for path in (DOCS / "pictures").glob("*.svg")}
    drawn = set()
    for script in ("draw.py", "plot.py"):
        copy = tmp_path / "docs" / "pictures" / script
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((DOCS / "pictures" / script).read_text())
    for folder in ("benchmarks", "examples"):
        os.symlink(ROOT / folder, tmp_path / folder)
    for script in ("draw.py", "plot.py"):
        runpy.run_path(str(tmp_path / "docs" / "pictures" / script), run_name="__main__")
    for path in (tmp_path / "docs" / "pictures").glob("*.svg"):
        assert path.read_bytes() == found[path.name], path.name
        drawn.add(path.name)
    assert drawn == set(found)
    shown = "".join((ROOT / page).read_text() for page in PAGES)
    assert all(f"pictures/{name}" in shown for name in found)
