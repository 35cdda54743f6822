"""Without diffusers: importing the engine costs nothing, and using it says how it is installed."""

from __future__ import annotations

from support.processes.absent import check_untouched, cure

USE = """
import tempfile
from pathlib import Path
from omni_kvlink.engine import DiffusionEngine, OmniDiffusionConfig
with tempfile.TemporaryDirectory() as directory:
    Path(directory, "model_index.json").write_text("{}")
    DiffusionEngine(OmniDiffusionConfig(directory, distributed_executor_backend="diffusers"))
"""


def test_importing_the_executor_touches_no_diffusers() -> None:
    modules = "omni_kvlink.engine, omni_kvlink.engine.models.diffusers_executor"
    check_untouched(modules, "diffusers", "transformers")


def test_the_cure_is_named() -> None:
    assert "pip install 'omni-kvlink[diffusers]'" in cure("diffusers", USE)
