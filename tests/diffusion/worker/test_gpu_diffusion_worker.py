"""The worker: its device, its runner, and the memory that `sleep` releases."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import (
    DiffusionParallelConfig,
    EngineAsleepError,
    EngineError,
    OmniDiffusionConfig,
)
from omni_kvlink.engine.worker import GPUDiffusionModelRunner, GPUDiffusionWorker
from omni_kvlink.models.bagel import BagelPipeline
from support.engine.fixtures import WAIT, alone, checkpoint, config, request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def worker() -> Iterator[GPUDiffusionWorker]:
    made = GPUDiffusionWorker(0, 0, config(None, stage="all"))
    made.init_device()
    yield made
    made.shutdown()


def own(name: str, prompt: str = "a fox", seed: int = 0) -> Any:
    """A request whose prompt this stage reads itself."""
    return request(name, prompt, seed, need_kv_receive=False)


def test_worker_init_and_delegation(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = GPUDiffusionWorker(0, 3, config(None, stage="all"))
    assert (worker.local_rank, worker.rank) == (0, 3)
    assert worker.model_runner is None  # a worker loads no model
    with pytest.raises(EngineError, match="init_device"):
        worker.execute_model([own("r")])

    worker.init_device()
    runner = worker.model_runner
    assert isinstance(runner, GPUDiffusionModelRunner)
    assert worker.device == runner.device == torch.device("cpu")
    assert isinstance(runner.pipeline, BagelPipeline)

    seen, real = [], runner.execute_model
    monkeypatch.setattr(runner, "execute_model", lambda given: seen.append(given) or real(given))
    requests = [own("r")]
    output = worker.execute_model(requests)
    assert seen == [requests]
    assert [one.request_id for one in output.runner_outputs] == ["r"]
    assert torch.equal(output.runner_outputs[0].result.result()[0], alone())
    worker.shutdown()


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_nothing_runs_and_awake_all_is_as_before(
    worker: GPUDiffusionWorker, level: int
) -> None:
    before = worker.execute_model([own("r")]).runner_outputs[0].result.result()
    assert worker.sleep(level)
    assert not worker.sleep(level)
    assert (
        sum(p.nbytes for m in worker.runner.utility.modules().values() for p in m.parameters()) == 0
    )
    with pytest.raises(EngineAsleepError, match="wake_up"):
        worker.execute_model([own("r")])
    assert not worker.wake_up(["kv_cache"])
    assert worker.wake_up(["weights"])
    assert not worker.wake_up()
    after = worker.execute_model([own("r")]).runner_outputs[0].result.result()
    assert torch.equal(before, after)


def test_level_1_keeps_weights_that_no_checkpoint_has(worker: GPUDiffusionWorker) -> None:
    model: Any = worker.runner.utility.modules()["model"]
    weight = model.llm2vae.weight
    weight.data += 1
    changed = weight.data.clone()
    worker.sleep(1)
    worker.wake_up()
    assert torch.equal(weight.data, changed)
    worker.sleep(2)
    worker.wake_up()
    assert not torch.equal(weight.data, changed)


def test_levels_and_tags_are_known_ones(worker: GPUDiffusionWorker) -> None:
    with pytest.raises(ValueError, match="level 3"):
        worker.sleep(3)
    with pytest.raises(ValueError, match="nonsense"):
        worker.wake_up(["nonsense"])


def test_available_memory_is_what_the_system_says(worker: GPUDiffusionWorker) -> None:
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal"))
    assert 0 < worker.determine_available_memory() < total


def _meet(rank: int, where: str, model: str, answers: Any) -> None:
    import torch.distributed as dist

    two = DiffusionParallelConfig(data_parallel_size=2)
    how = OmniDiffusionConfig(
        model, dtype="float32", stage="all", parallel_config=two, distributed_init_method=where
    )
    worker = GPUDiffusionWorker(rank, rank, how)
    worker.init_device()
    numbers = torch.tensor([float(rank + 1)])
    dist.all_reduce(numbers)
    answers.put((rank, dist.get_backend(), numbers.item()))
    worker.shutdown()


def test_ranks_meet(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    where = f"file://{tmp_path}/meeting"
    ranks = [
        context.Process(target=_meet, args=(rank, where, checkpoint(), answers)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    found = sorted(answers.get(timeout=WAIT) for _ in ranks)
    for rank in ranks:
        rank.join(WAIT)
    assert found == [(0, "gloo", 3.0), (1, "gloo", 3.0)]


def test_ranks_need_a_place_to_meet() -> None:
    two = DiffusionParallelConfig(cfg_parallel_size=2)
    with pytest.raises(ValueError, match="distributed_init_method"):
        GPUDiffusionWorker(0, 0, config(None, parallel_config=two)).init_device()
