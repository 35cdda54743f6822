"""The listings of the source documents: each class takes the calls that its listing shows."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import omni_kvlink.engine
from omni_kvlink import KVCacheTransferData
from omni_kvlink.engine import (
    DiffusersPipelineExecutor,
    DiffusionOutput,
    ModelRunnerOutput,
    NoWorkersError,
)

LISTINGS: list[tuple[str, str, tuple[str, ...]]] = [
    ("GPUDiffusionWorker", "__init__", ("local_rank", "rank", "od_config")),
    ("GPUDiffusionWorker", "init_device", ()),
    ("GPUDiffusionWorker", "execute_model", ("requests",)),
    ("GPUDiffusionWorker", "sleep", ("level",)),
    ("GPUDiffusionWorker", "wake_up", ("tags",)),
    ("GPUDiffusionModelRunner", "__init__", ("config", "device")),
    ("GPUDiffusionModelRunner", "execute_model", ("requests",)),
    ("GPUDiffusionModelRunner", "_load_model", ()),
    ("GPUDiffusionModelRunner", "_init_connector", ()),
    ("GPUDiffusionModelRunner", "_extract_kv_cache", ("request",)),
    ("DiffusionKVManager", "receive_from_connector", ("connector", "request")),
    ("DiffusionKVManager", "get_kv_cache", ("request_id",)),
    ("DiffusionKVManager", "allocate", ("request",)),
    ("DiffusionKVManager", "free", ("request",)),
    ("SyncScheduler", "schedule", ()),
    ("SyncScheduler", "get_finished_requests_needing_kv_transfer", ()),
    ("EngineCore", "step", ()),
    ("DiffusionEngine", "step", ("requests",)),
    ("MultiprocExecutor", "execute_model", ("scheduler_output",)),
    ("MultiprocExecutor", "collective_rpc", ("method",)),
    ("DiffusersPipelineExecutor", "_init_executor", ()),
    ("DiffusersPipelineExecutor", "execute_model", ("scheduler_output",)),
    ("DiffusersPipelineExecutor", "initialize_from_config", ("kv_cache_configs",)),
    ("DiffusersPipelineExecutor", "register_failure_callback", ("callback",)),
    ("DiffusersPipelineExecutor", "determine_available_memory", ()),
]
DEFAULTS = {"level": 1, "tags": None}


@pytest.mark.parametrize(("owner", "method", "arguments"), LISTINGS)
def test_a_method_takes_the_arguments_of_its_listing(
    owner: str, method: str, arguments: tuple[str, ...]
) -> None:
    signature = inspect.signature(getattr(getattr(omni_kvlink.engine, owner), method))
    names = list(signature.parameters)[1 : 1 + len(arguments)]
    assert tuple(names) == arguments
    signature.bind(None, *range(len(arguments)))  # nothing else is required
    signature.bind(None, **dict.fromkeys(arguments))
    given = {name: signature.parameters[name].default for name in DEFAULTS.keys() & arguments}
    assert given == {name: DEFAULTS[name] for name in given}


def test_the_output_of_a_runner_is_made_as_in_the_listing() -> None:
    image = torch.zeros(2)
    output = ModelRunnerOutput(
        req_ids=["a"],
        req_id_to_index={"a": 0},
        sampled_token_ids=[],
        spec_token_ids=None,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[image],
        kv_connector_output=None,
        num_nans_in_logits=None,
    )
    assert output.pooler_output[output.req_id_to_index["a"]] is image


def test_a_pipelines_executor_has_no_workers() -> None:
    executor: Any = DiffusersPipelineExecutor.__new__(DiffusersPipelineExecutor)
    assert DiffusersPipelineExecutor.supports_pp is False
    with pytest.raises(NotImplementedError, match=r"collective_rpc|workers"):
        executor.collective_rpc("sleep", timeout=None, args=(), kwargs=None)
    assert issubclass(NoWorkersError, NotImplementedError)


def test_the_payload_of_the_listing() -> None:
    layer = torch.zeros(3, 1, 4)
    data = KVCacheTransferData(
        "a",
        {"key_cache": [layer], "value_cache": [layer]},
        metadata={"kv_lens": [3], "ropes": [3], "num_layers": 1},
    )
    assert [len(data.layer_blocks[name]) for name in ("key_cache", "value_cache")] == [1, 1]
    assert data.block_ids == []
    assert {name: data.metadata[name] for name in ("kv_lens", "ropes", "num_layers")} == {
        "kv_lens": [3],
        "ropes": [3],
        "num_layers": 1,
    }
    assert data.metadata.get("kv_lens") == [3]
    assert {"kv_lens", "ropes", "num_layers"} <= set(data.metadata)


def test_outputs_of_a_batch_have_their_requests_ids() -> None:
    assert "request_id" in inspect.signature(DiffusionOutput).parameters
