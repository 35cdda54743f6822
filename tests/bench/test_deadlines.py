"""The benchmark of deadlines runs, and reports every call; its figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "deadlines.py"


def test_every_call_has_a_row(tmp_path: Path) -> None:
    document = tmp_path / "deadlines.json"
    options = ["--url", "inproc://deadlines", "--rounds", "1", "--timeout", "0.01"]
    command = [sys.executable, str(SCRIPT), *options, "--json", str(document)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads(document.read_text())["results"]["rows"]
    calls = ["connect", "get", "stream_get", "put, no memory", "Receipt.wait"]
    assert [row["call"] for row in rows] == calls
