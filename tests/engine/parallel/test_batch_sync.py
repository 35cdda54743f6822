"""Ranks that compute together agree on what they compute: nobody waits for what never comes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from parallel_fixtures import Stage, digests, execute, painted, receive, requests, stages, value

from omni_kvlink.engine import EngineDeadError, EngineError, RequestAborted, RequestFailed
from omni_kvlink.engine.parallel import batch_sync
from omni_kvlink.errors import SchemaError, TransferFailed

GUIDANCE, TENSOR = {"cfg_parallel_size": 2}, {"tensor_parallel_size": 2}
SOON = 8.0
"""Seconds in which all ranks have answered, whatever happened to one of them."""


@pytest.fixture
def directory() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="kvl-")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def beds() -> Iterator[dict[str, Stage]]:
    made = tempfile.mkdtemp(prefix="kvl-")
    both = Stage(made, **GUIDANCE), Stage(made, **TENSOR)
    with stages(*both):
        yield dict(zip(("guidance", "tensor"), both, strict=True))
    shutil.rmtree(made)


@pytest.fixture(params=["guidance", "tensor"])
def bed(beds: dict[str, Stage], request: pytest.FixtureRequest) -> Stage:
    return beds[request.param]


def paint(bed: Stage, names: str, **fields: Any) -> list[tuple[Any, Any]]:
    """Each rank's image and error of every request, received and executed."""
    wanted = requests(*names, **fields)
    bed.send(*wanted)
    assert bed.ranks.all(receive, *wanted) == [["ready"] * len(names)] * 2
    started = time.monotonic()
    found = bed.ranks.all(execute, *wanted)
    assert time.monotonic() - started < SOON
    return found


def well(bed: Stage, name: str = "well") -> list[str]:
    """They still paint together: the latents."""
    wanted = requests(name)
    bed.send(*wanted)
    (_, ours), (_, theirs) = bed.ranks.all(painted, *wanted)
    assert digests(ours) == digests(theirs)
    return digests(ours)


# ---- who takes part


def test_one_ranks_missing_kv_is_everybodys_error(bed: Stage) -> None:
    """Of one request; its mate goes on."""
    before = well(bed)
    wanted = requests("m", "bad")
    bed.send(*wanted[:1])
    first, *others = bed.handover._shares
    bed.handover.link.put(first.cut(bed.bundle_of(wanted[1])), ttl=5)
    for share in others:
        bed.handover.link.fail(share.key("bad"), "the AR stage ran out of blocks")
    assert bed.ranks.all(receive, *wanted) == [["ready", "ready"], ["ready", "failed"]]
    for (_, mates), (image, error) in bed.ranks.all(execute, *wanted):
        assert mates is None
        assert image is None
        assert isinstance(error, TransferFailed)
        assert error.key == others[0].key("bad")
        assert "out of blocks" in str(error)
    assert well(bed) == before


def break_conversion(worker: Any, name: str) -> None:
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        if request.request_id == name:
            raise ZeroDivisionError("own trouble")
        return type(utility).convert(utility, payload, request)

    utility.convert = convert


def test_one_ranks_conversion_is_everybodys_error(bed: Stage) -> None:
    bed.ranks.on(1, break_conversion, "bad")
    for (_, none), (_, error) in paint(bed, ["good", "bad"]):
        assert none is None
        assert isinstance(error, RequestFailed)
        assert "own trouble" in str(error)
    well(bed)


def spoil_shape(worker: Any, name: str) -> None:
    """The pipeline, not the runner, is who finds that this request lacks something."""
    utility = worker.runner.utility

    def convert(payload: Any, request: Any) -> Any:
        contexts = type(utility).convert(utility, payload, request)
        if request.request_id == name:
            for own in (contexts.gen, contexts.cfg_text):
                own.kv_lens = [own.kv_lens[0] + 1]
        return contexts

    utility.convert = convert


def test_what_the_pipeline_finds_on_one_rank_is_everybodys_error(bed: Stage) -> None:
    bed.ranks.on(1, spoil_shape, "bad")
    for (_, none), (_, error) in paint(bed, ["good", "bad"]):
        assert none is None
        assert isinstance(error, SchemaError)
    well(bed)


def test_ranks_that_were_told_different_batches_say_so(bed: Stage) -> None:
    names = requests("one", "two", need_kv_receive=False)
    found = bed.ranks.ask([(execute, *names), (execute, *names[:1])])
    for error in found:
        assert isinstance(error, EngineError)
        assert "different batches" in str(error)
    well(bed)


# ---- in the middle


def sabotage(worker: Any, where: str, step: int, error: Exception) -> None:
    """Raise an error once, at a step, in a place."""
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
    beds: dict[str, Stage], where: str, rank: int
) -> None:
    bed, before = beds["guidance"], well(beds["guidance"])
    if where == "decode" and rank:
        return  # the leader alone decodes
    bed.ranks.on(rank, sabotage, where, 0 if where == "decode" else 2, ZeroDivisionError("own"))
    for outputs in paint(bed, "xy"):
        for image, error in outputs:
            assert image is None
            assert isinstance(error, RequestFailed)
            assert "own" in str(error)
    assert well(bed) == before


