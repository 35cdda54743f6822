"""`MultiprocExecutor`: the images of one process, collective calls, aborts, errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_kvlink import TransferFailed, TransferTimeout
from omni_kvlink.engine import (
    DiffusionEngine,
    DiffusionParallelConfig,
    EngineDeadError,
    Executor,
    KVConfig,
    OmniARConfig,
    OmniDiffusionConfig,
    RequestAborted,
)
from omni_kvlink.engine.executor.multiproc import MultiprocExecutor
from omni_kvlink.engine.executor.uniproc import UniprocExecutor
from omni_kvlink.engine.ipc.shm_tensors import INLINE_NBYTES
from omni_kvlink.engine.outputs import DiffusionSchedulerOutput
from support.engine.fixtures import WAIT, alone, checkpoint, config, request, until, url
from support.engine.multiproc import BATCHES_OF_TWO, engine_with_ranks
from support.faults.frozen import freeze

LONG = {"num_inference_steps": 50_000}
"""A request that runs for minutes."""


@pytest.mark.parametrize(("ranks", "scheme"), [(1, "shm"), (2, "zmq")])
def test_the_same_images_as_in_one_process(sockets: str, ranks: int, scheme: str) -> None:
    with engine_with_ranks(sockets, ranks, scheme) as stage:
        images, receipts = stage.images({f"r{seed}": seed for seed in range(5)})
        for seed, image in enumerate(images):
            assert torch.equal(image, alone(seed=seed))
        for receipt in receipts:  # each has one reader, which has released it
            receipt.wait(timeout=WAIT)
        kv = stage.engine.stats()["kv"]
        assert (kv["received"], kv["freed"], kv["charged"]) == (5, 5, 0)
        assert (kv["workers"]["received"], kv["workers"]["freed"]) == (5, 5)
        assert kv["workers"]["answered"] == ranks
        by_rank = [one["received"] for one in stage.executor.collective_rpc("kv_stats")]
        assert sum(by_rank) == 5
        assert min(by_rank) > 0  # each group received its own requests only


def test_images_too_large_for_a_message(sockets: str) -> None:
    size = {"height": 64, "width": 64, "num_inference_steps": 2}
    with engine_with_ranks(sockets, 1) as stage:
        future = stage.submit("r", seed=3, num_outputs_per_prompt=6, **size)
        stage.send("r", seed=3, shape=(64, 64))
        images = future.result(WAIT).result()
        assert images.nbytes > INLINE_NBYTES
        assert int((images[0].int() - alone(seed=3, **size).int()).abs().max()) <= 1  # a batch
        assert not torch.equal(images[0], images[1])


def test_only_the_leader_of_a_group_answers_with_images(sockets: str) -> None:
    """Two ranks run one request: both are called, the leader has the images."""
    parallel = DiffusionParallelConfig(cfg_parallel_size=2)
    stage: dict[str, Any] = {"stage": "all", "parallel_config": parallel}
    stage |= {"dtype": "float32", "num_threads": 1}
    model: Any = Path(checkpoint())  # as well as a string, though it is sent to the ranks
    with DiffusionEngine(OmniDiffusionConfig(model, **stage)) as engine:
        assert isinstance(engine.executor, MultiprocExecutor)  # the default for two ranks
        one = request("r", seed=4, need_kv_receive=False)
        image = engine.submit(one).result(WAIT).result()
        assert torch.equal(image[0], alone(seed=4))
        work = DiffusionSchedulerOutput([request("s", seed=4, need_kv_receive=False)])
        answers = [worker.run_model(work) for worker in engine.executor.workers]
        leader, other = (answer.result(WAIT).results["s"] for answer in answers)
        assert torch.equal(leader.result()[0], alone(seed=4))
        assert (other.output, other.error) == (None, None)


def test_calls_of_all_ranks(sockets: str) -> None:
    with engine_with_ranks(sockets, 2) as stage:
        executor = stage.executor
        assert all(free > 0 for free in executor.determine_available_memory())
        with pytest.raises(ValueError, match=r"rank [01]: sleep level 3"):
            executor.collective_rpc("sleep", args=[3])
        with pytest.raises(AttributeError, match="no_such"):
            executor.collective_rpc("no_such_method")
        assert executor.collective_rpc("sleep", kwargs={"level": 1}) == [True, True]
        assert executor.collective_rpc("sleep") == [False, False]
        assert executor.is_sleeping
        asleep = stage.submit("r")
        stage.send("r")
        with pytest.raises(Exception, match="wake_up"):
            asleep.result(WAIT).result()
        assert stage.engine.wake_up()
        assert executor.sleeping_tags == set()
        one = stage.submit("s", seed=2)
        stage.send("s", seed=2)
        assert torch.equal(one.result(WAIT).result()[0], alone(seed=2))


def test_a_call_that_one_rank_does_not_answer_in_time(sockets: str) -> None:
    with engine_with_ranks(sockets, 2) as stage:
        freeze(stage.workers[1].pid)
        with pytest.raises(TransferTimeout, match=r"no answer of rank (0, )?1 within 0\.3 s"):
            stage.executor.collective_rpc("sleep", args=[1], timeout=0.3)
        os.kill(stage.workers[1].pid, signal.SIGCONT)
        assert stage.executor.collective_rpc("check_health", timeout=WAIT) == [True, True]
        assert stage.executor.collective_rpc("wake_up") == [
            True,
            True,
        ]  # the late call was executed
        assert stage.deaths == []


def test_kv_that_does_not_arrive(sockets: str) -> None:
    with engine_with_ranks(sockets, 2) as stage:
        late, failed = stage.submit("late", kv_timeout=0.5), stage.submit("failed")
        frozen = stage.submit("frozen", kv_timeout=0.5)  # of the first group, too
        second = stage.submit("second", seed=1)
        stage.producer.fail("failed", "the AR stage ran out of blocks")
        stage.send("second", seed=1)
        with pytest.raises(TransferFailed, match="out of blocks"):
            failed.result(WAIT).result()
        assert torch.equal(second.result(WAIT).result()[0], alone(seed=1))
        for future in (late, frozen):
            with pytest.raises(TransferTimeout, match=r"0\.5 s"):
                future.result(WAIT).result()
        kv = stage.engine.stats()["kv"]
        assert (kv["charged"], kv["workers"]["charged"], kv["failed"]) == (0, 0, 3)
        assert kv["workers"]["freed"] == 4


def test_a_worker_that_is_frozen_holds_no_request_beyond_its_deadline(sockets: str) -> None:
    with engine_with_ranks(sockets, 1) as stage:
        freeze(stage.workers[0].pid)
        future = stage.submit("late", kv_timeout=0.5)
        with pytest.raises(TransferTimeout, match="no worker reported it"):
            future.result(WAIT).result()
        os.kill(stage.workers[0].pid, signal.SIGCONT)
        one = stage.submit("r", seed=1)
        stage.send("r", seed=1)
        assert torch.equal(one.result(WAIT).result()[0], alone(seed=1))


def test_kv_of_the_next_request_arrives_while_one_runs(sockets: str) -> None:
    with engine_with_ranks(sockets, 1) as stage:
        busy = stage.submit("busy", **LONG)
        stage.send("busy")
        until(lambda: stage.engine.stats()["running"] == 1)
        following = stage.submit("next", seed=1)
        stage.send("next", seed=1)
        until(lambda: stage.engine.stats()["kv"]["held"]["ready"] == 2)
        assert stage.engine.stats()["running"] == 1
        stage.engine.abort("busy")
        with pytest.raises(RequestAborted):
            busy.result(WAIT).result()
        assert torch.equal(following.result(WAIT).result()[0], alone(seed=1))


def test_aborts_in_every_state_of_a_request(sockets: str) -> None:
    with engine_with_ranks(sockets, 2, **BATCHES_OF_TWO) as stage:
        running = [stage.submit(name, **LONG) for name in ("one", "two")]
        receipts = [stage.send(name) for name in ("one", "two")]
        until(lambda: stage.engine.stats()["running"] == 2)
        queued, coming = stage.submit("queued"), stage.submit("coming")
        stage.send("queued")
        until(lambda: stage.engine.stats()["kv"]["held"]["ready"] == 3)
        for name, future in [("coming", coming), ("queued", queued)]:
            stage.engine.abort(name)
            with pytest.raises(RequestAborted):
                future.result(WAIT).result()
        stage.engine.abort("two")  # the request of the other group goes on, and so does the batch
        until(lambda: stage.executor.collective_rpc("kv_stats")[1]["charged"] == 0)
        assert not running[0].done()
        stage.engine.abort("one")
        for future in running:
            with pytest.raises(RequestAborted):
                future.result(WAIT).result()
        until(lambda: all(receipt.done for receipt in receipts))  # the workers have freed them
        again = {name: stage.submit(name, seed=3) for name in ("one", "two")}  # ids are free again
        for name in again:
            stage.send(name, seed=3)
        for future in again.values():
            assert torch.equal(future.result(WAIT).result()[0], alone(seed=3))
        until(lambda: stage.engine.stats()["kv"]["workers"]["charged"] == 0)


def test_an_abort_before_the_worker_has_begun(sockets: str) -> None:
    """The scheduler has scheduled the request, but the worker has not begun it."""
    with engine_with_ranks(sockets, 1) as stage:
        for number in range(10):
            name = f"r{number}"
            future = stage.submit(name, **LONG)
            stage.send(name)
            while not stage.engine.scheduler.num_running:
                assert not future.done()
            stage.engine.abort(name)
            with pytest.raises(RequestAborted):
                future.result(WAIT).result()


def test_errors_during_startup_are_raised_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = checkpoint()
    two: dict[str, Any] = {
        "parallel_config": DiffusionParallelConfig(data_parallel_size=2),
        "num_threads": 1,
    }
    with pytest.raises(FileNotFoundError, match=r"rank [01]: .*nowhere"):
        MultiprocExecutor(OmniDiffusionConfig("/nowhere", **two))
    kv = KVConfig(sources=(url(),), connect_timeout=WAIT)
    with pytest.raises(TransferTimeout, match=r"start: no answer of rank 0, 1 within 0\.5 s"):
        MultiprocExecutor(OmniDiffusionConfig(model, kv=kv, start_timeout=0.5, **two))
    assert list(tmp_path.glob("kvl-ranks-*")) == []


def test_default_executors() -> None:
    two = DiffusionParallelConfig(tensor_parallel_size=2)
    one_ar = OmniARConfig("x", kv=KVConfig(sinks=(url(),)))
    two_ar = OmniARConfig("x", kv=KVConfig(sinks=(url(), url())), parallel_config=two)
    assert Executor.get_class(one_ar) is UniprocExecutor
    assert Executor.get_class(two_ar) is MultiprocExecutor
    assert Executor.get_class(config(None, parallel_config=two)) is MultiprocExecutor
    assert Executor.get_class(config(None)) is not MultiprocExecutor


def test_calls_of_workers_that_were_shut_down(sockets: str) -> None:
    with engine_with_ranks(sockets, 1) as stage:
        executor = stage.executor
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collective_rpc("check_health")
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health(timeout=1)
