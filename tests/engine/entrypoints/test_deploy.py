"""Deploy files in vLLM-Omni's shape, and what becomes of them here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, SchemaError
from omni_kvlink.engine import (
    DeployConfig,
    DiffusionParallelConfig,
    LoRAConfig,
    LoRARequest,
    OmniARConfig,
    OmniDiffusionConfig,
    RayConfig,
)
from omni_kvlink.engine.entrypoints.stage_configs import rank_urls, stage_configs, with_sources
from support.connectors.keyless import is_let_in

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
    return stage_configs(DeployConfig.load(file).overridden(overrides), "model")


def test_a_bagel_deployment_is_taken_as_it_is(bagel: Path) -> None:
    deploy = DeployConfig.load(bagel)
    assert (deploy.pipeline, deploy.kinds()) == ("bagel", ["ar", "dit"])
    first, second = deploy.stages
    text = {"temperature": 0.4, "top_p": 0.9, "top_k": 1, "repetition_penalty": 1.05}
    assert first.sampling == {**text, "max_tokens": 2048, "seed": 52}
    assert {"gpu_memory_utilization", "detokenize"} <= set(first.ignored)
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


def deployed(first: dict[str, Any], *others: dict[str, Any], **top: Any) -> DeployConfig:
    stages = [{"stage_id": number, **one} for number, one in enumerate((first, *others))]
    return DeployConfig.from_dict({"pipeline": "bagel", **top, "stages": stages})


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({}, "stages: a list"),
        ({"stages": ["x"]}, "a stage is a map"),
        ({"stages": [{"stage_id": 1}]}, "must be 0, 1"),
        ({"pipeline": None, "stages": [{"stage_id": 0}]}, "pipeline None"),
        ({"pipeline": "wan", "stages": [{"stage_id": 0}]}, "pipeline 'wan'"),
        ({"pipeline": "WanPipeline", "stages": [{"stage_id": 0}, {"stage_id": 1}]}, "one stage"),
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
        DeployConfig.from_dict({"pipeline": "bagel", **values})


@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        ({"max_num_seqs": "many"}, "stage 1: max_num_seqs='many': wanted a whole number from 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"vae_dtype": "int8"}, "vae_dtype='int8': wanted 'auto' or 'bfloat16'"),
        ({"step_execution": True, "cache_backend": "tea_cache"}, "cache_backend 'tea_cache' with"),
        ({"step_execution": 1}, "stage 1: step_execution=1: wanted true or false"),
        ({"step_execution": "false"}, "stage 1: step_execution='false': wanted true or false"),
    ],
)
def test_a_setting_of_another_kind_is_an_error(stage: dict[str, Any], fields: str) -> None:
    deploy = deployed({}, stage)
    with pytest.raises(SchemaError, match=fields):
        stage_configs(deploy, "model")


def test_a_stage_runs_step_by_step_if_its_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "bagel.yaml"
    file.write_text(
        "pipeline: bagel\nstages:\n  - {stage_id: 0}\n"
        "  - {stage_id: 1, step_execution: true, max_num_seqs: 8}\n"
    )
    ar, dit = stage_configs(DeployConfig.load(file), "model")
    assert isinstance(dit, OmniDiffusionConfig)
    assert (dit.step_execution, dit.max_num_seqs) == (True, 8)
    assert not hasattr(ar, "step_execution")


@pytest.mark.parametrize("message", ['"false"', "'no'", "0", "false", "true"])
def test_a_protective_flag_in_quotes(tmp_path: Path, message: str) -> None:
    """What a stage serves with `insecure: "false"` is refused; false keeps keyless peers out."""
    file = written(
        tmp_path,
        "pipeline: bagel\nstages:\n"
        "  - {stage_id: 0}\n"
        "  - {stage_id: 1, input_connectors: {from_stage_0: net}}\n"
        "connectors:\n"
        "  net: {name: KVLinkConnector, extra: {url: 'zmq+tcp://127.0.0.1:0', "
        f"quota: 8MB, insecure: {message}}}}}\n",
    )
    if message not in ("false", "true"):
        with pytest.raises(SchemaError, match=r"^KVLinkConnector: extra.insecure=.*: wanted true"):
            stage_configs(DeployConfig.load(file), "model")
        return
    kv = stage_configs(DeployConfig.load(file), "model")[0].kv
    assert kv.sink_options == {"quota": 8_000_000, "insecure": message == "true"}
    with KVLink.serve(kv.sinks[0], **kv.sink_options) as link:
        assert is_let_in(link.url) == (message == "true")


def test_an_unknown_connector_is_an_error() -> None:
    pigeon = deployed(
        {}, {"input_connectors": {"from_stage_0": "x"}}, connectors={"x": {"name": "Pigeon"}}
    )
    with pytest.raises(SchemaError, match="no connector 'Pigeon'"):
        stage_configs(pigeon, "model")


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
    ranks = deployed({"tensor_parallel_size": 2}, {"cfg_parallel_size": 3})
    ar, dit = stage_configs(ranks, "model")
    assert ar.parallel_config.world_size == len(set(ar.kv.sinks)) == 2
    assert (dit.parallel_config.world_size, dit.kv.sinks) == (3, ())


def test_the_class_of_a_stages_workers() -> None:
    """By this engine's form of a name; vLLM-Omni's name for the worker of an AR stage is known."""
    ar, dit = stage_configs(
        deployed(
            {"worker_cls": "vllm_omni.worker.gpu_ar_worker.GPUARWorker"},
            {"worker_cls": "mine:Worker"},
        ),
        "model",
    )
    assert (ar.worker_cls, dit.worker_cls) == ("", "mine:Worker")
    ar, dit = stage_configs(deployed({"worker_cls": "auto"}, {"worker_cls": "auto"}), "model")
    assert (ar.worker_cls, dit.worker_cls) == ("", "")


def test_rows_and_layers_of_a_diffusion_stage_are_divided() -> None:
    """By vLLM-Omni's names; the stage before knows how."""
    degrees = {"ulysses_degree": 2, "ring_degree": 3, "pipeline_parallel_size": 2}
    ar, dit = stage_configs(deployed({}, {"parallel_config": degrees}), "model")
    assert ar.kv.receivers == dit.parallel_config
    assert dit.parallel_config.sequence_parallel_size == 6
    assert dit.parallel_config.world_size == 12


