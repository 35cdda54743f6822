"""`max_concurrent_batches`: the next batch is sent to the workers while one runs."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink.engine import Executor, ModelRunnerOutput, OmniDiffusionConfig, SyncScheduler
from omni_kvlink.engine.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineError,
    RequestAborted,
)
from support.engine.fixtures import WAIT, alone, config, has_calls, request, until
from support.engine.multiproc import EngineUnderTest, engine_with_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

LONG: dict[str, Any] = {"num_inference_steps": 50_000}
"""A request that runs for minutes."""
TWO: dict[str, Any] = {"max_concurrent_batches": 2, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One engine of one rank, which each test leaves without requests."""
    with engine_with_ranks(str(tmp_path_factory.mktemp("s")), 1, **TWO) as made:
        yield made


def submit(stage: EngineUnderTest, name: str, **fields: Any) -> Future[Any]:
    """Submit a request, and send its KV."""
    future = stage.submit(name, **fields)
    stage.send(name, seed=fields.get("seed", 0))
    return future


def answers_of(monkeypatch: pytest.MonkeyPatch, worker: Any) -> list[Future[Any]]:
    """The answers of a worker's batches, as they come from its process."""
    found, call = list[Any](), worker.call

    def recorded(method: str, *args: Any) -> Any:
        answer = call(method, *args)
        found.extend([answer] if method == "run_model" else [])
        return answer

    monkeypatch.setattr(worker, "call", recorded)
    return found


def test_a_worker_begins_the_next_batch_without_the_engine(
    stage: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread does nothing between the end of one batch and that of the next."""
    answers, engine = answers_of(monkeypatch, stage.workers[0]), stage.engine
    update, first = engine.scheduler.update_from_output, list[bool]()

    def hold(*args: Any) -> Any:
        if not first:
            first.append(answers[1].result(WAIT) is not None)
        return update(*args)

    monkeypatch.setattr(engine.scheduler, "update_from_output", hold)
    one = submit(stage, "a", **LONG)
    until(lambda: len(answers) == 1)
    two = submit(stage, "b", seed=1)
    until(lambda: len(answers) == 2)
    assert engine.stats()["running"] == 2
    engine.abort("a")  # which ends its batch
    assert torch.equal(two.result(WAIT).result()[0], alone(seed=1))
    assert isinstance(one.result(WAIT).error, RequestAborted)
    assert first == [True]


def test_groups_run_different_batches_at_once(sockets: str) -> None:
    with engine_with_ranks(sockets, 2, max_concurrent_batches=2) as stage:
        long = submit(stage, "long", **LONG)
        until(lambda: stage.engine.stats()["running"] == 1)
        for seed in (1, 2):  # of another key, so that it is no batch with the long one
            other = submit(stage, f"r{seed}", seed=seed)
            assert torch.equal(other.result(WAIT).result()[0], alone(seed=seed))
        assert not long.done()
        stage.engine.abort("long")
        with pytest.raises(RequestAborted):
            long.result(WAIT).result()


def test_an_abort_of_either_batch(stage: EngineUnderTest) -> None:
    running = submit(stage, "a", **LONG)
    until(lambda: stage.engine.stats()["running"] == 1)
    queued = submit(stage, "b", **LONG)
    until(lambda: stage.engine.stats()["running"] == 2)
    waiting = submit(stage, "c", seed=2)
    stage.engine.abort("b")  # it has not begun
    stage.engine.abort("a")
    for future in (running, queued):
        with pytest.raises(RequestAborted):
            future.result(WAIT).result()
    assert torch.equal(waiting.result(WAIT).result()[0], alone(seed=2))
    until(lambda: stage.engine.stats()["kv"]["workers"]["charged"] == 0)


def test_an_error_of_one_batch_is_not_the_others(stage: EngineUnderTest) -> None:
    submit(stage, "long", **LONG)
    bad = submit(stage, "bad", lora_int_id=1)
    good = submit(stage, "good", seed=1)
    until(lambda: stage.engine.stats()["running"] == 2)
    stage.engine.abort("long")
    with pytest.raises(EngineError, match="lora_int_id 1 is not loaded"):
        bad.result(WAIT).result()
    assert torch.equal(good.result(WAIT).result()[0], alone(seed=1))


def test_a_worker_that_dies_ends_all_batches(stage: EngineUnderTest) -> None:
    futures = [submit(stage, name, **LONG) for name in ("first", "second")]
    until(lambda: stage.engine.stats()["running"] == 2)
    os.kill(stage.workers[0].pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(EngineDeadError):
            future.result(WAIT).result()
    for name in ("first", "second"):  # their KV would wait for another reader, for a minute
        stage.producer.abort(name)
    stage.engine.restart()
    again = submit(stage, "c", seed=1)
    assert torch.equal(again.result(WAIT).result()[0], alone(seed=1))


def test_calls_wait_for_all_batches(stage: EngineUnderTest) -> None:
    engine, slept = stage.engine, list[bool]()
    submit(stage, "a", **LONG)
    until(lambda: engine.stats()["running"] == 1)
    queued = submit(stage, "b", seed=1)
    until(lambda: engine.stats()["running"] == 2)
    thread = threading.Thread(target=lambda: slept.append(engine.sleep(timeout=WAIT)))
    thread.start()
    until(lambda: has_calls(engine))
    late = submit(stage, "late")
    engine.abort("a")
    assert torch.equal(queued.result(WAIT).result()[0], alone(seed=1))
    thread.join(WAIT)
    assert slept == [True]
    with pytest.raises(EngineAsleepError):
        late.result(WAIT).result()
    assert engine.wake_up(timeout=WAIT)


def test_closing_ends_all_batches(sockets: str) -> None:
    with engine_with_ranks(sockets, 1, **TWO) as stage:
        futures = [submit(stage, name, **LONG) for name in "ab"]
        until(lambda: stage.engine.stats()["running"] == 2)
        stage.engine.close()
        for future in futures:
            with pytest.raises(EngineError):
                future.result(WAIT).result()


# ---- without workers


def scheduler(batches: int) -> SyncScheduler:
    made = SyncScheduler(OmniDiffusionConfig("nowhere", max_num_seqs=2))
    made.max_concurrent_batches = batches
    for name in "abcde":
        made.add_request(request(name, need_kv_receive=False))
    return made


def test_as_many_batches_as_are_allowed() -> None:
    made = scheduler(2)
    steps = [made.schedule() for _ in range(3)]
    assert [step.request_ids for step in steps] == [["a", "b"], ["c", "d"], []]
    assert not made.wait(timeout=0)  # "e" waits, but nothing can begin
    made.update_from_output(
        steps[0], ModelRunnerOutput.failed(["a", "b"], EngineError("it failed"))
    )
    assert made.wait(timeout=0)
    assert not made.wait(timeout=0, start=False)
    assert made.schedule().request_ids == ["e"]


def test_an_executor_that_runs_one_batch_refuses_more() -> None:
    two = config(None, stage="all", max_concurrent_batches=2)
    with pytest.raises(EngineError, match=r"max_concurrent_batches 2: Uniproc.*'mp' or 'ray'"):
        Executor.get_class(two)(two)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"max_concurrent_batches": 0},
            "max_concurrent_batches=0: wanted a whole number from 1 on",
        ),
        ({"max_concurrent_batches": 2, "step_execution": True}, "2 with step_execution"),
    ]
    for fields, text in wrong:
        with pytest.raises(ValueError, match=text):
            config(None, **fields)
