"""Deploy files in vLLM-Omni's shape, and what becomes of them here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import SchemaError
from omni_kvlink.engine import DeployConfig, OmniARConfig, OmniDiffusionConfig, RayConfig
from omni_kvlink.engine.entrypoints.stage_configs import rank_urls, stage_configs, with_sources

if TYPE_CHECKING:
    from pathlib import Path

BAGEL = """
async_chunk: false

stages:
  - stage_id: 0
    max_num_batched_tokens: 32768
    max_num_seqs: 3
    gpu_memory_utilization: 0.45
    trust_remote_code: true
    enable_prefix_caching: false
    devices: "0"
    default_sampling_params:
      temperature: 0.4
      top_p: 0.9
      top_k: 1
      max_tokens: 2048
      seed: 52
      detokenize: true
      repetition_penalty: 1.05
  - stage_id: 1
    max_num_batched_tokens: 32768
    max_num_seqs: 1
    enforce_eager: true
    trust_remote_code: true
    enable_prefix_caching: false
    devices: "0"
    input_connectors:
      from_stage_0: WIRE
    default_sampling_params:
      seed: 52

connectors:
  shared_memory_connector:
    name: SharedMemoryConnector
  rdma_connector:
    name: MooncakeTransferEngineConnector
    extra:
      host: "auto"
      zmq_port: 50051
      protocol: "rdma"
      device_name: ""
      memory_pool_size: 4294967296
      memory_pool_device: "cpu"
