"""Without transformers: importing costs nothing, and using it says how it is installed."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
import omni_kvlink, omni_kvlink.adapters, omni_kvlink.lookup
assert not [name for name in sys.modules if name.startswith(("transformers", "tokenizers"))]
"""
MISSING = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
from omni_kvlink import UnavailableError
from omni_kvlink.adapters import make_cache
try:
    make_cache()
except UnavailableError as error:
    print(error)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_adapters_touches_no_transformers() -> None:
    assert run(IMPORTED) == ""


def test_the_cure_is_named() -> None:
    assert "pip install 'omni-kvlink[hf]'" in run(MISSING)
