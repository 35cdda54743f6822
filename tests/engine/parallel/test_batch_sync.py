"""`BatchSync`: errors and aborts of one rank reach all ranks of its group."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.engine.errors import EngineDeadError, EngineError, RequestAborted, RequestFailed
from omni_kvlink.engine.parallel import batch_sync
from omni_kvlink.errors import SchemaError, TransferFailed
from support.engine.parallel_ranks import (
    Stage,
    digests,
    execute,
    generate,
    receive,
    requests,
    started,
    value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GUIDANCE: dict[str, Any] = {"cfg_parallel_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
ULYSSES: dict[str, Any] = {"ulysses_degree": 2}
RING: dict[str, Any] = {"ring_degree": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
NEVER = 3600.0
"""For `_FAILED_RANK_TIMEOUT`: ranks learn of the failure of another one without it."""


@pytest.fixture
def directory() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="kvl-")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def stages() -> Iterator[dict[str, Stage]]:
    made = tempfile.mkdtemp(prefix="kvl-")
    both = Stage(made, **GUIDANCE), Stage(made, **TENSOR)
    with started(*both):
        for one in both:
            one.ranks.call_all(set_timeout, NEVER)
        yield dict(zip(("guidance", "tensor"), both, strict=True))
    shutil.rmtree(made)


@pytest.fixture(params=["guidance", "tensor"])
def stage(stages: dict[str, Stage], request: pytest.FixtureRequest) -> Stage:
    return stages[request.param]


def run_batch(stage: Stage, names: Sequence[str], **fields: Any) -> list[list[tuple[Any, Any]]]:
    """Each rank's image and error of every request, received and executed."""
    batch = requests(*names, **fields)
    stage.send(*batch)
    assert stage.ranks.call_all(receive, *batch) == [["ready"] * len(names)] * 2
    found: list[list[tuple[Any, Any]]] = stage.ranks.call_all(execute, *batch)
    return found


def check_generates(stage: Stage, name: str = "well") -> list[str]:
    """The ranks still generate the same image together; digests of its latents."""
    batch = requests(name)
    stage.send(*batch)
    (_, ours), (_, theirs) = stage.ranks.call_all(generate, *batch)
    assert digests(ours) == digests(theirs)
    return digests(ours)


# ---- before the first step


def test_one_ranks_missing_kv_fails_the_request_on_all_ranks(stage: Stage) -> None:
    """The other request of the batch is not affected."""
    before = check_generates(stage)
    batch = requests("m", "bad")
    stage.send(*batch[:1])
    # A sink sends all parts or none: here one rank's does not come.
    first, *others = stage.kv_sink._parts
    stage.kv_sink.link.put(first.cut(stage.bundle_of(batch[1])), ttl=5)
    for share in others:
        stage.kv_sink.link.fail(share.key("bad"), "the AR stage ran out of blocks")
    assert stage.ranks.call_all(receive, *batch) == [["ready", "ready"], ["ready", "failed"]]
    for (_, none), (image, error) in stage.ranks.call_all(execute, *batch):
        assert none is None
        assert image is None
        assert isinstance(error, TransferFailed)
        assert error.key == others[0].key("bad")
        assert "out of blocks" in str(error)
    assert check_generates(stage) == before


def break_conversion(worker: Any, name: str) -> None:
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        if request.request_id == name:
            raise ZeroDivisionError("own trouble")
        return type(utility).convert(utility, payload, request)

    utility.convert = convert


def test_one_ranks_conversion_error_fails_the_request_on_all_ranks(stage: Stage) -> None:
    stage.ranks.call(1, break_conversion, "bad")
    for (_, none), (_, error) in run_batch(stage, ["good", "bad"]):
        assert none is None
        assert isinstance(error, RequestFailed)
        assert "own trouble" in str(error)
    check_generates(stage)


def corrupt_shape(worker: Any, name: str) -> None:
    """Give a request a wrong length, which the pipeline detects, not the runner."""
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        contexts = type(utility).convert(utility, payload, request)
        if request.request_id == name:
            for own in (contexts.gen, contexts.cfg_text):
                own.kv_lens = [own.kv_lens[0] + 1]
        return contexts

    utility.convert = convert