"""
"""The values of a published BAGEL deployment."""


@pytest.fixture
def bagel(tmp_path: Path) -> Path:
    file = tmp_path / "bagel.yaml"
    file.write_text(BAGEL.replace("WIRE", "shared_memory_connector"))
    return file


def configs(file: Any, **overrides: Any) -> list[Any]:
    return stage_configs(DeployConfig.load(file), "model", overrides)


def test_a_bagel_deployment_is_taken_as_it_is(bagel: Path) -> None:
    deploy = DeployConfig.load(bagel)
    assert (deploy.pipeline, deploy.kinds()) == ("bagel", ["ar", "dit"])
    first, second = deploy.stages
    assert first.sampling == {"temperature": 0.0, "max_tokens": 2048, "seed": 52}
    assert "gpu_memory_utilization" in first.ignored
    assert "top_p" in first.ignored
    assert (second.devices, second.sampling) == ("0", {"seed": 52})
    ar, dit = configs(bagel, dtype="float32")
    assert isinstance(ar, OmniARConfig)
    assert (ar.max_num_seqs, ar.num_blocks, ar.block_size) == (3, 2048, 16)
    assert (ar.stage, ar.think, ar.dtype) == ("ar", False, "float32")
    assert ar.kv.sinks[0].startswith("shm://")
    assert isinstance(dit, OmniDiffusionConfig)
    assert (dit.max_num_seqs, dit.kv.sinks) == (1, ())
    fed = with_sources(dit, ("shm://there",), ar.kv)
    assert fed.kv.sources == ("shm://there",)


def test_another_connector_of_the_same_file(bagel: Path) -> None:
    bagel.write_text(BAGEL.replace("WIRE", "rdma_connector"))
    ar, _ = configs(bagel)
    assert ar.kv.sinks == ("ucx://127.0.0.1:50051",)
    assert ar.kv.sink_options == {"quota": 4294967296}


def test_a_file_may_build_upon_another(bagel: Path) -> None:
    think = bagel.with_name("bagel_think.yaml")
    think.write_text("base_config: bagel.yaml\npipeline: bagel_think\n")
    ar, dit = configs(think)
    assert ar.think
    assert dit.stage == "dit"


def test_a_single_stage(tmp_path: Path) -> None:
    file = tmp_path / "single.yaml"
    file.write_text(
        "pipeline: bagel_single_stage\nstages:\n  - {stage_id: 0, max_num_seqs: 2, devices: '0'}\n"
    )
    (only,) = configs(file)
    assert (only.stage, only.max_num_seqs, only.kv.sources) == ("all", 2, ())


def test_three_stages_hand_on(bagel: Path) -> None:
    more = (
        "  - stage_id: 2\n    cfg_parallel_size: 2\n    input_connectors: {from_stage_1: direct}\n"
    )
    wire = "connectors:\n  direct: {name: KVLinkConnector, extra: {url: 'shm://x', quota: 5}}\n"
    text = BAGEL.replace("WIRE", "shared_memory_connector").replace("connectors:\n  sh", "K")
    text = text.replace("\nK", f"{more}\n{wire}  sh")
    bagel.write_text(text)
    ar, draft, final = configs(bagel)
    assert (draft.kv.sinks, draft.kv.sink_options) == (("shm://x",), {"quota": 5})
    assert ar.kv.sinks != draft.kv.sinks
    assert ar.kv.receivers == draft.parallel_config
    assert draft.kv.receivers == final.parallel_config
    assert final.kv.sinks == ()
    assert final.parallel_config.cfg_parallel_size == 2


def wired(name: str) -> dict[str, Any]:
    return {"stages": [{"stage_id": 0}, {"stage_id": 1, "input_connectors": {name: "x"}}]}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({}, "stages: a list"),
        ({"stages": ["x"]}, "a stage is a map"),
        ({"stages": [{"stage_id": 1}]}, "must be 0, 1"),
        ({"pipeline": "wan", "stages": [{"stage_id": 0}]}, "pipeline 'wan'"),
        (
            {
                "stages": [
                    {"stage_id": 0},
                    {"stage_id": 1, "input_connectors": {"from_stage_7": "x"}},
                ]
            },
            "only from_stage_0",
        ),
        (
            {
                "stages": [
                    {"stage_id": 0},
                    {"stage_id": 1, "input_connectors": {"from_stage_0": "x"}},
                ]
            },
            "no connector 'x'",
        ),
        ({"stages": [{"stage_id": 0}], "connectors": {"x": {"extra": {}}}}, "connector's name"),
    ],
)
def test_what_does_not_fit_is_an_error(values: dict[str, Any], fields: str) -> None:
    with pytest.raises(SchemaError, match=fields):
        DeployConfig.from_dict(values)


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        ({"max_num_seqs": "many"}, "stage 1: Expected `int`"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"dtype": "int4"}, "dtype 'int4'"),
        ({"step_execution": True}, "step_execution"),
    ],
)
def test_a_setting_of_another_kind_is_an_error(stage: dict[str, Any], fields: str) -> None:
    deploy = DeployConfig.from_dict({"stages": [{"stage_id": 0}, {"stage_id": 1, **stage}]})
    with pytest.raises(SchemaError, match=fields):
        stage_configs(deploy, "model", {})


def test_an_unknown_connector_is_an_error() -> None:
    values = {**wired("from_stage_0"), "connectors": {"x": {"name": "PigeonConnector"}}}
    with pytest.raises(SchemaError, match="no connector 'PigeonConnector'"):
        stage_configs(DeployConfig.from_dict(values), "model", {})


@pytest.mark.parametrize(
    ("url", "second"),
    [
        ("shm://kv", "shm://kv-1"),
        ("zmq+tcp://127.0.0.1:0", "zmq+tcp://127.0.0.1:0"),
        ("ucx://[::1]:50051", "ucx://[::1]:50052"),
        ("zmq+ipc:///run/kv", "zmq+ipc:///run/kv-1"),
        ("auto://kv?tcp=127.0.0.1:50051&quota=5", "auto://kv-1?tcp=127.0.0.1:50052&quota=5"),
    ],
)
def test_each_tensor_rank_has_a_url(url: str, second: str) -> None:
    assert rank_urls(url, 1) == (url,)
    assert rank_urls(url, 2) == (url, second)


def test_tensor_ranks_of_a_stage_are_one_sink_each() -> None:
    stages = [{"stage_id": 0, "tensor_parallel_size": 2}, {"stage_id": 1, "cfg_parallel_size": 3}]
    ar, dit = stage_configs(DeployConfig.from_dict({"stages": stages}), "model", {})
    assert ar.parallel_config.world_size == len(set(ar.kv.sinks)) == 2
    assert (dit.parallel_config.world_size, dit.kv.sinks) == (3, ())


@pytest.mark.parametrize(
    ("parallel", "cure"),
    [
        ({"cfg_parallel_size": 2}, "tensor_parallel_size"),
        ({"sequence_parallel_size": 2}, "cfg_parallel_size"),
    ],
)
def test_an_ar_stage_divides_its_heads_alone(parallel: dict[str, int], cure: str) -> None:
    stages = [{"stage_id": 0, **parallel}, {"stage_id": 1}]
    with pytest.raises(SchemaError, match=cure):
        stage_configs(DeployConfig.from_dict({"stages": stages}), "model", {})


def on_ray(first: dict[str, Any], second: dict[str, Any], url: str = "") -> list[Any]:
    stages = [{"stage_id": 0, **first}, {"stage_id": 1, **second}]
    how: dict[str, Any] = {"stages": stages}
    if url:
        stages[1]["input_connectors"] = {"from_stage_0": "wire"}
        how["connectors"] = {"wire": {"name": "KVLinkConnector", "extra": {"url": url}}}
    return stage_configs(DeployConfig.from_dict(how), "model", {})


def test_stages_on_ray() -> None:
    where = {"own_process": "ray", "ray": {"resources": {"fast": 1}, "num_cpus": 2}}
    ar, dit = on_ray(where, {"distributed_executor_backend": "ray", "data_parallel_size": 2})
    assert ar.ray == RayConfig(num_cpus=2, resources={"fast": 1})
    assert ar.kv.sinks[0].startswith("auto://engine-")  # Ray says whether they share memory
    assert ar.kv.sinks[0].endswith("?tcp={node}:0")
    assert dit.distributed_executor_backend == "ray"
    ar, _ = on_ray(where, {"own_process": True}, "zmq+tcp://{node}:0")
    assert ar.kv.sinks == ("zmq+tcp://{node}:0",)
    ar, _ = on_ray({}, where)
    assert ar.kv.sinks[0].startswith("shm://")


def test_a_reader_has_keys_of_its_own() -> None:
    kv = {"source_options": {"keys": "mine", "directory": "here"}}
    ar, dit = on_ray({}, {"kv": kv}, "zmq+tcp://127.0.0.1:0")
    before = dataclasses.replace(ar.kv, sink_options={"keys": "its", "mode": "pooled"})
    fed = with_sources(dit, ("zmq+tcp://127.0.0.1:7",), before)
    assert fed.kv.source_options == {"keys": "mine", "mode": "pooled", "directory": "here"}


@pytest.mark.parametrize(
    ("first", "url", "word"),
    [
        ({"own_process": "rays"}, "", "true, false or ray"),
        ({"ray": {"num_cpus": 1}}, "", "is for own_process: ray"),
        ({}, "zmq+tcp://{node}:0", "is for stages on Ray"),
        ({"own_process": "ray", "ray": {"strategy": "NEAR"}}, "", "stage 0: .*STRICT_SPREAD"),
        ({"own_process": "ray", "ray": {"num_cpus": "many"}}, "", "stage 0: .*float"),
    ],
)
def test_what_cannot_be_on_ray(first: dict[str, Any], url: str, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        on_ray(first, {}, url)
