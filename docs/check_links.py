"""Checks every link of the built site: `python docs/check_links.py docs/_build/html`.

Files and anchors of the site must exist. Of links to other sites only the form is checked, because
they are not opened; `--list` prints them.
"""
# ruff: noqa: T201

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, and what is linked or loaded."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        is_loaded = tag in ("a", "img", "script", "link", "source")
        self.links += [values[name] for name in ("href", "src") if is_loaded and name in values]


def main(root: Path, *, is_listed: bool) -> int:
    """Print the dead links; return the exit status."""
    pages = {path.resolve(): Page(path) for path in root.rglob("*.html")}
    dead: list[str] = []
    external: set[str] = set()
    checked = 0
    for path, page in pages.items():
        for link in page.links:
            if urlsplit(link).scheme or link.startswith("//"):
                external.add(link)
                continue
            name, anchor = urldefrag(link)
            target = (path.parent / unquote(name).partition("?")[0]).resolve() if name else path
            found = pages.get(target)
            is_there = target.exists() and (found is None or unquote(anchor) in found.anchors)
            checked += 1
            if not is_there:
                dead.append(f"{path.relative_to(root.resolve())}: {link}")
    for link in sorted(external):
        parts = urlsplit(link)
        if parts.scheme not in ("https", "mailto") or (
            parts.scheme == "https" and not parts.netloc
        ):
            dead.append(f"not an https address: {link}")
        elif is_listed:
            print(link)
    print(*sorted(set(dead)), sep="\n", end="\n" if dead else "")
    print(f"{len(pages)} pages, {checked} links, {len(dead)} dead;", end=" ")
    print(f"{len(external)} to other sites, not opened")
    return 1 if dead or not checked else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_listed="--list" in sys.argv))
