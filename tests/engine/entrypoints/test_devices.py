"""Which device each rank of a stage gets; with a simulated count of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import DeployConfig
from omni_kvlink.engine.entrypoints.stage_configs import environment, stage_configs

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes torch see so many devices."""

    def make(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


def deployed(*stages: dict[str, Any]) -> DeployConfig:
    entries = [{"stage_id": number, **stage} for number, stage in enumerate(stages)]
    return DeployConfig.from_dict({"pipeline": "bagel", "stages": entries})


TP2_CFG2 = {"devices": "2,3,6,7", "tensor_parallel_size": 2, "cfg_parallel_size": 2}


def cuda(*numbers: int) -> list[torch.device]:
    return [torch.device("cuda", number) for number in numbers]


def test_ranks_in_this_process_and_its_workers(devices: Callable[[int], None]) -> None:
    devices(8)
    _, dit = stage_configs(deployed({"devices": "0"}, TP2_CFG2), "model")
    assert [dit.device_of(rank) for rank in range(4)] == cuda(2, 3, 6, 7)


def test_ranks_of_a_stage_process(
    devices: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(8)
    deploy = deployed({"devices": "5,1", "tensor_parallel_size": 2}, TP2_CFG2)
    first = deploy.stages[0]
    assert environment(first) == {"CUDA_VISIBLE_DEVICES": "5,1"}
    ar, _ = stage_configs(deploy, "model")
    assert [ar.device_of(rank) for rank in range(2)] == cuda(0, 1)  # renumbered
    # Numbers are among the devices that this process sees itself.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-aa,6,7,0,1,2,3")
    assert environment(first) == {"CUDA_VISIBLE_DEVICES": "1,GPU-aa"}
    own = deployed({}, {**TP2_CFG2, "own_process": True, "env": {"A": 1}})
    assert environment(own.stages[1]) == {"A": "1", "CUDA_VISIBLE_DEVICES": "6,7,2,3"}
    _, dit = stage_configs(own, "model")
    assert [dit.device_of(rank) for rank in range(4)] == cuda(0, 1, 2, 3)


def test_stages_without_devices_count_from_0(devices: Callable[[int], None]) -> None:
    devices(2)
    deploy = deployed({"tensor_parallel_size": 2}, {"device": "cuda", "cfg_parallel_size": 2})
    for config in stage_configs(deploy, "model"):
        assert [config.device_of(rank) for rank in range(2)] == cuda(0, 1)
    assert environment(deploy.stages[0]) == {}


def test_devices_do_not_matter_where_there_are_none(devices: Callable[[int], None]) -> None:
    devices(0)
    deploy = deployed({"devices": "0"}, TP2_CFG2)
    assert environment(deploy.stages[0]) == {}
    for config in stage_configs(deploy, "model"):
        assert config.device_of(0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ({"devices": "4"}, r"stage 1: devices 4; this process sees 4, from 0"),
        ({"devices": "0", "tensor_parallel_size": 2}, r"devices \(0,\) for 2 ranks"),
        ({"devices": "0", "own_process": "ray"}, "Ray chooses the GPUs"),
        ({"env": {"A": "1"}}, "own_process: true"),
        ({"env": {"A": "1"}, "own_process": "ray"}, "own_process: true"),
    ],
)
def test_a_placement_that_cannot_be(
    devices: Callable[[int], None], stage: dict[str, Any], word: str
) -> None:
    devices(4)
    with pytest.raises(SchemaError, match=word):
        stage_configs(deployed({}, stage), "model")
