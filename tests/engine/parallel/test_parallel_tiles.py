"""The tiles of an image on several ranks: one rank's image, bit for bit, each tile computed once.

The ranks are processes connected by gloo; those of all stages are started once.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import OmniDiffusionConfig
from omni_kvlink.engine.config import DiffusionParallelConfig
from omni_kvlink.engine.errors import EngineDeadError, RequestAborted, RequestFailed
from omni_kvlink.engine.models.bagel import BagelUtility
from omni_kvlink.engine.outputs import DiffusionOutput, StepSchedulerOutput
from omni_kvlink.engine.parallel import batch_sync
from omni_kvlink.engine.parallel.process_group import ProcessGroup
from omni_kvlink.engine.parallel.rank_coords import RankCoords
from omni_kvlink.engine.worker import GPUDiffusionWorker
from omni_kvlink.models.bagel import Tiling
from support.engine.fixtures import checkpoint
from support.engine.parallel_ranks import (
    RankProcesses,
    Stage,
    execute,
    generate,
    receive,
    requests,
    started,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TILE = 16
"""Pixels a side; 8 latent cells, of which two neighbours share 2."""
ONE, FIVE, NINE = (16, 16), (12, 56), (28, 28)
"""Sizes of images of as many tiles."""
STAGES: dict[str, dict[str, Any]] = {
    "two": {"cfg_parallel_size": 2, "vae_patch_parallel_size": 2},
    "three": {"cfg_parallel_size": 3, "vae_patch_parallel_size": 3},
    "three of four": {
        "cfg_parallel_size": 2,
        "tensor_parallel_size": 2,
        "vae_patch_parallel_size": 3,
    },
}


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, Stage]]:
    directory = tempfile.mkdtemp(prefix="kvl-")
    made = [Stage(directory, **degrees) for degrees in STAGES.values()]
    with started(*made):
        for one in made:
            one.ranks.call_all(divide_small_images)
        yield dict(zip(STAGES, made, strict=True))
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def single() -> Iterator[Any]:
    """A worker that computes everything in this process, with as many threads as each rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    how: dict[str, Any] = {"stage": "all", "dtype": "float32", "vae_use_tiling": True}
    made = GPUDiffusionWorker(0, 0, OmniDiffusionConfig(checkpoint(), num_threads=1, **how))
    made.init_device()
    divide_small_images(made)
    yield made
    made.shutdown()
    torch.set_num_threads(threads)


def divide_small_images(worker: Any) -> None:
    """Let an image of more than `TILE` pixels a side have several tiles; record what is decoded."""
    autoencoder, worker.seen = worker.runner.pipeline.autoencoder, []
    # The stage's setting has taken effect: it is replaced by one for small images.
    assert autoencoder._tiling == Tiling()
    autoencoder.enable_tiling(Tiling(TILE))
    autoencoder.decoder.register_forward_pre_hook(lambda _, x: worker.seen.append(x[0].clone()))


def take_seen(worker: Any) -> list[torch.Tensor]:
    """The tiles that were decoded on this rank since the last call."""
    found, worker.seen[:] = list(worker.seen), []
    return found


def sized(*names: str, shape: tuple[int, int], **fields: Any) -> list[Any]:
    return requests(*names, height=shape[0], width=shape[1], **fields)


@pytest.mark.parametrize(("shape", "count"), [(ONE, 1), (FIVE, 5), (NINE, 9)])
@pytest.mark.parametrize("name", STAGES)
def test_the_image_is_that_of_one_rank(
    stages: dict[str, Stage], single: Any, name: str, shape: tuple[int, int], count: int
) -> None:
    """Of two requests with two images each; a rank decodes each n-th tile, and no other."""
    stage, degree = stages[name], STAGES[name]["vae_patch_parallel_size"]
    how: dict[str, Any] = {"shape": shape, "num_outputs_per_prompt": 2}
    batch = sized("ab", "cd", **how)
    stage.send(*batch)
    found = stage.ranks.call_all(generate, *batch)
    seen = stage.ranks.call_all(take_seen)
    latents = found[0][1]
    images = [single.runner.pipeline.decode(latent) for latent in latents]
    every = take_seen(single)
    assert len(every) == count * 4
    assert torch.equal(torch.cat(found[0][0]), torch.stack(images))
    assert all(others == [None] * 2 for others, _ in found[1:])
    for rank, tiles in enumerate(seen):
        own = [tile for at, tile in enumerate(every) if at % count % degree == rank]
        assert len(tiles) == len(own)
        assert all(map(torch.equal, tiles, own))
    if "tensor_parallel_size" not in STAGES[name]:  # the latents are one process's, too
        own_images, _ = generate(single, *sized("ab", "cd", need_kv_receive=False, **how))
        assert all(map(torch.equal, found[0][0], own_images))
        take_seen(single)


