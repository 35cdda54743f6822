"""Ranks or engines that are killed or frozen: what fails, and what is released."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import TransferTimeout
from omni_kvlink.engine import (
    AREngine,
    DiffusionOutput,
    EngineDeadError,
    KVConfig,
    OmniARConfig,
    OmniDiffusion,
    RequestAborted,
)
from support.engine.fixtures import WAIT, alone, checkpoint, request, until, url
from support.engine.multiproc import BATCHES_OF_TWO, EngineUnderTest, engine_with_ranks
from support.faults.frozen import freeze
from support.faults.leak_checks import left_over, shm_files
from support.processes.fork_server import NESTED

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = {"num_inference_steps": 50_000}
numbers = itertools.count()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One engine of two ranks for all tests, each of which leaves it restarted."""
    with engine_with_ranks(str(tmp_path_factory.mktemp("s")), 2, **BATCHES_OF_TWO) as made:
        yield made


Busy = dict[str, Future[DiffusionOutput]]


def busy(stage: EngineUnderTest, when: str) -> Busy:
    """Submit requests to both ranks, and wait until they are in state `when`."""
    prefixes = {"idle": "", "receiving": "ab", "running": "abc"}[when]
    futures = {
        name: stage.submit(name, **LONG)
        for name in (f"{prefix}{next(numbers)}" for prefix in prefixes)
    }
    if when == "receiving":
        until(lambda: sum(kv["held"]["receiving"] for kv in kv_stats(stage)) == 2)
        return futures
    for name in futures:
        stage.send(name)
    if futures:
        until(lambda: stage.engine.stats()["running"] == 2)
        until(lambda: sum(kv["held"]["ready"] for kv in kv_stats(stage)) == 3)
    return futures


def kv_stats(stage: EngineUnderTest) -> list[Any]:
    found: list[Any] = stage.executor.collective_rpc("kv_stats")
    return found


def check_whole(stage: EngineUnderTest, before: Busy) -> None:
    """Check that the former ranks' KV is released, and that the new ranks run requests.

    `before` are the requests that failed; the stage before releases their KV.
    """
    for name in before:
        stage.producer.fail(name, "no reader is left")
    until(lambda: stage.producer.stats()["memory"]["used"] == 0)
    images, _ = stage.images({f"w{next(numbers)}": seed for seed in range(4)})
    for seed, image in enumerate(images):
        assert torch.equal(image, alone(seed=seed))
    assert [kv["freed"] for kv in kv_stats(stage)] == [2, 2]
    until(lambda: stage.producer.stats()["memory"]["used"] == 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["idle", "receiving", "running"])
def test_a_rank_that_is_killed(stage: EngineUnderTest, when: str, rank: int) -> None:
    futures, workers = busy(stage, when), stage.workers
    stage.deaths.clear()
    os.kill(workers[rank].pid, signal.SIGKILL)
    until(lambda: stage.deaths)
    for future in futures.values():
        with pytest.raises(EngineDeadError, match=f"rank {rank} .* status -9"):
            future.result(WAIT).result()
    until(lambda: all(worker.error for worker in workers))  # the others were killed
    with pytest.raises(EngineDeadError, match="restart"):
        stage.submit("too early")
    errors: list[Any] = []
    stage.executor.register_failure_callback(errors.append)
    assert len(errors) == 1  # at once: it is dead already
    stage.engine.restart()
    assert len(stage.deaths) == 1
    check_whole(stage, futures)


def test_a_rank_that_is_frozen(stage: EngineUnderTest) -> None:
    stage.deaths.clear()
    futures, workers = busy(stage, "running"), stage.workers
    stage.executor.check_health(timeout=WAIT)  # a busy worker is not frozen
    freeze(workers[1].pid)
    with pytest.raises(EngineDeadError, match=r"rank (0, )?1 within"):
        stage.executor.check_health(timeout=0.5)
    for future in futures.values():
        with pytest.raises(EngineDeadError, match="frozen"):
            future.result(WAIT).result()
    assert len(stage.deaths) == 1
    stage.engine.restart()
    check_whole(stage, futures)


