"""Rows and layers on several ranks: one process's latents, from parts of the KV.

The ranks are processes connected by gloo; those of all stages are started once.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import DiffusionParallelConfig, OmniDiffusionConfig
from omni_kvlink.engine.worker import GPUDiffusionWorker
from support.engine.fixtures import bundle, checkpoint
from support.engine.parallel_ranks import (
    RankProcesses,
    Stage,
    digests,
    disable_cache,
    enable_cache,
    execute,
    generate,
    receive,
    received,
    requests,
    started,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BITS = 0.0
STAGES: dict[str, tuple[str, dict[str, Any], float]] = {
    "ulysses": ("bfloat16", {"ulysses_degree": 2}, BITS),
    "ulysses tensor": ("float32", {"ulysses_degree": 2, "tensor_parallel_size": 2}, 1e-5),
    "ring guidance": ("float32", {"ring_degree": 2, "cfg_parallel_size": 2}, 1e-5),
    "pipeline guidance": (
        "float32",
        {"pipeline_parallel_size": 2, "cfg_parallel_size": 2},
        BITS,
    ),
}
"""Dtype, degrees, and how far a latent may be off, of its largest value."""


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, Stage]]:
    directory = tempfile.mkdtemp(prefix="kvl-")
    made = [Stage(directory, dtype, **degrees) for dtype, degrees, _ in STAGES.values()]
    with started(*made):
        yield dict(zip(STAGES, made, strict=True))
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """A worker that computes everything in this process, with as many threads as each rank."""
    threads, made = torch.get_num_threads(), dict[torch.dtype, GPUDiffusionWorker]()
    torch.set_num_threads(1)

    def worker(dtype: torch.dtype) -> GPUDiffusionWorker:
        if dtype not in made:
            name = str(dtype).removeprefix("torch.")
            config = OmniDiffusionConfig(checkpoint(), dtype=name, num_threads=1, stage="all")
            made[dtype] = GPUDiffusionWorker(0, 0, config)
            made[dtype].init_device()
        return made[dtype]

    yield worker
    for one in made.values():
        one.shutdown()
    torch.set_num_threads(threads)


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize(
    ("names", "fields"),
    [("a", {"edit": True}), ("abc", {}), ("d", {"height": 4, "width": 12})],
    ids=["edit", "batch", "five rows"],
)
@pytest.mark.parametrize("name", STAGES)
def test_latents_are_those_of_one_process(
    stages: dict[str, Stage], single: Any, name: str, names: str, fields: dict[str, Any]
) -> None:
    """Also of three latent rows and two markers, which no two ranks can have as many of."""
    stage, most = stages[name], STAGES[name][2]
    batch = requests(*names, **fields)
    stage.send(*batch)
    found = stage.ranks.call_all(generate, *batch)
    images, latents = generate(
        single(stage.dtype), *requests(*names, need_kv_receive=False, **fields)
    )
    assert len({tuple(digests(ours)) for _, ours in found}) == 1
    for ours, right in zip(found[0][1], latents, strict=True):
        assert off(ours, right) <= most
    assert [image.shape for image in found[0][0]] == [image.shape for image in images]
    assert all(others == [None] * len(names) for others, _ in found[1:])


def test_a_stage_that_reads_prompts_itself_divides_rows(single: Any) -> None:
    """Its cache has the heads of all Ulysses ranks."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    config = OmniDiffusionConfig(
        checkpoint(),
        dtype="float32",
        stage="all",
        num_threads=1,
        parallel_config=DiffusionParallelConfig(ulysses_degree=2),
        distributed_init_method=f"file://{directory}/rendezvous",
    )
    batch = requests("a", edit=True, need_kv_receive=False)
    ranks = RankProcesses(config)
    try:
        (_, ours), (_, theirs) = ranks.wait_ready().call_all(generate, *batch)
    finally:
        ranks.close()
        shutil.rmtree(directory)
    _, (right,) = generate(single(torch.float32), *batch)
    assert digests(ours) == digests(theirs)
    assert off(ours[0], right) < 1e-5


