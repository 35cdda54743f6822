"""Which bytes are requested, received and complete; without I/O."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_kvlink import WireError
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchPlan, RangeSet

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)
ALL = 1000
"""No number of a range is as large."""


@given(added=SPANS, requested=st.tuples(st.integers(0, 60), st.integers(0, 30)))
def test_a_range_set_is_a_set_of_integers(
    added: list[tuple[int, int]], requested: tuple[int, int]
) -> None:
    spans, model = RangeSet(), set[int]()
    for start, length in added:
        spans.add(start, start + length)
        model |= set(range(start, start + length))
    start, stop = requested[0], requested[0] + requested[1]
    missing = {n for a, b in spans.gaps(start, stop) for n in range(a, b)}
    assert missing == set(range(start, stop)) - model
    assert spans.covers(start, stop) == (not missing)
    pairs = itertools.pairwise(spans.parts(0, ALL))
    assert all(one[1] < other[0] for one, other in pairs), "they touch"


def everything(plan: FetchPlan[str]) -> list[tuple[int, int]]:
    requested = []
    while (span := plan.next_range(WINDOW)) is not None:
        requested.append(span)
    return requested


def test_in_order_and_in_chunks() -> None:
    plan: FetchPlan[str] = FetchPlan(2 * CHUNK + 5)
    plan.request(0, plan.nbytes, "all")
    assert everything(plan) == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 5)]
    assert plan.pending_nbytes == plan.nbytes
    assert plan.is_active
    for start, nbytes in ((0, CHUNK), (2 * CHUNK, 5), (CHUNK, CHUNK)):
        assert list(plan.pop_complete()) == []
        plan.on_received(start, nbytes)
    assert list(plan.pop_complete()) == ["all"]
    assert list(plan.pop_complete()) == []
    assert (plan.pending_nbytes, plan.received_nbytes) == (0, plan.nbytes)
    assert not plan.is_active


def test_no_more_than_the_window() -> None:
    plan: FetchPlan[str] = FetchPlan(3 * CHUNK)
    plan.request(0, plan.nbytes, "all")
    assert plan.next_range(CHUNK - 1) is None, "a sliver"
    assert plan.next_range(CHUNK) == (0, CHUNK)


def test_planned_bytes_are_requested_once() -> None:
    plan: FetchPlan[str] = FetchPlan(100)
    plan.request(0, 20, "head")
    plan.request(10, 40, "layer")
    assert everything(plan) == [(0, 20), (20, 40)]
    plan.on_received(0, 20)
    assert list(plan.pop_complete()) == ["head"]
    plan.request(0, 100, "all")
    plan.on_received(20, 20)
    assert list(plan.pop_complete()) == ["layer"]
    assert everything(plan) == [(40, 100)]
    plan.on_received(40, 60)
    assert list(plan.pop_complete()) == ["all"]


def test_what_the_same_bytes_complete_comes_in_the_order_of_the_requests() -> None:
    """A stream's commit must not come before its last layer."""
    plan: FetchPlan[str] = FetchPlan(100)
    for label, start, stop in (("second", 60, 90), ("first", 20, 60), ("all", 0, 100)):
        plan.request(start, stop, label)
    everything(plan)
    for start, nbytes in ((0, 20), (20, 30), (90, 10), (60, 30)):
        plan.on_received(start, nbytes)
    assert list(plan.pop_complete()) == ["second"]
    plan.on_received(50, 10)
    assert list(plan.pop_complete()) == ["first", "all"]


def test_received_bytes_complete_a_new_goal_at_once() -> None:
    plan: FetchPlan[str] = FetchPlan(10)
    plan.request(3, 3, "nothing")
    assert list(plan.pop_complete()) == ["nothing"]
    plan.request(0, 10, "all")
    everything(plan)
    plan.on_received(0, 10)
    plan.request(2, 8, "again")
    assert list(plan.pop_complete()) == ["all", "again"]
    assert plan.next_range(WINDOW) is None


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [(50, 1), (49, 2), (0, 51), (0, 0), (0, -1), (100, 1), (2**60, 1), (10, 5), (9, 2), (14, 2)],
)
def test_unrequested_and_repeated_bytes_are_refused(start: int, nbytes: int) -> None:
    plan: FetchPlan[str] = FetchPlan(100)
    plan.request(0, 50, "half")
    plan.request(60, 70, "more")
    assert plan.next_range(WINDOW) == (0, 50)
    plan.on_received(10, 5)
    with pytest.raises(WireError, match="arrived"):
        plan.on_received(start, nbytes)
    assert plan.received_nbytes == 5
    assert plan.pending_nbytes == 45


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 11), (11, 11)])
def test_a_request_lies_within_the_payload(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="of 10"):
        FetchPlan[str](10).request(start, stop, "x")


