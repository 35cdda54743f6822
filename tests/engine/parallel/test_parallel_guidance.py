"""Guidance branches on several ranks: the image of one process, bit for bit, from parts of the KV.

The ranks are processes connected by gloo; those of all stages are started once.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import SchemaError
from omni_kvlink.engine import OmniDiffusionConfig
from omni_kvlink.engine.worker import GPUDiffusionWorker
from support.engine.fixtures import bundle, checkpoint
from support.engine.parallel_ranks import (
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

BRANCHES = ("gen", "cfg_text", "cfg_img")
KINDS = [("float32", 2), ("float32", 3), ("bfloat16", 2)]


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[Any, Stage]]:
    directory = tempfile.mkdtemp(prefix="kvl-")
    made = [Stage(directory, dtype, cfg_parallel_size=degree) for dtype, degree in KINDS]
    with started(*made):
        yield dict(zip(KINDS, made, strict=True))
    shutil.rmtree(directory)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def stage(stages: dict[Any, Stage], request: pytest.FixtureRequest) -> Stage:
    return stages[request.param]


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """A worker that computes everything in this process, with as many threads as each rank."""
    threads, made = torch.get_num_threads(), dict[str, GPUDiffusionWorker]()
    torch.set_num_threads(1)

    def worker(dtype: torch.dtype) -> GPUDiffusionWorker:
        name = str(dtype).removeprefix("torch.")
        if name not in made:
            config = OmniDiffusionConfig(checkpoint(), dtype=name, num_threads=1, stage="all")
            made[name] = GPUDiffusionWorker(0, 0, config)
            made[name].init_device()
        return made[name]

    yield worker
    for one in made.values():
        one.shutdown()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("names", "edit"), [("a", True), ("abc", False)], ids=["edit", "text"])
def test_the_image_is_that_of_one_process(
    stage: Stage, single: Any, names: str, edit: bool
) -> None:
    stage.send(*requests(*names, edit=edit))
    found = stage.ranks.call_all(generate, *requests(*names, edit=edit))
    own = requests(*names, edit=edit, need_kv_receive=False)
    images, latents = generate(single(stage.dtype), *own)
    assert [digests(ours) for _, ours in found] == [digests(latents)] * len(found)
    assert all(torch.equal(*pair) for pair in zip(found[0][0], images, strict=True))
    assert [others for others, _ in found[1:]] == [[None] * len(names)] * (len(found) - 1)


def receive_and_free(worker: Any, *batch: Any) -> Any:
    """Contents of the first request's KV and bytes received for all; bytes charged afterwards."""
    manager = worker.runner.kv_manager
    before = manager.stats()["nbytes"]
    assert set(receive(worker, *batch)) == {"ready"}
    contents = received(worker, batch[0].request_id), manager.stats()["nbytes"] - before
    for one in batch:
        manager.free(one)
    return contents, manager.stats()["charged"]


def test_a_rank_has_the_kv_of_its_branches_alone(stage: Stage) -> None:
    (batch,) = requests("kv", edit=True)
    largest, whole = stage.send(batch), bundle("kv", batch.prompt, dtype=stage.dtype)
    found = stage.ranks.call_all(receive_and_free, batch)
    for rank, ((branches, nbytes), charged) in enumerate(found):
        assert list(branches) == list(BRANCHES[rank :: len(found)])
        for name, (metadata, bits) in branches.items():
            assert metadata.kv_lens == whole[name].metadata.kv_lens
            assert metadata.ropes == whole[name].metadata.ropes
            assert bits == digests(whole[name].tensors())
        assert nbytes <= largest
        assert charged == 0
    assert len({nbytes for (_, nbytes), _ in found}) == len(found)  # and not all of it on each


def corrupt_branch(worker: Any, branch: str) -> None:
    """Change a branch of every KV that this rank converts from now on."""
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        contexts = type(utility).convert(utility, payload, request)
        cache = getattr(contexts, branch).past_key_values
        for layer in range(cache.num_layers):
            cache.key_cache[layer] = cache.key_cache[layer] + 1
        return contexts

    utility.convert = convert


def restore_conversion(worker: Any) -> None:
    del worker.runner.utility.convert


def test_the_image_depends_on_what_another_rank_has(stage: Stage) -> None:
    def generate_edit(name: str) -> Any:
        (batch,) = requests(name, edit=True)
        stage.send(batch)
        return digests(stage.ranks.call_all(generate, batch)[0][1])

    right = generate_edit("right")
    stage.ranks.call(1, corrupt_branch, "cfg_text")
    wrong = generate_edit("wrong")
    stage.ranks.call(1, restore_conversion)
    assert wrong != right
    assert generate_edit("again") == right


def shift_owners(worker: Any, by: int) -> None:
    """Let the ranks compute other branches than they have received."""
    hook = worker.runner.pipeline.hooks.branches
    degree = worker.process_group.parallel.cfg_parallel_size
    # The ranks agree on it by themselves: a disagreement is made here.
    hook._owners = {name: (at + by) % degree for at, name in enumerate(BRANCHES)}


def test_a_rank_without_a_branch_reports_it(stage: Stage) -> None:
    (batch,) = requests("lacks")
    stage.send(batch)
    assert stage.ranks.call_all(receive, batch)
    stage.ranks.call_all(shift_owners, 1)
    for ((image, error),) in stage.ranks.call_all(execute, batch):
        assert image is None
        assert isinstance(error, SchemaError)
        assert "is on another guidance rank" in str(error)
    stage.ranks.call_all(shift_owners, 0)
    (batch,) = requests("has")
    stage.send(batch)
    assert stage.ranks.call_all(generate, batch)[0][0]


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("tea_cache", {"rel_l1_thresh": 0.5}),
        ("block_cache", {"residual_diff_threshold": 0.9}),
    ],
)
def test_each_rank_reuses_steps_of_its_own_branches(
    stages: dict[Any, Stage], single: Any, backend: str, how: dict[str, Any]
) -> None:
    stage, one = stages["float32", 2], single(torch.float32)
    batch = requests(backend, num_inference_steps=12)
    stage.send(*batch)
    stage.ranks.call_all(enable_cache, backend, how)
    found = stage.ranks.call_all(generate, *batch)
    saved = stage.ranks.call_all(disable_cache)
    enable_cache(one, backend, how)
    own = requests(backend, num_inference_steps=12, need_kv_receive=False)
    _, latents = generate(one, *own)
    assert [digests(ours) for _, ours in found] == [digests(latents)] * 2
    assert saved[0]["gen"] > 0
    assert {**saved[0], **saved[1]} == disable_cache(one)
    assert not saved[0].keys() & saved[1].keys()


def test_groups_run_different_requests(single: Any) -> None:
    """Two groups of two ranks; each request is given, and its KV sent, to one group."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    with started(Stage(directory, data_parallel_size=2, cfg_parallel_size=2)) as (stage,):
        batch = requests("first", "second")
        stage.send(*batch)
        found = stage.ranks.call_each([(generate, batch[rank // 2]) for rank in range(4)])
        for at, name in enumerate(("first", "second")):
            own = requests("first", "second", need_kv_receive=False)[at]
            images, latents = generate(single(stage.dtype), own)
            leader, other = found[2 * at : 2 * at + 2]
            assert digests(leader[1]) == digests(other[1]) == digests(latents), name
            assert torch.equal(leader[0][0], images[0])
            assert other[0] == [None]
    shutil.rmtree(directory)
