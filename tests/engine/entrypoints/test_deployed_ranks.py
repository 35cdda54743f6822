"""Whole deployments with several ranks in each stage, as processes: the images of one process."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import EngineDeadError, OmniDiffusion
from omni_kvlink.models.bagel import Tiling
from support import FOLDER
from support.engine.fixtures import SHAPE, STEPS, WAIT, alone, checkpoint, pipeline, until
from support.engine.multiproc import patient_calls
from support.processes.fork_server import NESTED

if TYPE_CHECKING:
    from collections.abc import Iterator

WISH = {"height": SHAPE[0], "width": SHAPE[1], "num_inference_steps": STEPS}
EDIT = [torch.arange(64 * 48 * 3).reshape(64, 48, 3).to(torch.uint8), "make it night"]


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stage whose ranks are processes starts them as forks, and waits for their answers."""
    monkeypatch.setenv(NESTED, "1")
    with patient_calls():
        yield


def deployed(ar: dict[str, Any], dit: dict[str, Any], url: str = "") -> OmniDiffusion:
    """Two stages; over shared memory, or from a URL on."""
    stages: list[dict[str, Any]] = [{"stage_id": 0, **ar}, {"stage_id": 1, **dit}]
    how: dict[str, Any] = {"pipeline": "bagel", "stages": stages}
    if url:
        stages[1]["input_connectors"] = {"from_stage_0": "kv"}
        how["connectors"] = {"kv": {"name": "KVLinkConnector", "extra": {"url": url}}}
    return OmniDiffusion(checkpoint(), how, dtype="float32", num_threads=1)


def generated(omni: OmniDiffusion, prompts: list[Any], ranks: int = 1) -> list[torch.Tensor]:
    """The images of the prompts, as many at a time as the second stage has engine ranks.

    No rank has the KV of two at once: they would be one batch, whose sums are rounded
    otherwise than those of one request.
    """
    params = [
        {**(WISH if isinstance(p, str) else {"num_inference_steps": STEPS}), "seed": i}
        for i, p in enumerate(prompts)
    ]
    images = []
    for first in range(0, len(prompts), ranks):
        turn = slice(first, first + ranks)
        images += omni.generate(prompts[turn], params[turn], timeout=2 * WAIT, output_type="pt")
    return [image[0] for image in images]


def expected(prompts: list[Any]) -> list[torch.Tensor]:
    """With as many threads as the ranks have: sums are ordered by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [alone(prompt, seed) for seed, prompt in enumerate(prompts)]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dit", "url"),
    [
        ({"cfg_parallel_size": 3}, ""),
        ({"pipeline_parallel_size": 2}, ""),
        (
            {"cfg_parallel_size": 2, "data_parallel_size": 2, "max_num_seqs": 2},
            "zmq+tcp://127.0.0.1:0",
        ),
    ],
)
def test_guidance_and_pipeline_ranks_generate_the_same_images(
    dit: dict[str, Any], url: str
) -> None:
    prompts = ["a fox", EDIT, "two hats", "a fox in the snow"]
    ranks = dit.get("data_parallel_size", 1)
    with deployed({}, dit, url) as omni:
        for found, own in zip(generated(omni, prompts, ranks), expected(prompts), strict=True):
            assert torch.equal(found, own)
        stats = omni.stats()
        assert stats[1]["kv"]["charged"] == stats[1]["kv"]["workers"]["charged"] == 0
        until(lambda: omni.stats()[0]["link"]["memory"]["used"] == 0)


@pytest.mark.parametrize(
    ("senders", "dit"),
    [
        (1, {"tensor_parallel_size": 2}),
        (2, {}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"ulysses_degree": 2}),
        (1, {"ring_degree": 2}),
    ],
)
def test_tensor_and_sequence_ranks_generate_the_same_images_but_for_rounding(
    senders: int, dit: dict[str, Any]
) -> None:
    with deployed({"tensor_parallel_size": senders}, dit) as omni:
        prompts = ["a fox", "two hats"]
        for found, own in zip(generated(omni, prompts), expected(prompts), strict=True):
            assert int((found.int() - own.int()).abs().max()) <= 1

        def is_back() -> bool:
            stats = omni.stats()[0]
            links = stats["links"] if senders > 1 else [stats["link"]]
            assert len(links) == senders
            return not any(link["memory"]["used"] for link in links)

        until(is_back)


def test_the_ranks_of_a_stage_divide_the_tiles_of_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images are those of one process with the same tiles; of their four, a rank decodes two."""
    found = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, found)))
    prompts, own = ["a fox", "two hats"], pipeline().autoencoder
    dit = {"cfg_parallel_size": 2, "vae_patch_parallel_size": 2, "vae_use_tiling": True}
    whole = expected(prompts)
    own.enable_tiling(Tiling(16))
    try:
        tiled = expected(prompts)
    finally:
        own.enable_tiling(None)
    with deployed({}, {**dit, "worker_cls": "support.engine.workers:TilingWorker"}) as omni:
        images = generated(omni, prompts)
        executor: Any = omni.stages[1].executor  # type: ignore[union-attr]
        assert executor.collective_rpc("tiles_decoded") == [(0, 4), (1, 4)]
    for image, as_whole, in_tiles in zip(images, whole, tiled, strict=True):
        assert torch.equal(image, in_tiles)
        assert not torch.equal(image, as_whole)


def test_a_guidance_rank_is_killed_amid_a_request() -> None:
    """The rank that waits for it ends, too; both restart, and the next image is right."""
    deaths: list[Any] = []
    (fox,) = expected(["a fox"])
    with deployed({}, {"cfg_parallel_size": 2}) as omni:
        assert torch.equal(generated(omni, ["a fox"])[0], fox)
        stage = omni.stages[1]
        before = [worker.pid for worker in stage.executor.workers]  # type: ignore[union-attr]
        stage.executor.register_failure_callback(deaths.append)  # type: ignore[union-attr]
        long = omni.submit("a fox", {**WISH, "num_inference_steps": 50_000}, request_id="long")
        until(lambda: omni.stats()[1]["running"])
        os.kill(before[1], signal.SIGKILL)
        assert isinstance(long.result(WAIT).error, EngineDeadError)
        assert len(deaths) == 1
        omni.restart(1)
        after = [worker.pid for worker in stage.executor.workers]  # type: ignore[union-attr]
        assert not set(before) & set(after)
        assert torch.equal(generated(omni, ["a fox"])[0], fox)
        until(lambda: omni.stats()[0]["link"]["memory"]["used"] == 0)
