"""`StepScheduler`: who joins the requests that run, and when; without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_kvlink.engine import (
    ModelRunnerOutput,
    OmniDiffusionConfig,
    RequestAborted,
    StepScheduler,
    StepSchedulerOutput,
)
from support.engine.fixtures import request


def scheduler(seqs: int = 3) -> StepScheduler:
    return StepScheduler(OmniDiffusionConfig("nowhere", max_num_seqs=seqs, step_execution=True))


def add(made: StepScheduler, *names: str, **fields: Any) -> None:
    for name in names:
        made.add_request(request(name, need_kv_receive=False, **fields))


def scheduled(made: StepScheduler, **fields: bool) -> StepSchedulerOutput:
    output = made.schedule(**fields)
    assert isinstance(output, StepSchedulerOutput)
    return output


def step(made: StepScheduler, *ended: str) -> tuple[list[str], list[str]]:
    """Run one step, with which some requests end; those that go on, and those that begin."""
    output = scheduled(made)
    images: list[Any] = [torch.zeros(1, 1, 1, 3, dtype=torch.uint8)] * len(ended)
    done = made.update_from_output(output, ModelRunnerOutput(list(ended), images))
    assert [one.request_id for one in done] == list(ended)
    return output.cached_request_ids, [one.request_id for one in output.requests]


def test_requests_join_those_that_run_up_to_the_limit() -> None:
    made = scheduler()
    add(made, "a")
    assert step(made) == ([], ["a"])
    add(made, *"bcde")
    assert step(made, "b") == (["a"], ["b", "c"])
    assert step(made) == (["a", "c"], ["d"])
    assert step(made, "a", "c") == (["a", "c", "d"], [])
    assert step(made, "d", "e") == (["d"], ["e"])
    assert made.schedule().is_empty
    assert made.stats()["steps"] == 5


@pytest.mark.parametrize(
    "other",
    [{"num_inference_steps": 7}, {"timestep_shift": 1.0}, {"num_outputs_per_prompt": 2}],
    ids=str,
)
def test_what_each_request_may_have_of_its_own(other: dict[str, Any]) -> None:
    made = scheduler()
    add(made, "a")
    step(made)
    add(made, "b", **other)
    assert step(made) == (["a"], ["b"])


@pytest.mark.parametrize(
    "other", [{"height": 32}, {"guidance_scale": 2.0}, {"cfg_interval": (0.0, 1.0)}], ids=str
)
def test_a_request_that_does_not_fit_begins_when_the_others_have_ended(
    other: dict[str, Any],
) -> None:
    """Requests that would fit do not overtake it: it waits no longer than the others run."""
    made = scheduler()
    add(made, "a", "b")
    step(made)
    add(made, "odd", **other)
    add(made, "c")
    assert step(made, "a") == (["a", "b"], [])
    assert step(made, "b") == (["b"], [])
    assert step(made) == ([], ["odd"])
    assert step(made, "odd") == (["odd"], [])
    assert step(made) == ([], ["c"])


def test_an_aborted_request_gives_its_place_to_another_at_once() -> None:
    made = scheduler(seqs=2)
    add(made, *"abc")
    step(made)
    assert made.abort_request("b")
    output = scheduled(made)
    assert (output.cached_request_ids, output.aborted_request_ids) == (["a", "b"], ["b"])
    assert [one.request_id for one in output.requests] == ["c"]
    (ended,) = made.update_from_output(output, ModelRunnerOutput(["b"], [None]))
    assert isinstance(ended.error, RequestAborted)
    assert step(made) == (["a", "c"], [])


def test_the_key_of_an_aborted_request_no_longer_counts() -> None:
    made = scheduler(seqs=2)
    add(made, "a")
    step(made)
    add(made, "odd", height=32)
    made.abort_request("a")
    output = scheduled(made)
    assert (output.aborted_request_ids, output.requests[0].request_id) == (["a"], "odd")


def test_while_calls_wait_nothing_begins_and_the_others_go_on() -> None:
    made = scheduler()
    add(made, "a")
    step(made)
    add(made, "b")
    output = scheduled(made, start=False)
    assert (output.cached_request_ids, output.requests) == (["a"], [])