@given(
    seed=st.integers(0, 2**32),
    goals=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)), max_size=8),
)
def test_any_order_of_arrival(seed: int, goals: list[tuple[int, int]]) -> None:
    """Each label comes when the last byte of its span does: not before, and once."""
    rng = random.Random(seed)
    plan: FetchPlan[int] = FetchPlan(400)
    received, requested, labels = set[int](), list[tuple[int, int]](), list[int]()
    spans = [(start, start + length) for start, length in goals]
    left = list(enumerate(spans))
    while left or requested:
        if left and rng.random() < 0.4:
            number, (start, stop) = left.pop(0)
            plan.request(start, stop, number)
        while (span := plan.next_range(rng.choice([30, 400]))) is not None:
            requested += [(n, n + 1) for n in range(*span)]
        if requested:
            at = requested.pop(rng.randrange(len(requested)))
            plan.on_received(at[0], 1)
            received.add(at[0])
        labels += plan.pop_complete()
        planned = [n for n, _ in enumerate(spans) if n not in [m for m, _ in left]]
        full = {n for n in planned if set(range(*spans[n])) <= received}
        assert sorted(labels) == sorted(full)
        while (span := plan.next_range(400)) is not None:
            requested += [(n, n + 1) for n in range(*span)]
    assert sorted(labels) == list(range(len(spans)))


@given(added=SPANS, removed=SPANS, window=st.tuples(st.integers(0, 60), st.integers(0, 30)))
def test_integers_are_removed(
    added: list[tuple[int, int]], removed: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    spans, model = RangeSet(), set[int]()
    for start, length in added:
        spans.add(start, start + length)
        model |= set(range(start, start + length))
    for start, length in removed:
        spans.remove(start, start + length)
        model -= set(range(start, start + length))
    start, stop = window[0], sum(window)
    found = [n for first, last in spans.parts(start, stop) for n in range(first, last)]
    assert found == sorted(model & set(range(start, stop)))
    assert {n for first, last in spans.parts(0, ALL) for n in range(first, last)} == model


def test_bytes_are_fetched_again_before_others() -> None:
    plan: FetchPlan[str] = FetchPlan(100)
    plan.request(0, 60, "all")
    assert plan.next_range(40) is None  # less than a chunk
    assert plan.next_range(WINDOW) == (0, 60)
    plan.request(60, 100, "more")
    plan.on_received(0, 60)
    for span in ((10, 20), (40, 50)):
        plan.fetch_again(*span)
    assert list(plan.pop_complete()) == []
    assert (plan.received_nbytes, plan.parts(0, 100)) == (40, [(0, 10), (20, 40), (50, 60)])
    assert everything(plan) == [(10, 20), (40, 50), (60, 100)]
    with pytest.raises(WireError, match="twice"):
        plan.check(20, 5)
    plan.on_received(10, 10)
    assert not plan.has(0, 60)
    plan.on_received(40, 10)
    assert plan.has(0, 60)
    assert list(plan.pop_complete()) == ["all"]


def test_after_a_cancellation() -> None:
    """What was requested may arrive; nothing is complete, and nothing more is requested."""
    plan: FetchPlan[str] = FetchPlan(3 * CHUNK)
    plan.request(0, plan.nbytes, "all")
    assert plan.next_range(CHUNK) == (0, CHUNK)
    plan.cancel()
    assert plan.is_active
    plan.on_received(0, CHUNK)
    assert not plan.is_active
    assert list(plan.pop_complete()) == []
    assert plan.next_range(WINDOW) is None
