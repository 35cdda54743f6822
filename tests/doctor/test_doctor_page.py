"""The reports that docs/guides/doctor.md shows are such as the command prints."""

from __future__ import annotations

import os
import re

import pytest

from omni_kvlink.cli.doctor import AREAS
from omni_kvlink.doctor.examination import examine
from omni_kvlink.doctor.inquiry import Inquiry
from support.doc_blocks import DOCS, blocks

if not DOCS.exists():
    pytest.skip("installed without the sources", allow_module_level=True)

PAGE = "docs/guides/doctor.md"
TEXTS = [block for block in blocks(PAGE) if block.language == "text"]


def shown(text: str) -> list[tuple[str, str]]:
    """The areas and names of a report's findings."""
    found, area = list[tuple[str, str]](), ""
    for line in text.splitlines():
        if re.fullmatch(r"[a-z]+", line):
            area = line
        elif match := re.match(r"  (?:ok|note|wrong) +(\S+( \S+)*)  ", line):
            found.append((area, match[1]))
    return found


def test_the_report_of_a_machine(sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    os.mkdir(f"{sockets}/kvlink", 0o700)
    report = examine(Inquiry(areas=("memory", "sockets", "copier", "keys", "namespaces")))
    os.rmdir(f"{sockets}/kvlink")
    real = [(finding.area, finding.name) for finding in report.findings]
    printed = [pair for pair in shown(TEXTS[0].text) if pair[0] not in ("gpu", "packages")]
    assert printed == real
    assert shown(report.text()) == real


def test_every_area_is_described() -> None:
    page = (DOCS / "guides" / "doctor.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*AREAS]
