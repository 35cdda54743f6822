"""`step_execution` with workers in other processes: groups, guidance ranks, tensor ranks."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.engine import (
    DiffusionEngine,
    DiffusionParallelConfig,
    EngineCore,
    EngineDeadError,
    KVConfig,
    OmniDiffusionConfig,
    RequestAborted,
    RequestFailed,
)
from omni_kvlink.engine.kv.kv_sink import KVSink
from omni_kvlink.engine.outputs import DiffusionOutput, StepSchedulerOutput
from support.engine.fixtures import WAIT, alone, bundle, checkpoint, close_to, request, until, url
from support.engine.multiproc import engine_with_ranks
from support.engine.parallel_ranks import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


LONG, SHORT = 12, 4
"""Points of a schedule: one more than the steps."""


class Steps:
    """Records the steps that an engine sends to its workers: ids that go on, and that begin.

    `on_step` is called before each is sent, with its number from 1.
    """

    def __init__(self, engine: EngineCore, on_step: Callable[[int], Any] = lambda number: None):
        self.seen = list[tuple[list[str], list[str]]]()
        executor: Any = engine.executor
        execute_model = executor.execute_model

        def recorded(step: Any) -> Any:
            self.seen.append((step.cached_request_ids, [one.request_id for one in step.requests]))
            on_step(len(self.seen))
            return execute_model(step)

        executor.execute_model = recorded

    @property
    def sizes(self) -> list[int]:
        return [len(cached) + len(new) for cached, new in self.seen]


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_join_and_leave_in_other_processes(sockets: str, ranks: int) -> None:
    """Also with two groups, each of which runs its own requests of a step."""
    with engine_with_ranks(sockets, ranks, step_execution=True, max_num_seqs=4) as stage:
        late = list[Any]()

        def on_step(number: int) -> None:
            if number == 3:
                stage.send("short", seed=1)
                late.append(stage.submit("short", seed=1, num_inference_steps=SHORT))
                until(lambda: stage.engine.stats()["kv"]["held"]["ready"] == 2)
            elif number == 8:
                assert late[0].done()
                until(lambda: stage.engine.stats()["kv"]["workers"]["charged"] > 0)
                held.append(stage.engine.stats()["kv"]["workers"]["freed"])

        held = list[int]()
        steps = Steps(stage.engine, on_step)
        stage.send("long")
        image = stage.submit("long", num_inference_steps=LONG).result(WAIT).result()[0]
        assert close_to(image, alone(num_inference_steps=LONG))
        short = late[0].result(WAIT).result()[0]
        assert close_to(short, alone(seed=1, num_inference_steps=SHORT))
        assert steps.sizes == [1] * 3 + [2] * 3 + [1] * 5
        assert held == [1]  # the KV of the short one, while the long one runs


def test_aborts_in_other_processes(sockets: str) -> None:
    with engine_with_ranks(sockets, 1, step_execution=True, max_num_seqs=2) as stage:
        waiting = list[Any]()

        def on_step(number: int) -> None:
            if number == 4:
                stage.send("c", seed=2)
                waiting.append(stage.submit("c", seed=2, num_inference_steps=SHORT))
                until(lambda: stage.engine.stats()["kv"]["held"]["ready"] == 3)
                stage.engine.abort("b")

        stage.send("a")
        stage.send("b", seed=1)
        with stage.engine.scheduler._changed:  # both begin with the first step
            futures = [stage.submit(name, num_inference_steps=10_000) for name in "ab"]
        steps = Steps(stage.engine, on_step)
        with pytest.raises(RequestAborted):
            futures[1].result(WAIT).result()
        image = waiting[0].result(WAIT).result()[0]
        assert close_to(image, alone(seed=2, num_inference_steps=SHORT))
        begun = next(at for at, (_, new) in enumerate(steps.seen) if new == ["c"])
        assert "b" in steps.seen[begun][0]
        assert "b" not in steps.seen[begun + 1][0]
        stage.engine.abort("a")
        with pytest.raises(RequestAborted):
            futures[0].result(WAIT).result()
        until(lambda: stage.engine.stats()["kv"]["workers"]["charged"] == 0)


def test_a_worker_that_dies_ends_all_requests(sockets: str) -> None:
    with engine_with_ranks(sockets, 1, step_execution=True, max_num_seqs=2) as stage:
        pid = stage.workers[0].pid

        def on_step(number: int) -> None:
            if number == 3:
                os.kill(pid, signal.SIGKILL)

        Steps(stage.engine, on_step)
        stage.send("a")
        with pytest.raises(EngineDeadError):
            stage.submit("a", num_inference_steps=10_000).result(WAIT).result()
        stage.producer.abort("a")  # its reader is gone, and no other one will come


@pytest.mark.parametrize("degree", ["cfg_parallel_size", "tensor_parallel_size"])
def test_ranks_that_share_a_step(degree: str) -> None:
    """Requests of different steps: with other branches, some of which are past their interval."""
    parallel = DiffusionParallelConfig(**{degree: 2})
    how: dict[str, Any] = {"stage": "all", "dtype": "float32", "num_threads": 1}
    config = OmniDiffusionConfig(
        checkpoint(), parallel_config=parallel, step_execution=True, max_num_seqs=3, **how
    )
    with DiffusionEngine(config) as engine:
        later = list[Any]()

        def on_step(number: int) -> None:
            if number in (3, 5):
                name, steps = ("b", SHORT) if number == 3 else ("c", 7)
                later.append(engine.submit(one(name, number, steps)))

        def one(name: str, seed: int, steps: int) -> Any:
            fields = {"num_inference_steps": steps, "cfg_interval": (0.6, 1.0)}
            return request(name, seed=seed, need_kv_receive=False, **fields)

        steps = Steps(engine, on_step)
        found = [engine.submit(one("a", 0, LONG)).result(WAIT)]
        found += [future.result(WAIT) for future in later]
        assert max(steps.sizes) == 3
        for output, (seed, points) in zip(found, ((0, LONG), (3, SHORT), (5, 7)), strict=True):
            expected = alone(seed=seed, num_inference_steps=points, cfg_interval=(0.6, 1.0))
            assert close_to(output.result()[0], expected)


@pytest.mark.parametrize("degree", ["cfg_parallel_size", "tensor_parallel_size"])
def test_ranks_that_share_a_step_have_their_parts_of_the_kv(sockets: str, degree: str) -> None:
    """Also of a request whose parts come while another one runs."""
    parallel = DiffusionParallelConfig(**{degree: 2})
    source, options = url(), {"directory": sockets}
    sending = KVConfig(sinks=(source,), sink_options=options, receivers=parallel)
    kv = KVConfig(sources=(source,), source_options=options, receivers=parallel, timeout=WAIT)
    how: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 2}
    config = OmniDiffusionConfig(
        checkpoint(), kv=kv, parallel_config=parallel, step_execution=True, **how
    )
    with closing(KVSink(sending, heads=2)) as kv_sink, DiffusionEngine(config) as engine:
        later = list[Any]()

        def on_step(number: int) -> None:
            if number == 3:
                kv_sink.send(bundle("b", seed=1))
                later.append(engine.submit(request("b", seed=1, num_inference_steps=SHORT)))
                until(lambda: engine.stats()["kv"]["held"]["ready"] == 2)

        steps = Steps(engine, on_step)
        kv_sink.send(bundle("a"))
        image = engine.submit(request("a", num_inference_steps=LONG)).result(WAIT).result()[0]
        assert close_to(image, alone(num_inference_steps=LONG))
        short = later[0].result(WAIT).result()[0]
        assert close_to(short, alone(seed=1, num_inference_steps=SHORT))
        assert steps.sizes == [1] * 3 + [2] * 3 + [1] * 5
        until(lambda: not kv_sink.link.stats()["memory"]["used"])


# ---- what the ranks of a group agree on


@contextmanager
def two_ranks() -> Iterator[RankProcesses]:
    with tempfile.TemporaryDirectory(prefix="kvl-") as directory:
        config = OmniDiffusionConfig(
            checkpoint(),
            stage="all",
            dtype="float32",
            num_threads=1,
            max_num_seqs=4,
            step_execution=True,
            parallel_config=DiffusionParallelConfig(cfg_parallel_size=2),
            distributed_init_method=f"file://{directory}/rendezvous",
        )
        ranks = RankProcesses(config)
        try:
            yield ranks.wait_ready()
        finally:
            ranks.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with two_ranks() as made:
        yield made


def run_step(worker: Any, step: StepSchedulerOutput) -> dict[str, DiffusionOutput]:
    results: dict[str, DiffusionOutput] = worker.execute_stepwise(step).results
    return results


def fail_passes_with(worker: Any, name: str) -> None:
    """Let each pass on this rank fail that has this request."""
    pipeline = worker.runner.pipeline

    def denoise_step(states: Any) -> Any:
        if any(state.request.request_id == name for state in states):
            raise MemoryError("of this request")
        return type(pipeline).denoise_step(pipeline, states)

    pipeline.denoise_step = denoise_step


def pass_again(worker: Any) -> None:
    vars(worker.runner.pipeline).pop("denoise_step", None)


def test_an_error_on_one_rank_is_the_requests_on_all(ranks: RankProcesses) -> None:
    batch = [request(n, seed=i, need_kv_receive=False) for i, n in enumerate("ab")]
    found = ranks.call_all(run_step, StepSchedulerOutput(batch))
    assert found == [{}, {}]
    ranks.call(1, fail_passes_with, "b")
    both = StepSchedulerOutput([], cached_request_ids=["a", "b"])
    for results in ranks.call_all(run_step, both):
        assert list(results) == ["b"]
        assert isinstance(results["b"].error, RequestFailed)
        assert "of this request" in str(results["b"].error)
    rest = StepSchedulerOutput([], cached_request_ids=["a"])
    assert ranks.call_all(run_step, rest) == [{}, {}]
    leader, other = ranks.call_all(run_step, rest)
    assert close_to(leader["a"].result()[0], alone())
    assert (other["a"].output, other["a"].error) == (None, None)


def test_an_abort_is_part_of_the_step(ranks: RankProcesses) -> None:
    ranks.call_all(pass_again)
    batch = [request(n, seed=i, need_kv_receive=False) for i, n in enumerate("ab")]
    assert ranks.call_all(run_step, StepSchedulerOutput(batch)) == [{}, {}]
    ids = {"cached_request_ids": ["a", "b"], "aborted_request_ids": ["a"]}
    for results in ranks.call_all(run_step, StepSchedulerOutput([], **ids)):
        assert isinstance(results["a"].error, RequestAborted)
    rest = StepSchedulerOutput([], cached_request_ids=["b"])
    ranks.call_all(run_step, rest)
    leader, _ = ranks.call_all(run_step, rest)
    assert close_to(leader["b"].result()[0], alone(seed=1))


def die_in_pass(worker: Any) -> None:
    worker.runner.pipeline.denoise_step = lambda states: os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_fails_what_still_runs() -> None:
    """A request that was aborted before the pass has its own result."""
    with two_ranks() as ranks:
        batch = [request(n, seed=i, need_kv_receive=False) for i, n in enumerate("ab")]
        assert ranks.call_all(run_step, StepSchedulerOutput(batch)) == [{}, {}]
        ranks.call(1, die_in_pass)
        ids = {"cached_request_ids": ["a", "b"], "aborted_request_ids": ["a"]}
        for rank in (0, 1):
            ranks.send_call(rank, run_step, StepSchedulerOutput([], **ids))
        results = ranks.result(0)
        assert isinstance(results["a"].error, RequestAborted)
        assert isinstance(results["b"].error, EngineDeadError)
