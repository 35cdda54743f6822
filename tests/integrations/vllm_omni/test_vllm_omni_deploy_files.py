"""What the reference engine makes of each deploy file that comes with vLLM-Omni."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from omni_kvlink import SchemaError
from omni_kvlink.engine import DeployConfig
from omni_kvlink.engine.entrypoints.deploy_files import read_deploy_file
from omni_kvlink.engine.entrypoints.stage_configs import stage_configs

SPEC = find_spec("vllm_omni")
if SPEC is None or SPEC.origin is None:
    pytest.skip("vLLM-Omni is not installed", allow_module_level=True)
FILES = {file.stem: file for file in sorted((Path(SPEC.origin).parent / "deploy").glob("*.yaml"))}

BAGEL = {
    "bagel": ("bagel", ["ar", "dit"]),
    "bagel_think": ("bagel_think", ["ar", "dit"]),
    "bagel_single_stage": ("bagel_single_stage", ["all"]),
}
DIFFUSERS = {"wan2_2_ti2v": "WanPipeline"}


@pytest.mark.parametrize("name", [name for name in FILES if name in BAGEL])
def test_a_file_of_bagel_is_read(name: str) -> None:
    deploy = DeployConfig.load(FILES[name])
    assert (deploy.pipeline, deploy.kinds()) == BAGEL[name]
    assert len(stage_configs(deploy, "model")) == len(deploy.stages)


@pytest.mark.parametrize("name", [name for name in FILES if name in DIFFUSERS])
def test_a_file_of_a_pipeline_of_diffusers_is_read(name: str) -> None:
    deploy = DeployConfig.load(FILES[name])
    assert (deploy.pipeline, deploy.kinds()) == (name, ["diffusers"])
    (made,) = stage_configs(deploy, "model")
    assert (made.model_class_name, made.distributed_executor_backend) == (
        *(DIFFUSERS[name], "diffusers"),
    )


@pytest.mark.parametrize("name", [name for name in FILES if name not in BAGEL | DIFFUSERS])
def test_a_file_of_another_model_is_refused(name: str) -> None:
    text = rf"^{re.escape(FILES[name].name)}: (no pipeline is named|pipeline '\w+'); this engine"
    with pytest.raises(SchemaError, match=text):
        DeployConfig.load(FILES[name])


def test_the_page_counts_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "engine.md").read_text()
    others = [file for name, file in FILES.items() if name not in BAGEL | DIFFUSERS]
    named = sum("pipeline" in read_deploy_file(file) for file in others)
    assert f"Of the {len(FILES)} files" in page
    assert f"{len(others) - named} have no `pipeline`, {named} one" in page