def test_one_ranks_pipeline_error_fails_the_request_on_all_ranks(stage: Stage) -> None:
    stage.ranks.call(1, corrupt_shape, "bad")
    for (_, none), (_, error) in run_batch(stage, ["good", "bad"]):
        assert none is None
        assert isinstance(error, SchemaError)
    check_generates(stage)


def test_ranks_that_are_given_different_batches_raise(stage: Stage) -> None:
    names = requests("one", "two", need_kv_receive=False)
    found = stage.ranks.call_each([(execute, *names), (execute, *names[:1])])
    for error in found:
        assert isinstance(error, EngineError)
        assert "different batches" in str(error)
    check_generates(stage)


# ---- in the middle


def inject_error(worker: Any, where: str, step: int, error: Exception) -> None:
    """Raise an error once, at a step, in a function of the model."""
    pipeline = worker.runner.pipeline
    owner, name = {
        "pass": (pipeline.model, "velocity"),
        "layer": (pipeline.model.language_model.model.layers[1], "forward"),
        "between": (pipeline.model, "latent_rows"),
        "decode": (pipeline, "decode"),
    }[where]
    original, calls = getattr(owner, name), [0]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > step:
            setattr(owner, name, original)
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, wrong)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["pass", "between", "decode"])
def test_one_ranks_error_ends_the_batch_on_all(
    stages: dict[str, Stage], where: str, rank: int
) -> None:
    stage, before = stages["guidance"], check_generates(stages["guidance"])
    if where == "decode" and rank:
        return  # the leader alone decodes
    stage.ranks.call(
        rank, inject_error, where, 0 if where == "decode" else 2, ZeroDivisionError("own")
    )
    for outputs in run_batch(stage, "xy"):
        for image, error in outputs:
            assert image is None
            assert isinstance(error, RequestFailed)
            assert "own" in str(error)
    assert check_generates(stage) == before


@pytest.mark.parametrize("where", ["between", "decode"])
def test_outside_a_sum_tensor_ranks_survive_too(stages: dict[str, Stage], where: str) -> None:
    stage = stages["tensor"]
    stage.ranks.call(
        0, inject_error, where, 0 if where == "decode" else 2, ZeroDivisionError("own")
    )
    for ((_, error),) in run_batch(stage, "x"):
        assert isinstance(error, RequestFailed)
    check_generates(stage)


def test_an_error_that_all_ranks_have_ends_nothing_else(stage: Stage) -> None:
    stage.ranks.call_all(inject_error, "layer", 3, ZeroDivisionError("everybody's"))
    for ((_, error),) in run_batch(stage, "x"):
        assert "everybody's" in str(error)
    check_generates(stage)


# ---- aborts


