"""The documentation names every public error and every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import omni_kvlink
from omni_kvlink import errors

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="installed without the sources")


def test_every_error_has_a_section() -> None:
    headings = set(re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE))
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KVLinkError)
    }
    assert headings == public - {"KVLinkError"}


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"omni_kvlink\.(\w+)$", pages, re.MULTILINE))
    modules = {"adapters", "aio", "lowlevel", "lookup", "testing", "topology"}
    public = {
        name
        for name, value in vars(omni_kvlink).items()
        if getattr(value, "__module__", "").startswith("omni_kvlink") and not name.startswith("_")
    }
    on_the_error_page = {name for name in public if hasattr(errors, name)}
    assert public - on_the_error_page - documented == set()
    assert modules <= documented