@pytest.mark.parametrize("nested", [False, True])
def test_the_tiles_of_an_image_are_divided(nested: bool) -> None:
    """By vLLM-Omni's name, which turns tiling on there, too."""
    degrees = {"cfg_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}
    given = {**degrees, "vae_patch_parallel_size": 3, "vae_parallel_mode": "tile"}
    deploy = deployed({}, {"parallel_config": given} if nested else given)
    ar, dit = stage_configs(deploy, "model")
    assert dit.parallel_config == DiffusionParallelConfig(**degrees, vae_patch_parallel_size=3)
    assert dit.parallel_config.world_size == 8
    assert (ar.vae_use_tiling, dit.vae_use_tiling) == (False, True)
    _, whole = stage_configs(deployed({}, {"vae_patch_parallel_size": 1}), "model")
    assert not whole.vae_use_tiling


@pytest.mark.parametrize(
    ("ar", "dit", "text"),
    [
        (
            {},
            {"vae_patch_parallel_size": 0},
            "vae_patch_parallel_size=0: wanted a whole number",
        ),
        (
            {},
            {"vae_patch_parallel_size": 3, "cfg_parallel_size": 2, "data_parallel_size": 2},
            "stage 1: parallel_config.vae_patch_parallel_size 3: at most .* together, here 2:",
        ),
        (
            {},
            {
                "vae_patch_parallel_size": 2,
                "cfg_parallel_size": 2,
                "vae_use_tiling": False,
            },
            "stage 1: vae_patch_parallel_size 2 with vae_use_tiling: false: .* remove one",
        ),
        (
            {"vae_patch_parallel_size": 2, "tensor_parallel_size": 2},
            {},
            "stage 0: vae_patch_parallel_size 2: an AR stage decodes no image; leave it out",
        ),
    ],
)
def test_tiles_that_cannot_be_divided(ar: dict[str, Any], dit: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        stage_configs(deployed(ar, dit), "model")


@pytest.mark.parametrize(
    ("parallel", "cure"),
    [
        ({"cfg_parallel_size": 2}, "tensor_parallel_size"),
        ({"sequence_parallel_size": 2}, "ulysses_degree 1 x ring_degree 1 is 1"),
        ({"parallel_config": {"ulysses_degree": 4}}, "divides its heads alone"),
        ({"ring_degree": 2}, "divides its heads alone"),
        ({"pipeline_parallel_size": 2}, "divides its heads alone"),
    ],
)
def test_an_ar_stage_divides_its_heads_alone(parallel: dict[str, int], cure: str) -> None:
    with pytest.raises(SchemaError, match=cure):
        stage_configs(deployed(parallel, {}), "model")


def on_ray(first: dict[str, Any], second: dict[str, Any], url: str = "") -> list[Any]:
    if not url:
        return stage_configs(deployed(first, second), "model")
    second = {**second, "input_connectors": {"from_stage_0": "wire"}}
    wires = {"wire": {"name": "KVLinkConnector", "extra": {"url": url}}}
    return stage_configs(deployed(first, second, connectors=wires), "model")


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
        (
            {"own_process": "ray", "ray": {"num_cpus": "many"}},
            "",
            "ray.num_cpus='many': wanted a num",
        ),
    ],
)
def test_what_cannot_be_on_ray(first: dict[str, Any], url: str, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        on_ray(first, {}, url)


RFC = """
stage_args:
  - stage_id: 0
    stage_type: llm
    runtime: {devices: "0", max_batch_size: 2}
    engine_args:
      model_stage: thinker
      model_arch: BagelForConditionalGeneration
      worker_cls: vllm_omni.worker.gpu_ar_worker.GPUARWorker
      scheduler_cls: vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler
      gpu_memory_utilization: 0.4
      engine_output_type: text
      distributed_executor_backend: "mp"
      max_num_batched_tokens: 3200
      tensor_parallel_size: 2
      omni_kv_config: {need_send_cache: true, kv_transfer_criteria: {type: prefill_finished}}
    final_output: true
    final_output_type: text
    is_comprehension: true
    default_sampling_params: {temperature: 0.4, top_k: 1, max_tokens: 2048, detokenize: True}
  - stage_id: 1
    stage_type: diffusion
    runtime: {devices: "1", max_batch_size: 1, process: true}
    engine_args:
      model_stage: dit
      engine_output_type: image
      parallel_config: {cfg_parallel_size: 2}
      omni_kv_config: {need_recv_cache: true}
    engine_input_source: [0]
    final_output: true
    final_output_type: image
    default_sampling_params: {temperature: 0.0, top_p: 1.0, top_k: -1, seed: 52}
runtime:
  enabled: true
  defaults: {window_size: -1, max_inflight: 1}
  connectors:
    shared_memory_connector:
      name: SharedMemoryConnector
      extra: {shm_threshold_bytes: 65536}
  edges:
    - {from: 0, to: 1, window_size: -1}
"""
"""The form of vLLM-Omni's RFC, with the values of its BAGEL file and a few more."""


def written(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def test_the_form_of_the_rfc(tmp_path: Path) -> None:
    deploy = DeployConfig.load(written(tmp_path, RFC))
    assert (deploy.pipeline, deploy.kinds()) == ("bagel", ["ar", "dit"])
    ar, dit = stage_configs(deploy, "model")
    assert isinstance(ar, OmniARConfig)
    assert (ar.max_num_seqs, ar.num_blocks, ar.distributed_executor_backend) == (2, 200, "mp")
    assert ar.parallel_config.tensor_parallel_size == len(ar.kv.sinks) == 2
    assert dit.parallel_config.cfg_parallel_size == 2
    assert deploy.stages[1].settings["own_process"] is True
    assert deploy.stages[1].sampling == {"seed": 52}
    thinking = RFC.replace(", kv_transfer_criteria: {type: prefill_finished}", "")
    assert DeployConfig.load(written(tmp_path, thinking)).pipeline == "bagel_think"


def test_the_class_of_a_model_by_the_name_of_the_rfc() -> None:
    stage = {"stage_id": 0, "model_cls": "my.models:Mine"}
    deploy = DeployConfig.from_dict({"pipeline": "bagel_single_stage", "stages": [stage]})
    assert deploy.stages[0].settings["model_class_name"] == "my.models:Mine"
    both = {**stage, "model_class_name": "other"}
    with pytest.raises(SchemaError, match=r"model_cls 'my\.models:Mine' and model_class_name"):
        DeployConfig.from_dict({"pipeline": "bagel_single_stage", "stages": [both]})


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("BagelForConditionalGeneration", "QwenForCausalLM", "the model is QwenForCausalLM"),
        ("      model_arch: BagelForConditionalGeneration\n", "", "the model is not named"),
        ("prefill_finished", "special_token", "kv_transfer_criteria"),
        ("need_recv_cache: true", "need_recv_cache: false", "need_recv_cache"),
        ("engine_input_source: [0]", "engine_input_source: [1]", "engine_input_source"),
        ("from: 0, to: 1", "from: 1, to: 0", "an edge from 1 to 0"),
        ("enabled: true", "mode: fast", "runtime: .* mode"),
        ("model_stage: dit", "model_stage: talker", "model_stage 'talker'"),
        ("stage_args:", "stages: []\nstage_args:", "one of them"),
        (
            'devices: "1", max',
            'cfg_parallel_size: 3, devices: "1", max',
            "cfg_parallel_size is 3, and 2 under parallel_config",
        ),
    ],
)
def test_what_the_rfc_form_may_not_say(tmp_path: Path, old: str, new: str, word: str) -> None:
    assert old in RFC
    with pytest.raises(SchemaError, match=word):
        stage_configs(DeployConfig.load(written(tmp_path, RFC.replace(old, new))), "model")