def abort_at(worker: Any, step: int, *names: str) -> None:
    """Abort requests on this rank at a step; the other rank is not called."""
    original, calls = worker.runner.pipeline.model.latent_rows, [0]

    def rows(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            for name in names:
                worker.abort(name)
        return original(*args)

    worker.runner.pipeline.model.latent_rows = rows


def count(worker: Any) -> int:
    """Steps since `abort_at`."""
    rows = vars(worker.runner.pipeline.model).pop("latent_rows")
    calls = dict(zip(rows.__code__.co_freevars, rows.__closure__, strict=True))["calls"]
    steps: int = calls.cell_contents[0]
    return steps


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_on_one_rank_takes_effect_on_all_at_the_same_step(stage: Stage, rank: int) -> None:
    stage.ranks.call(rank, abort_at, 2, "gone")
    stage.ranks.call(1 - rank, abort_at, 0)
    for (_, none), (image, error) in run_batch(stage, ["stays", "gone"]):
        assert none is None
        assert image is None
        assert isinstance(error, RequestAborted)
    assert stage.ranks.call_all(count) == [4, 4]  # the other request needs all steps
    stage.ranks.call(rank, abort_at, 2, "gone", "too")
    stage.ranks.call(1 - rank, abort_at, 0)
    for outputs in run_batch(stage, ["gone", "too"]):
        assert all(isinstance(error, RequestAborted) for _, error in outputs)
    assert stage.ranks.call_all(count) == [2, 2]
    check_generates(stage)


def run_cancelled(worker: Any, cancelled: bool, *batch: Any) -> Any:
    """Run a batch whose first request was aborted before it reached this rank, or not."""
    batch[0].is_cancelled = lambda: cancelled
    assert receive(worker, *batch) == ["ready"] * len(batch)
    return execute(worker, *batch)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_before_one_rank_begins_reaches_all(stage: Stage, rank: int) -> None:
    batch = requests("gone", "stays")
    stage.send(*batch)
    calls = [(run_cancelled, here == rank, *batch) for here in (0, 1)]
    for (image, error), (_, none) in stage.ranks.call_each(calls):
        assert image is None
        assert isinstance(error, RequestAborted)
        assert none is None


# ---- a rank that is killed or slow


def set_timeout(_: Any, seconds: float) -> None:
    # No setting: so long a rank that was lost may hold up the others.
    batch_sync._FAILED_RANK_TIMEOUT = seconds


def decode_slowly(worker: Any) -> None:
    """Delay the next decode by 0.5 s."""
    pipeline = worker.runner.pipeline

    def decode(latent: Any) -> Any:
        del pipeline.decode
        time.sleep(0.5)
        return pipeline.decode(latent)

    pipeline.decode = decode


def test_the_other_ranks_wait_for_a_slow_leader(stages: dict[str, Stage]) -> None:
    """An abort is known on all ranks, so `_FAILED_RANK_TIMEOUT` does not apply."""
    stage = stages["tensor"]
    stage.ranks.call_all(set_timeout, 0.1)
    stage.ranks.call(0, decode_slowly)
    stage.ranks.call(1, abort_at, 2, "gone")
    for (_, none), (_, error) in run_batch(stage, ["stays", "gone"]):
        assert none is None
        assert isinstance(error, RequestAborted)
    stage.ranks.call(1, count)
    stage.ranks.call_all(set_timeout, NEVER)
    check_generates(stage)


def kill_at(worker: Any, step: int) -> None:
    """Kill this rank's process at a step."""
    original, calls = worker.runner.pipeline.model.latent_rows, [0]

    def rows(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    worker.runner.pipeline.model.latent_rows = rows


def begin_batch(stage: Stage) -> None:
    """Let both ranks execute a long batch."""
    batch = requests("last", num_inference_steps=2000)
    stage.send(*batch)
    stage.ranks.call_all(receive, *batch)
    for rank in (0, 1):
        stage.ranks.send_call(rank, execute, *batch)


@pytest.mark.parametrize("degrees", [GUIDANCE, TENSOR, ULYSSES, RING, PIPELINE], ids=str)
def test_a_killed_rank_fails_the_batch_on_the_others(
    directory: str, degrees: dict[str, Any]
) -> None:
    with started(Stage(directory, **degrees)) as (stage,):
        stage.ranks.call_all(set_timeout, NEVER)
        stage.ranks.call(1, kill_at, 3)
        begin_batch(stage)
        ((image, error),) = stage.ranks.result(0)
        assert image is None
        assert isinstance(error, EngineDeadError)
        assert "restart the stage" in str(error)
        stage.ranks.send_call(0, execute, *requests("next", need_kv_receive=False))
        assert isinstance(stage.ranks.result(0), EngineDeadError)


@pytest.mark.parametrize("degrees", [TENSOR, RING, PIPELINE], ids=str)
def test_a_rank_that_fails_while_others_wait_for_it_aborts_the_group(
    directory: str, degrees: dict[str, Any]
) -> None:
    """Their pass cannot be completed, so the stage must be restarted."""
    with started(Stage(directory, **degrees)) as (stage,):
        stage.ranks.call_all(set_timeout, 0.5)
        stage.ranks.call(1, inject_error, "layer", 20, ZeroDivisionError("own"))
        begin_batch(stage)
        ((_, other),), ((_, own),) = (stage.ranks.result(rank) for rank in (0, 1))
        assert "own" in str(own)
        assert isinstance(other, EngineDeadError)
        for rank in (0, 1):
            stage.ranks.send_call(rank, execute, *requests("next", need_kv_receive=False))
            with pytest.raises(EngineDeadError, match="restart"):
                value(stage.ranks.result(rank))
