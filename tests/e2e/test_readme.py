"""The short examples that the README names run; its own blocks do in tests/test_doc_blocks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("example", ["first_cache", "nested_tensors", "tcp_with_keys"])
def test_the_example(example: str) -> None:
    script = ROOT / "examples" / f"{example}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