OWN: dict[str, Any] = {"pipeline": "ar_dit", "stages": [{"stage_id": 0}, {"stage_id": 1}]}


def test_a_model_of_ones_own_in_every_stage() -> None:
    model = {"model_class_name": "own:Utility"}
    for how in (
        {**OWN, **model},
        {**OWN, "stages": [{**stage, **model} for stage in OWN["stages"]]},
    ):
        made = stage_configs(DeployConfig.from_dict(how), "m")
        assert [type(one) for one in made] == [OmniARConfig, OmniDiffusionConfig]
        assert [(one.model_class_name, one.stage) for one in made] == [
            ("own:Utility", "ar"),
            ("own:Utility", "dit"),
        ]
    how = {"pipeline": "single_stage", "stages": [{"stage_id": 0, **model}]}
    (alone,) = stage_configs(DeployConfig.from_dict(how), "m")
    assert (alone.model_class_name, alone.stage) == ("own:Utility", "all")


@pytest.mark.parametrize(
    ("stages", "word"),
    [
        (
            OWN["stages"],
            "stage 0: ar_dit is of a model of one's own, and none is named: set model_",
        ),
        ([{"stage_id": 0, "model_class_name": "own:Utility"}, {"stage_id": 1}], "stage 1: ar_dit"),
    ],
)
def test_a_model_of_ones_own_must_be_named(stages: Any, word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        stage_configs(DeployConfig.from_dict({**OWN, "stages": stages}), "m")


def test_a_file_of_another_name_names_its_pipeline(bagel: Path) -> None:
    other = bagel.with_name("indextts2.yaml")
    other.write_text(bagel.read_text())
    with pytest.raises(SchemaError, match=r"no pipeline is named; this engine runs bagel, "):
        DeployConfig.load(other)
    other.write_text("base_config: bagel.yaml\n")
    assert DeployConfig.load(other).pipeline == "bagel"


def test_a_thin_file_changes_fields_of_stages(bagel: Path) -> None:
    thin = (
        "base_config: bagel.yaml\n"
        "dtype: float32\n"
        "stages: [{stage_id: 0, max_num_seqs: 2, default_sampling_params: {seed: 7}}]\n"
        "connectors: {shared_memory_connector: {extra: {quota: 8}}}\n"
    )
    ar, dit = configs(written(bagel.parent, thin))
    assert (ar.max_num_seqs, ar.num_blocks, ar.dtype, dit.dtype) == (2, 2048, "float32", "float32")
    assert ar.kv.sink_options == {"quota": 8}
    first, second = DeployConfig.load(bagel.parent / "mine.yaml").stages
    assert (first.sampling["seed"], first.sampling["top_p"], second.sampling) == (
        *(7, 0.9),
        {"seed": 52},
    )


def test_adapters_of_a_stage() -> None:
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "lora_backend": "peft"}
    own = {"lora_path": ["styles/one"], "static_lora_scale": 0.5, "max_cpu_loras": 3}
    named = {"lora_request": {"lora_name": "x", "lora_int_id": 4, "lora_path": "y"}}
    deploy = deployed(fields, {**own, "default_sampling_params": {**named, "lora_scale": 0.7}})
    ar, dit = stage_configs(deploy.overridden({"max_lora_rank": 32}), "model")
    assert ar.lora_config == LoRAConfig(max_loras=2, max_lora_rank=32)
    assert dit.lora_config == LoRAConfig(
        max_cpu_loras=3, max_lora_rank=32, lora_path="styles/one", lora_scale=0.5
    )
    assert (ar.lora_config.capacity, dit.lora_config.capacity) == (2, 3)
    assert deploy.stages[1].sampling["lora_request"] == LoRARequest("x", 4, "y")


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ({"max_loras": 0}, "max_loras=0: wanted a whole number from 1"),
        ({"max_lora_rank": "big"}, "lora_config.max_lora_rank='big': wanted a whole number"),
        ({"lora_path": ["a", "b"]}, "lora_path .*one adapter a stage"),
        ({"lora_path": "a", "lora_scale": 1.0, "static_lora_scale": 0.5}, "say it once"),
        ({"lora_path": "a", "enable_lora": False}, "with enable_lora: false"),
        ({"lora_scale": 0.5}, "without a lora_path has no effect"),
        ({"lora_backend": "distill"}, "lora_backend 'distill': only 'peft'"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras True: only False"),
        ({"lora_config": {"max_loras": 1}}, "lora_config"),
        ({"default_sampling_params": {"lora_request": {"lora_name": "x"}}}, "lora_int_id"),
        (
            {"default_sampling_params": {"lora_scale": float("nan")}},
            "lora_scale=nan: wanted a number",
        ),
    ],
)
def test_what_a_stage_may_not_say_of_adapters(stage: dict[str, Any], word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        stage_configs(deployed({}, stage), "model")


def test_a_base_that_leads_back_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, "base_config: two.yaml\n", "one.yaml")
    with pytest.raises(SchemaError, match="leads back"):
        DeployConfig.load(written(tmp_path, "base_config: one.yaml\n", "two.yaml"))


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ({"num_replicas": 2}, "num_replicas 2: only 1 is supported"),
        ({"num_replicas": True}, "num_replicas True: only 1 is supported"),
        ({"skip_tokenizer_init": 0}, "skip_tokenizer_init 0: only False is supported"),
        ({"hf_overrides": {"rope": 1}}, "hf_overrides"),
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"model": "other"}, "model 'other'"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "kv_transfer_config"),
        ({"parallel_config": {"enable_expert_parallel": True}}, "enable_expert_parallel"),
        ({"load_format": "dummy"}, "load_format 'dummy'"),
        ({"vae_use_tiling": "some"}, "stage 0: vae_use_tiling='some': wanted true or false"),
        ({"attention_backend": "STA"}, "attention_backend 'STA'; there are SDPA, SDPA_MATH, "),
        ({"vae_patch_parallel_size": 2}, "vae_patch_parallel_size 2: at most .* here 1:"),
        ({"vae_parallel_mode": "batch"}, "vae_parallel_mode 'batch': only 'tile'"),
        ({"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}, "worker_cls 'vllm"),
        ({"attention_backend": ["SDPA"]}, "stage 0: attention_backend=.*: wanted a text"),
        (
            {"profiler_config": {"profiler": "cuda"}},
            "_config.profiler='cuda': wanted 'torch'",
        ),
        ({"profiler_config": {"proton_mode": "x"}}, "profiler_config.proton_mode: no such setting"),
        ({"profiler_config": "torch"}, "profiler_config='torch': wanted a map"),
        (
            {"kv": {"budgett": 1}},
            r"stage 0: kv.budgett: no .*; did you mean budget\? There",
        ),
        ({"kv": {"sinks": ["shm://x"]}}, "kv.sinks: no such setting; "),
        (
            {"own_process": "ray", "ray": {"gpus": 1}},
            r"ray.gpus: no .*; did you mean num_gpus\?",
        ),
        ({"enforce_eager": "no"}, "stage 0: enforce_eager='no': wanted true or false"),
        (
            {"compilation_config": {"level": 3}},
            "n_config.level: no such setting; there are backend",
        ),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "cudagraph_mode 'FULL': no graph is"),
        ({"compilation_config": 3}, "compilation_config=3: wanted a map"),
        ({"compilation_config": {"dynamic": False}}, "no effect unless enforce_eager is false"),
        (
            {"enforce_eager": False, "compilation_config": {"backend": "tvm"}},
            "backend='tvm': wanted 'inductor'",
        ),
        (
            {"enforce_eager": False, "compilation_config": {"mode": "fast"}},
            "mode='fast': wanted 'default'",
        ),
        ({"enforce_eager": False, "compilation_config": {"mode": 3}}, "mode=3: wanted 'default'"),
        (
            {
                "enforce_eager": False,
                "compilation_config": {"backend": "eager", "mode": "reduce-overhead"},
            },
            "compilation_config.mode='reduce-overhead': it is for the backend inductor",
        ),
        ({"pin_cpu_memory": False}, "pin_cpu_memory false: it is for enable_cpu_offload"),
        ({"enable_distributed_layerwise_offload": True}, "enable_distributed_layerwise_offload"),
        ({"enable_layerwise_offload": 2}, "enable_layerwise_offload=2: wanted true or false"),
        ({"warmup_sizes": [[16]]}, r"stage 0: warmup_sizes\[0\]=.*: wanted a list of 2 elements"),
        ({"enable_chunked_prefill": "yes"}, "enable_chunked_prefill"),
        ({"kv_transfer": {"kv_role": "kv_consumer"}}, "kv_transfer .*: it is not supported"),
        ({"max_num_batched_tokens": 2, "max_num_seqs": 3}, "max_num_batched_tokens 2 for max_num"),
        ({"num_gpu_blocks_override": "all"}, "num_blocks='all': wanted a whole number from 1"),
        ({"attention_config": {"backend": "STA"}}, "attention_config"),
        ({"parallel_config": 2}, "parallel_config is a map"),
        ({"an_unknown_field": 1}, "an_unknown_field"),
        ({"default_sampling_params": {"min_tokens": 3}}, "min_tokens 3"),
        ({"default_sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"default_sampling_params": {"top_k": "many"}}, "top_k='many': wanted a whole number"),
        ({"default_sampling_params": {"top_p": 1.5}}, "top_p 1.5"),
        ({"default_sampling_params": {"repetition_penalty": 0}}, "repetition_penalty 0"),
        ({"default_sampling_params": [1]}, "default_sampling_params is a map"),
        ({"cache_backend": "tea_cache"}, "cache_backend 'tea_cache': only 'none'"),
        ({"devices": "0,0"}, "devices '0,0'"),
        ({"devices": "gpu"}, "devices 'gpu'"),
        ({"devices": "0", "device": "cuda:1"}, "one of them"),
        ({"env": "A=1"}, "stage 0: env='A=1': wanted a map"),
        ({"input_connectors": {"from_stage_0": "x"}}, "no such stage"),
        ({"output_connectors": {"to_stage_2": "x"}}, "only to_stage_1"),
        ({"start_timeout": 0}, "start_timeout=0: wanted a number of seconds above 0"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "for 2 ranks"),
    ],
)
def test_nothing_is_taken_silently(stage: dict[str, Any], word: str) -> None:
    with pytest.raises(SchemaError, match=word):
        stage_configs(deployed(stage, {}), "model")


@pytest.mark.parametrize("name", ["FLASH_ATTN", "SAGE_ATTN", "_native_math"])
def test_stages_have_their_own_attention_backends(name: str) -> None:
    deploy = deployed({"attention_backend": name}, {"attention_backend": "TORCH_SDPA"})
    assert [one.attention_backend for one in stage_configs(deploy, "model")] == [name, "auto"]
    both = deploy.overridden({"attention_backend": "SDPA_MATH"})
    assert {one.attention_backend for one in stage_configs(both, "model")} == {"SDPA_MATH"}


def test_what_a_diffusion_stage_may_not_say_of_attention() -> None:
    ring = {"attention_backend": "SDPA_MATH", "ring_degree": 2}
    with pytest.raises(SchemaError, match="'SDPA_MATH' with ring_degree: a ring merges"):
        stage_configs(deployed({}, ring), "model")
    with pytest.raises(SchemaError, match="stage 1: attention_backend 'FA3'; there are SDPA"):
        stage_configs(deployed({}, {"attention_backend": "FA3"}), "model")
    own = {"attention_backend": "FA3", "model_class_name": "own:Model"}
    assert stage_configs(deployed({}, own), "model")[1].attention_backend == "FA3"


@pytest.mark.parametrize("name", ["session_mode", "duplex_session", "custom_voice_dir", "typo"])
def test_fields_of_the_deployment_that_are_not_supported(name: str) -> None:
    with pytest.raises(SchemaError, match=f"the deployment: {name}"):
        deployed({}, {}, **{name: "x"})


def test_compilation_of_a_deployment() -> None:
    """`mode: reduce-overhead` is passed on, and needs a GPU to have an effect."""
    graphs = {"mode": "reduce-overhead"}
    fields = {"enforce_eager": False, "compilation_config": graphs, "warmup_sizes": [[64, 32]]}
    ar, dit = stage_configs(deployed(fields, {"enforce_eager": True}), "model")
    assert not ar.enforce_eager
    assert ar.warmup_sizes == ((64, 32),)
    options = {"backend": "inductor", "dynamic": True, **graphs}
    assert ar.compilation_config.options() == options
    assert (dit.enforce_eager, dit.warmup_sizes) == (True, ())


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(SchemaError, match="no stage has dtyp; there are"):
        deployed({}, {}).overridden({"dtyp": "float32"})
    first, second = deployed({}, {}).overridden({"cache_backend": "tea_cache"}).stages
    assert (first.settings, second.settings) == ({}, {"cache_backend": "tea_cache"})


def test_both_ends_name_one_connector() -> None:
    wires = {"a": {"name": "SharedMemoryConnector"}, "b": {"name": "SharedMemoryConnector"}}
    sends = {"output_connectors": {"to_stage_1": "a"}}
    assert deployed(sends, {}, connectors=wires).stages[1].connector is not None
    with pytest.raises(SchemaError, match="a or b"):
        deployed(sends, {"input_connectors": {"from_stage_0": "b"}}, connectors=wires)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"protocol": "efa"}, "protocol 'efa'"),
        ({"memory_pool_device": "cuda"}, "memory_pool_device 'cuda'"),
        ({"master": "10.0.0.1:1"}, "extra.master: no such setting; there are "),
    ],
)
def test_what_a_mooncake_connector_may_not_say(extra: dict[str, Any], word: str) -> None:
    wires = {"x": {"name": "MooncakeTransferEngineConnector", "extra": extra}}
    second = {"input_connectors": {"from_stage_0": "x"}}
    with pytest.raises(SchemaError, match=word):
        stage_configs(deployed({}, second, connectors=wires), "model")