def contents(worker: Any, batch: Any) -> Any:
    """This rank's coordinates, and each branch of a KV that it has received."""
    assert receive(worker, batch) == ["ready"]
    try:
        return worker.process_group.coords, received(worker, batch.request_id)
    finally:
        worker.runner.kv_manager.free(batch)


@pytest.mark.parametrize("name", ["ulysses", "ring guidance", "pipeline guidance"])
def test_a_rank_receives_what_it_computes_with(stages: dict[str, Stage], name: str) -> None:
    """With Ulysses its heads, with a ring everything, with a pipeline its layers."""
    stage, (batch,) = stages[name], requests(f"kv {name}", edit=True)
    stage.send(batch)
    whole: Any = bundle("kv", batch.prompt, dtype=stage.dtype)
    degrees = stage.config.parallel_config
    for coords, found in stage.ranks.call_all(contents, batch):
        assert list(found) == list(whole)[coords.guidance :: degrees.cfg_parallel_size]
        for branch, (metadata, bits) in found.items():
            layers, heads = slice(None), slice(None)
            if degrees.ulysses_degree > 1:
                heads = slice(coords.ulysses, coords.ulysses + 1)
            if degrees.pipeline_parallel_size > 1:
                layers = slice(0, 1) if coords.pipeline == 0 else slice(1, 3)
            tensors = [
                one[:, heads]
                for pair in list(zip(*whole[branch].layer_blocks.values(), strict=True))[layers]
                for one in pair
                if one is not None
            ]
            assert bits == digests(tensors)
            assert metadata.num_layers == len(range(3)[layers])


def set_layers(worker: Any, layers: range) -> None:
    worker.runner.pipeline.model.kv_layers = layers


def test_other_layers_of_the_same_number_are_refused(stages: dict[str, Stage]) -> None:
    stage, (batch,) = stages["pipeline guidance"], requests("swapped")
    stage.send(batch)
    stage.ranks.call_all(receive, batch)
    stage.ranks.call(1, set_layers, range(1))
    last = len(stage.ranks.processes) - 1
    stage.ranks.call(last, set_layers, range(2))
    for ((_, error),) in stage.ranks.call_all(execute, batch):
        assert "has layers [1, 3] in" in str(error)
        assert "this rank computes [0, " in str(error)
    for rank in (1, 2, last):
        coords = stage.ranks.call(rank, coords_of)
        stage.ranks.call(rank, set_layers, range(1, 3) if coords.pipeline else range(1))


def coords_of(worker: Any) -> Any:
    return worker.process_group.coords


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("tea_cache", {"rel_l1_thresh": 0.5}),
        ("block_cache", {"residual_diff_threshold": 0.9}),
    ],
)
@pytest.mark.parametrize("name", ["ulysses tensor", "pipeline guidance"])
def test_ranks_reuse_the_same_steps(
    stages: dict[str, Stage], single: Any, name: str, backend: str, how: dict[str, Any]
) -> None:
    """What is reused is decided by all rows, so that the ranks agree."""
    stage, one = stages[name], single(torch.float32)
    (batch,) = requests(f"{backend} {name}", num_inference_steps=12)
    stage.send(batch)
    stage.ranks.call_all(enable_cache, backend, how)
    found = stage.ranks.call_all(generate, batch)
    saved = stage.ranks.call_all(disable_cache)
    enable_cache(one, backend, how)
    _, (latent,) = generate(
        one, *requests(batch.request_id, num_inference_steps=12, need_kv_receive=False)
    )
    alone = disable_cache(one)
    assert len({tuple(digests(ours)) for _, ours in found}) == 1
    assert off(found[0][1][0], latent) <= STAGES[name][2]
    assert saved[0]["gen"] == alone["gen"] > 0
    assert {branch: count for each in saved for branch, count in each.items()} == alone
