"""Every form in which vLLM-Omni has published a deployment of BAGEL: read, or refused by a name.

The files are made here, of the fields that the published ones have.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from omni_kvlink import SchemaError
from omni_kvlink.engine import DeployConfig
from omni_kvlink.engine.entrypoints.stage_configs import stage_configs

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = "vllm_omni.model_executor.stage_input_processors.bagel."
EXPAND: dict[str, Any] = {"prompt_expand_func": f"{PROMPTS}expand_cfg_prompts"}
COLLECT: dict[str, Any] = {"cfg_kv_collect_func": f"{PROMPTS}collect_cfg_kv_caches"}
TEXT = {"temperature": 0.4, "top_p": 0.9, "top_k": 1, "max_tokens": 2048, "seed": 52}
TEXT |= {"detokenize": True, "repetition_penalty": 1.05}
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 2048, "seed": 52}
SENT: dict[str, Any] = {
    "need_send_cache": True,
    "kv_transfer_criteria": {"type": "prefill_finished"},
}
RUN: dict[str, Any] = {
    "enforce_eager": True,
    "trust_remote_code": True,
    "distributed_executor_backend": "mp",
}
SIZES: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 32768}
OMNI: dict[str, Any] = {"model_arch": "OmniBagelForConditionalGeneration", "worker_type": "ar"}
WORKER = "vllm_omni.worker.gpu_ar_worker.GPUARWorker"
SHARED: dict[str, Any] = {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 65536}}
RDMA: dict[str, Any] = {"host": "auto", "zmq_port": 50051, "protocol": "rdma", "device_name": ""}
RDMA |= {"memory_pool_size": 2147483648, "memory_pool_device": "cpu"}
MOONCAKE: dict[str, Any] = {"host": "127.0.0.1", "metadata_server": "http://10.0.0.1:8080/metadata"}
MOONCAKE |= {"master": "10.0.0.1:50051", "segment": 512000000, "proto": "tcp"}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}


def thinker(engine: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The first stage of the form with `stage_args:`; `engine` changes its `engine_args`."""
    given: dict[str, Any] = {
        "model_stage": "thinker",
        "model_arch": "BagelForConditionalGeneration",
        "scheduler_cls": "vllm_omni.core.sched.omni_ar_scheduler.OmniARScheduler",
        "gpu_memory_utilization": 0.45,
        "engine_output_type": "text",
        "tensor_parallel_size": 1,
        **RUN,
        **SIZES,
        "omni_kv_config": SENT,
        **(engine or {}),
    }
    return {
        "stage_id": 0,
        "stage_type": "llm",
        "runtime": {"devices": "0", "max_batch_size": 1},
        "engine_args": given,
        "final_output": True,
        "final_output_type": "text",
        "is_comprehension": True,
        "default_sampling_params": TEXT,
        **fields,
    }


