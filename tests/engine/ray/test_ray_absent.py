"""Without Ray: the engine can be imported, and using Ray names the package to install."""

from __future__ import annotations

import pytest

from support.processes.absent import check_untouched, cure

MODULES = "omni_kvlink.engine, omni_kvlink.engine.ray.executor, omni_kvlink.engine.ray.stage_actor"
EXECUTOR = """
from omni_kvlink.engine import DiffusionEngine, OmniDiffusionConfig
DiffusionEngine(OmniDiffusionConfig("nowhere", distributed_executor_backend="ray"))
"""
STAGE = """
from omni_kvlink.engine import OmniDiffusion
stages = [{"stage_id": 0, "own_process": "ray"}]
OmniDiffusion("nowhere", {"pipeline": "bagel_single_stage", "stages": stages})
"""


def test_importing_the_executor_touches_no_ray() -> None:
    check_untouched(MODULES, "ray")


@pytest.mark.parametrize("use", [EXECUTOR, STAGE], ids=["executor", "stage"])
def test_the_cure_is_named(use: str) -> None:
    assert "pip install 'omni-kvlink[ray]'" in cure("ray", use)