def generate_streamed(worker: Any, one: Any) -> Any:
    """Image of a request that the leader streams with previews, and the previews."""
    events: list[Any] = []
    if worker.rank == 0:
        one.emit = events.append
    images, _ = generate(worker, one)
    return images[0], [event.preview for event in events]


def test_previews_are_decoded_by_the_leader_alone(stages: dict[str, Stage], single: Any) -> None:
    how: dict[str, Any] = {"shape": FIVE, "stream": True, "preview_interval": 2}
    stage, batch = stages["two"], sized("streamed", **how)
    stage.send(*batch)
    leader, other = stage.ranks.call_all(generate_streamed, *batch)
    counts = [len(seen) for seen in stage.ranks.call_all(take_seen)]
    assert counts == [3 + 2 * 5, 2]
    assert other == (None, [])
    (own,) = sized("streamed", need_kv_receive=False, **how)
    image, previews = generate_streamed(single, own)
    take_seen(single)
    assert torch.equal(leader[0], image)
    assert [one is None for one in previews] == [True, False, True, False]
    assert all(torch.equal(*pair) for pair in zip(leader[1][1::2], previews[1::2], strict=True))


# ---- a rank that fails, aborts or is killed


def fail_at_tile(worker: Any, number: int) -> None:
    """Raise an error at this rank's tile with this number, once."""
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            handle.remove()
            raise ZeroDivisionError("own trouble")

    handle = worker.runner.pipeline.autoencoder.decoder.register_forward_pre_hook(fail)


def check_generates(stage: Stage, single: Any) -> None:
    """The ranks still decode an image together."""
    batch = sized("well", shape=FIVE)
    stage.send(*batch)
    (images, (latent,)), *_ = stage.ranks.call_all(generate, *batch)
    assert torch.equal(images[0][0], single.runner.pipeline.decode(latent))
    take_seen(single)
    stage.ranks.call_all(take_seen)


def run_batch(stage: Stage, *names: str, **fields: Any) -> list[list[tuple[Any, Any]]]:
    batch = sized(*names, shape=FIVE, **fields)
    stage.send(*batch)
    stage.ranks.call_all(receive, *batch)
    found: list[list[tuple[Any, Any]]] = stage.ranks.call_all(execute, *batch)
    return found


@pytest.mark.parametrize("name", ["two", "three of four"])
@pytest.mark.parametrize(("rank", "number"), [(0, 1), (1, 4)])
def test_one_ranks_error_ends_the_batch_on_all(
    stages: dict[str, Stage], single: Any, name: str, rank: int, number: int
) -> None:
    """At its first tile, or at one of the second image."""
    stage = stages[name]
    stage.ranks.call(rank, fail_at_tile, number)
    for outputs in run_batch(stage, "x", "y", num_outputs_per_prompt=2):
        for image, error in outputs:
            assert image is None
            assert isinstance(error, RequestFailed)
            assert "own trouble" in str(error)
    check_generates(stage, single)


def set_timeout(_: Any, seconds: float) -> float:
    # No setting: so long a rank that was lost may hold up the others.
    before, batch_sync._FAILED_RANK_TIMEOUT = batch_sync._FAILED_RANK_TIMEOUT, seconds
    return before


def decode_slowly(worker: Any) -> None:
    """Delay the next tile by 0.5 s."""

    def wait(*_: Any) -> None:
        handle.remove()
        time.sleep(0.5)

    handle = worker.runner.pipeline.autoencoder.decoder.register_forward_pre_hook(wait)


def test_a_rank_that_failed_waits_for_a_slow_one(stages: dict[str, Stage], single: Any) -> None:
    """No rank waits for a part of the tile that was not computed, so the stage lives."""
    stage = stages["three of four"]
    before = stage.ranks.call_all(set_timeout, 0.1)[0]
    stage.ranks.call(1, fail_at_tile, 1)
    stage.ranks.call(2, decode_slowly)
    for ((_, error),) in run_batch(stage, "x"):
        assert isinstance(error, RequestFailed)
        assert "own trouble" in str(error)
    stage.ranks.call_all(set_timeout, before)
    check_generates(stage, single)


def abort_at_tile(worker: Any, name: str) -> None:
    """Abort a request on this rank while its first tile is decoded."""

    def abort(*_: Any) -> None:
        handle.remove()
        worker.abort(name)

    handle = worker.runner.pipeline.autoencoder.decoder.register_forward_pre_hook(abort)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_while_tiles_are_decoded(stages: dict[str, Stage], single: Any, rank: int) -> None:
    stage = stages["two"]
    stage.ranks.call(rank, abort_at_tile, "gone")
    for (image, error), (_, none) in run_batch(stage, "gone", "stays"):
        assert image is None
        assert isinstance(error, RequestAborted)
        assert none is None
    check_generates(stage, single)


