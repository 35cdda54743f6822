"""Without diffusers: importing the engine costs nothing, and using it says how it is installed."""

from __future__ import annotations

import subprocess
import sys

IMPORTED = """
import sys
import omni_kvlink.engine, omni_kvlink.engine.executor.diffusers
assert not [name for name in sys.modules if name.startswith(("diffusers", "transformers"))]
"""
MISSING = """
import sys, tempfile
from pathlib import Path
sys.modules["diffusers"] = None  # as if it were not installed
from omni_kvlink import UnavailableError
from omni_kvlink.engine import DiffusionEngine, OmniDiffusionConfig
with tempfile.TemporaryDirectory() as directory:
    Path(directory, "model_index.json").write_text("{}")
    try:
        DiffusionEngine(OmniDiffusionConfig(directory, distributed_executor_backend="diffusers"))
    except UnavailableError as error:
        print(error)
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_executor_touches_no_diffusers() -> None:
    assert run(IMPORTED) == ""


def test_the_cure_is_named() -> None:
    assert "pip install 'omni-kvlink[diffusers]'" in run(MISSING)