def test_a_platform_changes_stages(bagel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = bagel.read_text() + "platforms: {cuda: {stages: [{stage_id: 0, max_num_seqs: 9}]}}\n"
    thin = written(bagel.parent, "base_config: bagel.yaml\nstages: [{stage_id: 0, devices: '0'}]\n")
    bagel.write_text(text)
    assert DeployConfig.load(thin).stages[0].settings["max_num_seqs"] == 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert DeployConfig.load(thin).stages[0].settings["max_num_seqs"] == 9


def test_settings_of_prefill() -> None:
    """Of the deployment or of the AR stage; without an effect in the others."""
    every = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    sizes = {"max_num_batched_tokens": 512, "block_size": 8}
    deploy = deployed(sizes, {}, **every)
    ar, _ = stage_configs(deploy, "model")
    assert isinstance(ar, OmniARConfig)
    assert (ar.enable_prefix_caching, ar.enable_chunked_prefill) == (True, True)
    assert (ar.max_num_batched_tokens, ar.num_blocks) == (512, 1024)
    assert set(every) <= set(deploy.stages[1].ignored)


@pytest.mark.parametrize(
    ("stage", "blocks"),
    [
        ({"max_num_batched_tokens": 512}, 32),
        ({"max_num_batched_tokens": 512, "enable_chunked_prefill": False}, 32),
        ({"max_num_batched_tokens": 32768, "enable_chunked_prefill": True}, 2048),
        ({"max_num_batched_tokens": 512, "num_gpu_blocks_override": 77}, 77),
        ({"num_gpu_blocks_override": None}, 1024),
    ],
)
def test_the_size_of_the_pool(stage: dict[str, Any], blocks: int) -> None:
    ar: Any = stage_configs(deployed(stage, {}), "model")[0]
    assert ar.num_blocks == blocks
    assert ar.enable_chunked_prefill is stage.get("enable_chunked_prefill", True)


# ---- pipelines of diffusers, by name

WAN = """
async_chunk: false
trust_remote_code: true
distributed_executor_backend: mp

stages:
  - stage_id: 0
    devices: "0"
    max_num_seqs: 4
    tensor_parallel_size: 1
    enforce_eager: true
    vae_use_tiling: true
    default_sampling_params:
      seed: 42
"""
"""The values of vLLM-Omni's `wan2_2_ti2v.yaml`."""


def by_diffusers(pipeline: str | None = None, **stage: Any) -> Any:
    top = {"pipeline": pipeline} if pipeline else {}
    (made,) = stage_configs(
        DeployConfig.from_dict({**top, "stages": [{"stage_id": 0, **stage}]}), "m"
    )
    return made


def test_a_file_of_wan(tmp_path: Path) -> None:
    deploy = DeployConfig.load(written(tmp_path, WAN, "wan2_2_ti2v.yaml"))
    assert (deploy.pipeline, deploy.kinds()) == ("wan2_2_ti2v", ["diffusers"])
    assert deploy.stages[0].settings["own_process"] is True  # what mp says
    made: Any = stage_configs(deploy, "model")[0]
    assert (made.model_class_name, made.distributed_executor_backend) == (
        "WanPipeline",
        "diffusers",
    )
    assert (made.max_num_seqs, made.vae_use_tiling) == (4, True)
    assert deploy.stages[0].sampling == {"seed": 42}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("QwenImagePipeline", "QwenImagePipeline"),
        ("QwenImageEditPipeline", "QwenImageEditPipeline"),
        ("OvisImagePipeline", "OvisImagePipeline"),
        ("LongCatImagePipeline", "LongCatImagePipeline"),
        ("Wan22Pipeline", "WanPipeline"),
    ],
)
def test_a_pipeline_of_diffusers_by_its_name(name: str, made: str) -> None:
    found = by_diffusers(name, vae_use_slicing=True, attention_backend="SAGE_ATTN")
    assert (found.model_class_name, found.distributed_executor_backend) == (made, "diffusers")
    assert (found.vae_use_slicing, found.attention_backend) == (True, "SAGE_ATTN")
    assert by_diffusers(model_class_name=name).model_class_name == made