def denoiser(engine: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The second stage of the form with `stage_args:`."""
    given: dict[str, Any] = {
        "model_stage": "dit",
        "gpu_memory_utilization": 0.45,
        "engine_output_type": "image",
        **RUN,
        **SIZES,
        "omni_kv_config": {"need_recv_cache": True},
        **(engine or {}),
    }
    return {
        "stage_id": 1,
        "stage_type": "diffusion",
        "runtime": {"devices": "0"},
        "engine_args": given,
        "engine_input_source": [0],
        "final_output": True,
        "final_output_type": "image",
        "is_comprehension": False,
        "default_sampling_params": {"seed": 52},
        **fields,
    }


def stage_args(
    first: dict[str, Any], second: dict[str, Any], connector: dict[str, Any] = SHARED
) -> dict[str, Any]:
    """A file of that form, whose stages name the connector unless it is shared memory."""
    if connector is not SHARED:
        first = {**first, "output_connectors": {"to_stage_1": "wire"}}
        second = {**second, "input_connectors": {"from_stage_0": "wire"}}
    return {
        "stage_args": [first, second],
        "runtime": {
            "enabled": True,
            "defaults": {"window_size": -1, "max_inflight": 1},
            "connectors": {"wire": connector},
            "edges": [{"from": 0, "to": 1, "window_size": -1}],
        },
    }


def stages(
    first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    """A file of the form with `stages:`, whose name says the pipeline."""
    ar = {"stage_id": 0, "max_num_seqs": 3, "devices": "0", "default_sampling_params": TEXT}
    dit = {"stage_id": 1, "max_num_seqs": 1, "devices": "0", "enforce_eager": True}
    dit |= {"default_sampling_params": {"seed": 52}}
    wires: dict[str, Any] = {"shared": {"name": "SharedMemoryConnector"}}
    wires["rdma"] = {"name": "MooncakeTransferEngineConnector", "extra": RDMA}
    both = [{**ar, **(first or {})}, {**dit, **(second or {})}]
    return {"async_chunk": False, "stages": both, "connectors": wires, **top}


CHUNKED: dict[str, Any] = {"trust_remote_code": True, "enable_prefix_caching": False}
CHUNKED |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 10000}
WIRED: dict[str, Any] = {**CHUNKED, "input_connectors": {"from_stage_0": "shared"}}
ALONE: dict[str, Any] = {
    "stage_id": 0,
    **SIZES,
    "max_num_seqs": 1,
    "devices": "0",
    "enforce_eager": True,
}
GATHERED: dict[str, Any] = {"sequence_parallel_size": 4, "ulysses_degree": 1, "ring_degree": 1}
GATHERED |= {"allgather_degree": 4, "use_hsdp": False, "hsdp_shard_size": -1}
XPU = {"xpu": {"stages": [{"stage_id": 0, "quantization": "fp8"}, {"stage_id": 1, "devices": "1"}]}}


class Published(NamedTuple):
    """One file: its content, and the stages that it gives, or what the refusal names."""

    content: dict[str, Any]
    kinds: str = "ar, dit"
    refused: str = ""
    name: str = "bagel.yaml"


FILES = {
    "worker_cls": Published(
        stage_args(thinker({"worker_cls": WORKER}), denoiser(default_sampling_params=GREEDY))
    ),
    "worker_type": Published(stage_args(thinker({"worker_type": "ar"}), denoiser())),
    "another name of the model": Published(stage_args(thinker(OMNI), denoiser())),
    "functions of guidance": Published(
        stage_args(thinker(OMNI, **EXPAND, runtime={"max_batch_size": 3}), denoiser(**COLLECT))
    ),
    "max_num_seqs of the engine": Published(
        stage_args(
            thinker({**OMNI, "max_num_seqs": 3}, **EXPAND, runtime={"devices": "0"}),
            denoiser({"max_num_seqs": 1}, **COLLECT),
        )
    ),
    "a parallel_config": Published(
        stage_args(
            thinker(OMNI, **EXPAND),
            denoiser({"parallel_config": {"tensor_parallel_size": 1}}, **COLLECT),
        )
    ),
    "two ranks": Published(
        stage_args(
            thinker(OMNI, **EXPAND),
            denoiser(
                {"parallel_config": {"tensor_parallel_size": 1, "ulysses_degree": 2}},
                **{**COLLECT, "runtime": {"devices": "0,1", "max_batch_size": 1}},
            ),
        ),
        name="bagel_usp2.yaml",
    ),
    "think mode": Published(
        stage_args(
            thinker(
                {**OMNI, "omni_kv_config": {"need_send_cache": True}},
                prompt_expand_func=f"{PROMPTS}expand_cfg_prompts_think",
            ),
            denoiser(**COLLECT),
        ),
        name="bagel_think.yaml",
    ),
    "one stage": Published(
        {
            "stage_args": [
                {
                    "stage_id": 0,
                    "stage_type": "diffusion",
                    "runtime": {"devices": "0"},
                    "engine_args": {"model_stage": "dit", "max_num_seqs": 1, **RUN},
                    "final_output": True,
                    "final_output_type": "image",
                    "is_comprehension": False,
                    "default_sampling_params": {"seed": 52},
                }
            ],
            "runtime": {"enabled": True},
        },
        kinds="all",
        name="bagel_single_stage.yaml",
    ),
    "RDMA": Published(
        stage_args(
            thinker(OMNI, **EXPAND),
            denoiser(**COLLECT),
            {"name": "MooncakeTransferEngineConnector", "extra": RDMA},
        ),
        name="bagel_rdma.yaml",
    ),
    "a quantized stage": Published(
        stage_args(thinker({**OMNI, "quantization": "fp8"}, **EXPAND), denoiser(**COLLECT)),
        refused="stage 0: quantization='fp8'",
    ),
    "Mooncake's store": Published(
        stage_args(
            thinker(OMNI), denoiser(), {"name": "MooncakeConnector", "extra": dict(MOONCAKE)}
        ),
        refused="no connector 'MooncakeConnector'; there are",
        name="bagel_multiconnector.yaml",
    ),
    "PrisKV": Published(
        stage_args(
            thinker(OMNI, **EXPAND),
            denoiser(**COLLECT),
            {"name": "PrisKVConnector", "extra": {"host": "127.0.0.1", "port": 6379}},
        ),
        refused="no connector 'PrisKVConnector'; there are",
        name="bagel_priskv.yaml",
    ),
    "stages, and nothing else": Published(
        stages({"gpu_memory_utilization": 0.45}, platforms={"cuda": {"stages": []}, **XPU})
    ),
    "stages that name the connector": Published(stages({**CHUNKED}, {**WIRED, "devices": "1"})),
    "stages with positions of images": Published(
        stages({**CHUNKED, "hf_overrides": MROPE, "limit_mm_per_prompt": {"image": 4}}, WIRED)
    ),
    "one stage, by its pipeline": Published(
        {"pipeline": "bagel_single_stage", "async_chunk": False, "stages": [ALONE]},
        kinds="all",
        name="mine.yaml",
    ),
    "gathered K and V": Published(
        {
            "pipeline": "bagel_single_stage",
            "stages": [{**ALONE, "devices": "0,1,2,3", "parallel_config": GATHERED}],
        },
        refused="stage 0: allgather_degree 4: only 1 is supported",
        name="bagel_allgather_kv4.yaml",
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_a_published_file_is_read_or_refused_by_a_name(tmp_path: Path, what: str) -> None:
    published = FILES[what]
    file = tmp_path / published.name
    file.write_text(yaml.safe_dump(copy.deepcopy(published.content)))
    if published.refused:
        with pytest.raises(SchemaError) as refusal:
            stage_configs(DeployConfig.load(file), "model")
        print(f"{what}: {refusal.value}")
        assert published.refused in str(refusal.value)
        return
    deploy = DeployConfig.load(file)
    assert ", ".join(deploy.kinds()) == published.kinds
    first = stage_configs(deploy, "model")[0]
    assert getattr(first, "think", False) is (what == "think mode")
    print(f"{what}: {deploy.pipeline}, {published.kinds}")


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (thinker({"worker_type": "generation"}), denoiser(), "worker_type 'generation': only 'ar'"),
        (thinker(prompt_expand_func="mine.expand"), denoiser(), "prompt_expand_func 'mine.expand'"),
        (thinker(), denoiser(cfg_kv_collect_func="mine.collect"), "cfg_kv_collect_func 'mine"),
        (thinker(), denoiser({"worker_type": "ar"}), "stage 1: worker_type 'ar'"),
        (thinker({"hf_overrides": {**MROPE, "x": 1}}), denoiser(), "stage 0: hf_overrides"),
        (thinker(), denoiser({"use_hsdp": True}), "stage 1: use_hsdp True: only False"),
        (
            thinker({"omni_kv_config": {"need_send_cache": True}}, **EXPAND),
            denoiser(),
            "think mode is expand_cfg_prompts_think",
        ),
    ],
)
def test_another_value_of_these_fields_is_refused(
    first: dict[str, Any], second: dict[str, Any], word: str
) -> None:
    with pytest.raises(SchemaError, match=word):
        DeployConfig.from_dict(stage_args(first, second))


def test_a_file_whose_stages_name_no_model_is_of_its_names_pipeline(tmp_path: Path) -> None:
    content = yaml.safe_dump(FILES["one stage"].content)
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(SchemaError, match="the model is not named"):
        DeployConfig.load(file)
    base = tmp_path / "bagel_single_stage.yaml"
    base.write_text(content)
    file.write_text("base_config: bagel_single_stage.yaml\n")
    assert DeployConfig.load(file).pipeline == "bagel_single_stage"
