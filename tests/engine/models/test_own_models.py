"""Models of one's own: by a registered name, or as "module:Class"."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import (
    DiffusionEngine,
    DiffusionRequestBatch,
    ModelUtility,
    OmniARConfig,
    OmniDiffusionConfig,
    OmniDiffusionRequest,
)
from omni_kvlink.engine.config import DiffusionParallelConfig, KVConfig
from omni_kvlink.engine.errors import EngineError
from omni_kvlink.engine.outputs import DiffusionOutput
from omni_kvlink.engine.parallel.batch_sync import BatchSync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.engine.worker import model
from omni_kvlink.engine.worker.model import model_utility, register_model
from omni_kvlink.engine.worker.parallel_model_runner import share_passes
from support.engine.fixtures import WAIT, request

if TYPE_CHECKING:
    from collections.abc import Mapping


class GrayPipeline:
    """Images of one level, the request's seed; `wrong` has other outputs, by prompt."""

    supports_request_batch = True

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        requests = list(req) if isinstance(req, DiffusionRequestBatch) else [req]
        outputs = [DiffusionOutput(each.request_id, gray(each)) for each in requests]
        wrong: dict[Any, Any] = {
            "one too many": [*outputs, *outputs],
            "none": [],
            "another's": [DiffusionOutput("another", outputs[0].output)],
        }
        found: list[DiffusionOutput] = wrong.get(requests[0].prompt, outputs)
        return found


def gray(request: OmniDiffusionRequest) -> torch.Tensor:
    return torch.full((1, 2, 2, 3), request.sampling_params.seed or 0, dtype=torch.uint8)


class GrayUtility(ModelUtility):
    """Without weights and KV."""

    pipeline = GrayPipeline()

    @staticmethod
    def prepare(request: OmniDiffusionRequest) -> None:
        """Leaves nothing open."""

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return {}

    def reload(self) -> None:
        """Has no weights."""


def config(name: str) -> OmniDiffusionConfig:
    return OmniDiffusionConfig("", model_class_name=name, dtype="float32", stage="all")


@pytest.mark.parametrize("name", ["gray", f"{__name__}:GrayUtility"])
def test_a_model_of_ones_own_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # `register_model` has no opposite: the table is copied, and the first one restored.
    monkeypatch.setattr(model, "_MODELS", dict(model._MODELS))
    register_model("gray", f"{__name__}:GrayUtility")
    assert model_utility(config(name)) is GrayUtility
    with DiffusionEngine(config(name)) as engine:
        outputs = engine.generate(
            [request(str(seed), seed=seed, need_kv_receive=False) for seed in (3, 200)],
            timeout=WAIT,
        )
    assert [int(output.result().unique()) for output in outputs] == [3, 200]


@pytest.mark.parametrize("name", ["DreamZeroPipeline", "gray"])
def test_a_model_that_is_not_registered(name: str) -> None:
    with pytest.raises(ValueError, match=f"no model '{name}'; there are bagel, or 'module:Class'"):
        DiffusionEngine(config(name))


def test_attention_that_a_model_does_not_choose_is_refused() -> None:
    how = dataclasses.replace(config(f"{__name__}:GrayUtility"), attention_backend="SDPA_MATH")
    with pytest.raises(ValueError, match="'SDPA_MATH': GrayUtility does not support it"):
        DiffusionEngine(how)


@pytest.mark.parametrize("name", ["nowhere:Utility", f"{__name__}:NoUtility"])
def test_a_class_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=f"model_class_name {name}: "):
        model_utility(config(name))


@pytest.mark.parametrize("name", ["GrayPipeline", "gray"])
def test_a_class_that_is_no_model(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no ModelUtility"):
        DiffusionEngine(config(f"{__name__}:{name}"))


class BranchesUtility(GrayUtility):
    """Of whose branches each rank computes some, but no rows and no layers alone."""

    branches = ("one", "two")


@pytest.mark.parametrize(
    ("degrees", "word"),
    [
        ({"ring_degree": 2}, "sequence_parallel_size 2: BranchesUtility"),
        ({"ulysses_degree": 3}, "sequence_parallel_size 3: BranchesUtility"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: BranchesUtility"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: BranchesUtility"),
        ({"cfg_parallel_size": 3}, "cfg_parallel_size 3: BranchesUtility has 2 guidance branches"),
    ],
)
def test_what_a_model_does_not_divide_is_refused(degrees: dict[str, Any], word: str) -> None:
    group = ProcessGroup(RankCoords(0, 0, 0), DiffusionParallelConfig(**degrees))
    with pytest.raises(ValueError, match=word):
        BranchesUtility(config("gray"), torch.device("cpu"), group)
    guided = ProcessGroup(RankCoords(0, 1, 0), DiffusionParallelConfig(cfg_parallel_size=2))
    utility = BranchesUtility(config("gray"), torch.device("cpu"), guided)
    assert (utility.process_group, utility.own_branches) == (guided, ("two",))


def test_ranks_need_hooks_in_the_pipeline() -> None:
    group = ProcessGroup(RankCoords(0, 0, 0), DiffusionParallelConfig(cfg_parallel_size=2))
    with pytest.raises(ValueError, match="GrayPipeline: hooks without branches, sync_errors, deco"):
        share_passes(GrayPipeline(), BranchesUtility.branches, group, BatchSync(group))


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        (OmniARConfig("", num_blocks=1), "has no kv_row, and this stage reads prompts"),
        (OmniDiffusionConfig("", kv=KVConfig(sources=("shm://a",))), "kv_row, .* receives KV"),
        (OmniDiffusionConfig("", kv=KVConfig(sinks=("shm://a",))), "kv_row, .* sends KV"),
    ],
)
def test_a_stage_with_kv_needs_a_model_with_kv(stage: Any, word: str) -> None:
    with pytest.raises(ValueError, match=f"GrayUtility .*{word}: define it"):
        GrayUtility(stage, torch.device("cpu"))


@pytest.mark.parametrize("method", ["convert", "extract", "count_tokens", "prefill_steps"])
def test_each_method_for_kv_is_named(method: str) -> None:
    def define(self: Any, *_: Any) -> None:
        """Is there."""

    names = {"kv_row", "convert", "extract", "count_tokens", "prefill_steps"} - {method}
    found = type("Almost", (GrayUtility,), dict.fromkeys(names, define))
    links = KVConfig(sources=("shm://a",), sinks=("shm://b",))
    with pytest.raises(ValueError, match=f"Almost has no {method}, and this stage"):
        found(OmniARConfig("", kv=links), torch.device("cpu"))


@pytest.mark.parametrize("prompt", ["one too many", "none", "another's"])
def test_what_a_pipeline_returns_is_checked(prompt: str) -> None:
    with DiffusionEngine(config(f"{__name__}:GrayUtility")) as engine:
        wrong = engine.submit(request("a", prompt, need_kv_receive=False)).result(WAIT)
        with pytest.raises(EngineError, match="outputs for <DiffusionRequestBatch a>"):
            wrong.result()
        right = engine.submit(request("b", seed=7, need_kv_receive=False)).result(WAIT)
    assert int(right.result().unique()) == 7
