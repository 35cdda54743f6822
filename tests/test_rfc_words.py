"""Each row of "The RFC's words" runs: its import, or its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import omni_kvlink.connectors
import omni_kvlink.engine

PAGE = Path(omni_kvlink.__file__).parents[1] / "docs" / "rfc_words.md"
LAST_COLUMN = re.compile(r"^\| .* \| `([^|`]+)` \|$", re.MULTILINE)


def lines() -> list[str]:
    return LAST_COLUMN.findall(PAGE.read_text()) if PAGE.exists() else []


@pytest.mark.skipif(not PAGE.exists(), reason="installed without the sources")
def test_each_row_has_a_line() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    assert len(lines()) == len(rows) - 1 >= 30  # but for the head of the table


@pytest.mark.parametrize("line", lines())
def test_the_line_runs(line: str) -> None:
    if line.startswith("from "):
        names: dict[str, Any] = {}
        exec(line, names)
        return
    owner, _, name = line.partition(".")
    module = omni_kvlink.connectors if owner == "OmniConnector" else omni_kvlink.engine
    assert hasattr(getattr(module, owner), name)