def die_at_tile(worker: Any) -> None:
    kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    worker.runner.pipeline.autoencoder.decoder.register_forward_pre_hook(kill)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_fails_the_batch_on_the_other(rank: int) -> None:
    directory = tempfile.mkdtemp(prefix="kvl-")
    with started(Stage(directory, **STAGES["two"])) as (stage,):
        stage.ranks.call_all(divide_small_images)
        stage.ranks.call(rank, die_at_tile)
        batch = sized("last", shape=FIVE)
        stage.send(*batch)
        stage.ranks.call_all(receive, *batch)
        for one in (0, 1):
            stage.ranks.send_call(one, execute, *batch)
        ((image, error),) = stage.ranks.result(1 - rank)
        assert image is None
        assert isinstance(error, EngineDeadError)
    shutil.rmtree(directory)


# ---- step by step


@pytest.fixture(scope="module")
def steps() -> Iterator[RankProcesses]:
    with tempfile.TemporaryDirectory(prefix="kvl-") as directory:
        config = OmniDiffusionConfig(
            checkpoint(),
            stage="all",
            dtype="float32",
            num_threads=1,
            max_num_seqs=4,
            step_execution=True,
            parallel_config=DiffusionParallelConfig(**STAGES["two"]),
            distributed_init_method=f"file://{directory}/rendezvous",
        )
        ranks = RankProcesses(config)
        try:
            ranks.wait_ready().call_all(divide_small_images)
            yield ranks
        finally:
            ranks.close()


def fail_before_decoding(worker: Any, name: str) -> None:
    """Raise an error in a request's last step."""
    pipeline = worker.runner.pipeline

    def step_scheduler(state: Any, noise_pred: Any) -> None:
        type(pipeline).step_scheduler(pipeline, state, noise_pred)
        if state.request.request_id == name and state.denoise_completed:
            del pipeline.step_scheduler
            raise ZeroDivisionError("own trouble")

    pipeline.step_scheduler = step_scheduler


def fail_after_decoding(worker: Any, name: str) -> None:
    """Raise an error when this rank's part of the next image is done."""
    pipeline = worker.runner.pipeline

    def decode_shared(latent: Any) -> Any:
        type(pipeline).decode_shared(pipeline, latent)
        del pipeline.decode_shared
        raise ZeroDivisionError(f"own trouble with {name}")

    pipeline.decode_shared = decode_shared


def run_steps(worker: Any, names: list[str]) -> dict[str, DiffusionOutput]:
    """Results of requests with two images each, which end with the same step."""
    how: dict[str, Any] = {"need_kv_receive": False, "num_outputs_per_prompt": 2, "shape": FIVE}
    step, results = StepSchedulerOutput(sized(*names, **how)), dict[str, DiffusionOutput]()
    while len(results) < len(names):
        results |= worker.execute_stepwise(step).results
        step = StepSchedulerOutput([], cached_request_ids=[n for n in names if n not in results])
    return results


def test_requests_that_end_with_one_step(steps: RankProcesses, single: Any) -> None:
    """Each has the images of one process's batch."""
    leader, other = steps.call_all(run_steps, ["a", "b", "c"])
    counts = [len(seen) for seen in steps.call_all(take_seen)]
    assert counts == [3 * 6, 2 * 6]
    assert [one.output for one in other.values()] == [None] * 3
    how: dict[str, Any] = {"need_kv_receive": False, "num_outputs_per_prompt": 2, "shape": FIVE}
    own, _ = generate(single, *sized("a", "b", "c", **how))
    take_seen(single)
    for name, expected in zip("abc", own, strict=True):
        assert torch.equal(leader[name].result(), expected)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fail", [fail_before_decoding, fail_after_decoding])
def test_one_ranks_error_is_that_requests_alone(steps: RankProcesses, fail: Any, rank: int) -> None:
    """The rank that failed takes part in the next request's tiles, and in no others."""
    before, _ = steps.call_all(run_steps, ["a", "b", "c"])
    steps.call(rank, fail, "a")
    for here, results in enumerate(steps.call_all(run_steps, ["a", "b", "c"])):
        assert "own trouble" in str(results["a"].error)
        for name in ("b", "c"):
            assert results[name].error is None
            assert here or torch.equal(results[name].result(), before[name].result())
    steps.call_all(take_seen)


# ---- settings


class WholeImages(BagelUtility):
    """A model whose decoder is not divided."""

    supports_vae_patch_parallel = False


def test_a_model_that_does_not_divide_tiles() -> None:
    config = OmniDiffusionConfig(checkpoint())
    parallel = DiffusionParallelConfig(**STAGES["two"])
    group = ProcessGroup(RankCoords(0, 0, 0), parallel)
    with pytest.raises(ValueError, match="vae_patch_parallel_size 2: WholeImages does not"):
        WholeImages(config, torch.device("cpu"), group)