@pytest.mark.parametrize("where", ["between", "decode"])
def test_outside_a_sum_tensor_ranks_survive_too(beds: dict[str, Stage], where: str) -> None:
    bed = beds["tensor"]
    bed.ranks.on(0, sabotage, where, 0 if where == "decode" else 2, ZeroDivisionError("own"))
    for ((_, error),) in paint(bed, "x"):
        assert isinstance(error, RequestFailed)
    well(bed)


def test_an_error_that_all_ranks_have_ends_nothing_else(bed: Stage) -> None:
    bed.ranks.all(sabotage, "layer", 3, ZeroDivisionError("everybody's"))
    for ((_, error),) in paint(bed, "x"):
        assert "everybody's" in str(error)
    well(bed)


# ---- aborts


def abort_at(worker: Any, step: int, *names: str) -> None:
    """This rank hears of it at a step; the other one, never."""
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
def test_what_one_rank_hears_all_agree_on(bed: Stage, rank: int) -> None:
    bed.ranks.on(rank, abort_at, 2, "gone")
    bed.ranks.on(1 - rank, abort_at, 0)
    for (_, none), (image, error) in paint(bed, ["stays", "gone"]):
        assert none is None
        assert image is None
        assert isinstance(error, RequestAborted)
    assert bed.ranks.all(count) == [4, 4]  # for its mate's sake
    bed.ranks.on(rank, abort_at, 2, "gone", "too")
    bed.ranks.on(1 - rank, abort_at, 0)
    for outputs in paint(bed, ["gone", "too"]):
        assert all(isinstance(error, RequestAborted) for _, error in outputs)
    assert bed.ranks.all(count) == [2, 2]
    well(bed)


def paint_cancelled(worker: Any, cancelled: bool, *wanted: Any) -> Any:
    """The first was aborted on its way to this rank."""
    wanted[0].is_cancelled = lambda: cancelled
    assert receive(worker, *wanted) == ["ready"] * len(wanted)
    return execute(worker, *wanted)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_on_the_way_to_one_rank_reaches_all(bed: Stage, rank: int) -> None:
    wanted = requests("gone", "stays")
    bed.send(*wanted)
    calls = [(paint_cancelled, here == rank, *wanted) for here in (0, 1)]
    for (image, error), (_, none) in bed.ranks.ask(calls):
        assert image is None
        assert isinstance(error, RequestAborted)
        assert none is None


# ---- a rank that is gone


def have_patience(_: Any, seconds: float) -> None:
    batch_sync._FAILED_RANK_TIMEOUT = seconds


def decode_slowly(worker: Any) -> None:
    """Once."""
    pipeline = worker.runner.pipeline

    def decode(latent: Any) -> Any:
        del pipeline.decode
        time.sleep(1.5)
        return pipeline.decode(latent)

    pipeline.decode = decode


def test_nobody_leaves_a_leader_that_takes_its_time(beds: dict[str, Stage]) -> None:
    """Of a request that was aborted all know: no reason to think that others sum without it."""
    bed = beds["tensor"]
    bed.ranks.all(have_patience, 0.5)
    bed.ranks.on(0, decode_slowly)
    bed.ranks.on(1, abort_at, 2, "gone")
    for (_, none), (_, error) in paint(bed, ["stays", "gone"]):
        assert none is None
        assert isinstance(error, RequestAborted)
    bed.ranks.on(1, count)
    bed.ranks.all(have_patience, 10.0)
    well(bed)


def end_of(bed: Stage, act: Callable[[], None]) -> list[Any]:
    """What the ranks answer to a batch in the middle of which something happens to one."""
    wanted = requests("last", num_inference_steps=2000)
    bed.send(*wanted)
    bed.ranks.all(receive, *wanted)
    for rank in (0, 1):
        bed.ranks.tell(rank, execute, *wanted)
    act()
    started = time.monotonic()
    found = [bed.ranks.answer(rank) for rank in (0, 1) if bed.ranks.processes[rank].is_alive()]
    assert time.monotonic() - started < SOON
    return found


@pytest.mark.parametrize("degrees", [GUIDANCE, TENSOR], ids=["guidance", "tensor"])
def test_a_killed_rank_ends_what_the_others_do(directory: str, degrees: dict[str, int]) -> None:
    with stages(Stage(directory, **degrees)) as (bed,):

        def kill() -> None:
            time.sleep(0.5)
            os.kill(bed.ranks.processes[1].pid, signal.SIGKILL)
            bed.ranks.processes[1].join(10)

        (((image, error),),) = end_of(bed, kill)
        assert image is None
        assert isinstance(error, EngineDeadError)
        assert "restart the stage" in str(error)
        bed.ranks.tell(0, execute, *requests("next", need_kv_receive=False))
        assert isinstance(bed.ranks.answer(0), EngineDeadError)


def test_a_rank_that_fails_while_others_sum_leaves_them(directory: str) -> None:
    """What they sum will never be whole: the stage must be started again, and says so."""
    with stages(Stage(directory, **TENSOR)) as (bed,):
        bed.ranks.all(have_patience, 0.5)
        bed.ranks.on(1, sabotage, "layer", 20, ZeroDivisionError("own"))
        ((_, other),), ((_, own),) = end_of(bed, lambda: None)
        assert "own" in str(own)
        assert isinstance(other, EngineDeadError)
        for rank in (0, 1):
            bed.ranks.tell(rank, execute, *requests("next", need_kv_receive=False))
            with pytest.raises(EngineDeadError, match="restart"):
                value(bed.ranks.answer(rank))