@pytest.mark.parametrize(
    ("pipeline", "stage", "word"),
    [
        ("WanPipeline", {"model_class_name": "FluxPipeline"}, "'FluxPipeline' in the pipeline Wan"),
        ("WanPipeline", {"final_output_type": "image"}, "WanPipeline generates videos"),
        ("QwenImagePipeline", {"engine_output_type": "video"}, "generates images"),
        ("QwenImagePipeline", {"model_arch": "WanPipeline"}, "model_arch 'WanPipeline' with"),
        ("QwenImagePipeline", {"distributed_executor_backend": "ray"}, "own_process: ray"),
        ("QwenImagePipeline", {"ulysses_degree": 2}, "no use for parallel_config"),
        ("QwenImagePipeline", {"quantization": "fp8"}, "quantization='fp8'"),
        (
            "QwenImagePipeline",
            {"default_sampling_params": {"latents": 5}},
            "latents=5: wanted a Tensor",
        ),
        ("QwenImagePipeline", {"enable_layerwise_offload": True}, "enable_layerwise_offload"),
        (None, {"model_class_name": "DreamZeroPipeline"}, "no pipeline is named"),
        ("DreamZeroPipeline", {}, "pipeline 'DreamZeroPipeline'; this engine runs bagel"),
    ],
)
def test_what_a_pipeline_of_diffusers_may_not_say(
    pipeline: str | None, stage: dict[str, Any], word: str
) -> None:
    with pytest.raises(SchemaError, match=word):
        by_diffusers(pipeline, **stage)


def test_an_override_that_no_stage_of_the_deployment_has() -> None:
    with pytest.raises(SchemaError, match="no stage has vae_use_slicing; there are"):
        deployed({}, {}).overridden({"vae_use_slicing": True})
