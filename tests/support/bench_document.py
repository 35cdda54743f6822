"""What a command of `kvlink-bench` measured, from its JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.commands import run

if TYPE_CHECKING:
    from pathlib import Path


def bench_document(path: Path, *arguments: str) -> dict[str, Any]:
    """Run a command line in this process; it must succeed."""
    assert run([*arguments, "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document
