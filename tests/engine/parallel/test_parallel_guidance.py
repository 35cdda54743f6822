"""Guidance branches on ranks of their own: one process's image, bit for bit, from a part of its KV.

Real processes, gloo; those of all stages are started once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_fixtures import bundle, checkpoint
from parallel_fixtures import (
    Stage,
    accelerate,
    digests,
    execute,
    painted,
    receive,
    received,
    requests,
    slow_down,
    stages,
)

from omni_kvlink import SchemaError
from omni_kvlink.engine import OmniDiffusionConfig
from omni_kvlink.engine.worker import GPUDiffusionWorker

BRANCHES = ("gen", "cfg_text", "cfg_img")
KINDS = [("float32", 2), ("float32", 3), ("bfloat16", 2)]


@pytest.fixture(scope="module")
def beds() -> Iterator[dict[Any, Stage]]:
    directory = tempfile.mkdtemp(prefix="kvl-")
    made = [Stage(directory, dtype, cfg_parallel_size=degree) for dtype, degree in KINDS]
    with stages(*made):
        yield dict(zip(KINDS, made, strict=True))
    shutil.rmtree(directory)


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def bed(beds: dict[Any, Stage], request: pytest.FixtureRequest) -> Stage:
    return beds[request.param]


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """One process that does everything, with as many threads as each rank."""
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


@pytest.mark.parametrize("names", ["a", "abc"])
@pytest.mark.parametrize("edit", [False, True], ids=["text", "edit"])
def test_the_image_is_that_of_one_process(bed: Stage, single: Any, names: str, edit: bool) -> None:
    bed.send(*requests(*names, edit=edit))
    found = bed.ranks.all(painted, *requests(*names, edit=edit))
    own = requests(*names, edit=edit, need_kv_receive=False)
    images, latents = painted(single(bed.dtype), *own)
    assert [digests(ours) for _, ours in found] == [digests(latents)] * len(found)
    assert all(torch.equal(*pair) for pair in zip(found[0][0], images, strict=True))
    assert [others for others, _ in found[1:]] == [[None] * len(names)] * (len(found) - 1)


def hold(worker: Any, *wanted: Any) -> Any:
    """What a rank has of the first request, and the bytes of all, while it has them."""
    manager = worker.runner.kv_manager
    before = manager.stats()["nbytes"]
    assert set(receive(worker, *wanted)) == {"ready"}
    held = received(worker, wanted[0].request_id), manager.stats()["nbytes"] - before
    for one in wanted:
        manager.free(one)
    return held, manager.stats()["charged"]


def test_a_rank_has_the_kv_of_its_branches_alone(bed: Stage) -> None:
    (wanted,) = requests("kv", edit=True)
    largest, whole = bed.send(wanted), bundle("kv", wanted.prompt, dtype=bed.dtype)
    found = bed.ranks.all(hold, wanted)
    for rank, ((branches, nbytes), charged) in enumerate(found):
        assert list(branches) == list(BRANCHES[rank :: len(found)])
        for name, (metadata, bits) in branches.items():
            assert metadata.kv_lens == whole[name].metadata.kv_lens
            assert metadata.ropes == whole[name].metadata.ropes
            assert bits == digests(whole[name].tensors())
        assert nbytes <= largest
        assert charged == 0
    assert len({nbytes for (_, nbytes), _ in found}) == len(found)  # and not all of it on each


def spoil(worker: Any, branch: str) -> None:
    """From now on this rank has another KV in a branch."""
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        contexts = type(utility).convert(utility, payload, request)
        cache = getattr(contexts, branch).past_key_values
        for layer in range(cache.num_layers):
            cache.key_cache[layer] = cache.key_cache[layer] + 1
        return contexts

    utility.convert = convert


def heal(worker: Any) -> None:
    del worker.runner.utility.convert


def test_the_image_depends_on_what_another_rank_has(bed: Stage) -> None:
    def paint(name: str) -> Any:
        (wanted,) = requests(name, edit=True)
        bed.send(wanted)
        return digests(bed.ranks.all(painted, wanted)[0][1])

    right = paint("right")
    bed.ranks.on(1, spoil, "cfg_text")
    wrong = paint("wrong")
    bed.ranks.on(1, heal)
    assert wrong != right
    assert paint("again") == right


def deal(worker: Any, by: int) -> None:
    """Other branches are asked of the ranks than they have."""
    hook = worker.runner.pipeline.hooks.branches
    degree = worker.mates.parallel.cfg_parallel_size
    hook._owners = {name: (at + by) % degree for at, name in enumerate(BRANCHES)}


def test_a_rank_that_lacks_a_branch_says_so(bed: Stage) -> None:
    (wanted,) = requests("lacks")
    bed.send(wanted)
    assert bed.ranks.all(receive, wanted)
    bed.ranks.all(deal, 1)
    for ((image, error),) in bed.ranks.all(execute, wanted):
        assert image is None
        assert isinstance(error, SchemaError)
        assert "is on another guidance rank" in str(error)
    bed.ranks.all(deal, 0)
    (wanted,) = requests("has")
    bed.send(wanted)
    assert bed.ranks.all(painted, wanted)[0][0]


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("tea_cache", {"rel_l1_thresh": 0.5}),
        ("block_cache", {"residual_diff_threshold": 0.9}),
    ],
)
def test_each_rank_reuses_steps_of_its_own_branches(
    beds: dict[Any, Stage], single: Any, backend: str, how: dict[str, Any]
) -> None:
    bed, one = beds["float32", 2], single(torch.float32)
    wanted = requests(backend, num_inference_steps=12)
    bed.send(*wanted)
    bed.ranks.all(accelerate, backend, how)
    found = bed.ranks.all(painted, *wanted)
    saved = bed.ranks.all(slow_down)
    accelerate(one, backend, how)
    own = requests(backend, num_inference_steps=12, need_kv_receive=False)
    _, latents = painted(one, *own)
    assert [digests(ours) for _, ours in found] == [digests(latents)] * 2
    assert saved[0]["gen"] > 0
    assert {**saved[0], **saved[1]} == slow_down(one)
    assert not saved[0].keys() & saved[1].keys()


def test_groups_paint_different_requests(single: Any) -> None:
    """Four ranks, two and two; each request is told, and sent, to one pair."""
    directory = tempfile.mkdtemp(prefix="kvl-")
    with stages(Stage(directory, data_parallel_size=2, cfg_parallel_size=2)) as (bed,):
        wanted = requests("first", "second")
        bed.send(*wanted)
        found = bed.ranks.ask([(painted, wanted[rank // 2]) for rank in range(4)])
        for at, name in enumerate(("first", "second")):
            own = requests("first", "second", need_kv_receive=False)[at]
            images, latents = painted(single(bed.dtype), own)
            leader, other = found[2 * at : 2 * at + 2]
            assert digests(leader[1]) == digests(other[1]) == digests(latents), name
            assert torch.equal(leader[0][0], images[0])
            assert other[0] == [None]
    shutil.rmtree(directory)