def test_an_engine_that_is_closed_while_a_rank_is_frozen(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_kvlink.engine.core.stage_engine._HANG_SECONDS", 0.5)
    with engine_with_ranks(sockets, 1) as stage:
        future = stage.submit("a", **LONG)
        stage.send("a")
        until(lambda: stage.engine.stats()["running"] == 1)
        freeze(stage.workers[0].pid)
        stage.engine.close()
        stage.producer.fail("a", "no reader is left")
        with pytest.raises(RequestAborted):  # as if its worker had answered
            future.result(WAIT).result()


def test_a_worker_that_is_frozen_during_shutdown(
    sockets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_kvlink.engine.executor.distributed.SHUTDOWN_TIMEOUT", 0.5)
    with engine_with_ranks(sockets, 2) as stage:
        workers = stage.workers
        freeze(workers[1].pid)
        stage.engine.close()
        assert all(worker.error for worker in workers)
        assert stage.deaths == []  # it was shut down


ENGINE = """
import sys, threading
from support.engine.fixtures import until
from support.engine.multiproc import BATCHES_OF_TWO, engine_with_ranks

with engine_with_ranks(sys.argv[1], 2, **BATCHES_OF_TWO) as stage:
    for name in "ab":
        stage.submit(name, num_inference_steps=50_000)
        stage.send(name)
    until(lambda: stage.engine.stats()["running"] == 2)
    print("running", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("when", ["starting", "running"])
def test_workers_of_an_engine_that_is_killed(sockets: str, tmp_path: Path, when: str) -> None:
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path), NESTED: "1"}
    before = shm_files()
    command = [sys.executable, "-c", ENGINE, sockets]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as engine:
        assert engine.stdout is not None
        if when == "running":
            assert engine.stdout.readline()
        until(lambda: len(children(engine.pid)) == 3)  # the first is the fork server
        workers = children(engine.pid)
        assert list(tmp_path.glob("kvl-ranks-*"))
        engine.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not list(tmp_path.glob("kvl-ranks-*"))
    until(lambda: not left_over(before))
    for name in os.listdir(sockets):  # the link's own, which a killed producer leaves
        os.unlink(f"{sockets}/{name}")


def test_a_deployment_of_which_both_stages_have_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """AR stage: a process, and a worker of its own. DiT stage: here, with two workers."""
    monkeypatch.setenv(NESTED, "1")
    mp = {"distributed_executor_backend": "mp", "num_threads": 1}
    how = {
        "pipeline": "bagel",
        "stages": [
            {"stage_id": 0, **mp},
            {"stage_id": 1, **mp, "data_parallel_size": 2, "max_num_seqs": 2},
        ],
    }
    photo = torch.arange(160 * 160 * 3).remainder(251).to(torch.uint8).reshape(160, 160, 3)
    prompts = [f"a fox, number {seed}" for seed in range(4)] + [[photo, "make it night"]]
    size = {"height": 16, "width": 24, "num_inference_steps": 5}
    params = [{**size, "seed": seed} for seed in range(5)]
    deaths: list[int] = []
    with OmniDiffusion(
        checkpoint(), how, dtype="float32", on_death=lambda stage, _: deaths.append(stage)
    ) as omni:

        def check() -> None:
            images = omni.generate(prompts, params, timeout=WAIT, output_type="pt")
            for prompt, options, image in zip(prompts, params, images, strict=True):
                assert torch.equal(image[0], alone(prompt, **options)), prompt

        check()
        stages: list[Any] = list(omni.stages)
        (_, ar_worker) = children(stages[0].pid)  # the first is the fork server
        for stage, pid in [(0, ar_worker), (1, stages[1].executor.workers[1].pid)]:
            os.kill(pid, signal.SIGKILL)
            until(lambda: deaths)
            with pytest.raises(EngineDeadError, match="restart"):
                omni.generate("a fox", size, timeout=WAIT)
            assert deaths == [stage]
            omni.restart(stage)
            deaths.clear()
            check()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_ar_stage_whose_rank_is_frozen(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that count tokens or return statistics of the link time out."""
    sockets = str(tmp_path_factory.mktemp("s"))  # a killed producer leaves its socket
    monkeypatch.setattr("omni_kvlink.engine.core.ar_engine._ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("omni_kvlink.engine.core.stage_engine._ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("omni_kvlink.engine.executor.distributed.SHUTDOWN_TIMEOUT", 0.5)
    kv = KVConfig(sinks=(url(),), sink_options={"directory": sockets})
    config = OmniARConfig(checkpoint(), kv=kv, distributed_executor_backend="mp", num_threads=1)
    with AREngine(config) as engine:
        (worker,) = engine.executor.workers  # type: ignore[attr-defined]
        freeze(worker.pid)
        with pytest.raises(TransferTimeout, match="sink_stats: no answer of rank 0"):
            engine.stats()
        output = engine.submit(request("r", need_kv_receive=False)).result(WAIT)
        assert isinstance(output.error, TransferTimeout)
        engine.close()
    assert worker.error
