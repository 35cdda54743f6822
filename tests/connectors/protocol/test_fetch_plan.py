"""What to ask for, what came, what is complete; no socket anywhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_kvlink import WireError
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, WINDOW, FetchPlan, Spans

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(added=SPANS, asked=st.tuples(st.integers(0, 60), st.integers(0, 30)))
def test_spans_are_a_set_of_numbers(added: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    spans, model = Spans(), set[int]()
    for start, length in added:
        spans.add(start, start + length)
        model |= set(range(start, start + length))
    start, stop = asked[0], asked[0] + asked[1]
    missing = {n for a, b in spans.gaps(start, stop) for n in range(a, b)}
    assert missing == set(range(start, stop)) - model
    assert spans.covers(start, stop) == (not missing)
    pairs = list(zip(spans._spans, spans._spans[1:], strict=False))
    assert all(one[1] < other[0] for one, other in pairs), "they touch"


def everything(fetch: FetchPlan[str]) -> list[tuple[int, int]]:
    asked = []
    while (span := fetch.ask(WINDOW)) is not None:
        asked.append(span)
    return asked


def test_in_order_and_in_chunks() -> None:
    fetch: FetchPlan[str] = FetchPlan(2 * CHUNK + 5)
    fetch.request(0, fetch.nbytes, "all")
    assert everything(fetch) == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + 5)]
    assert fetch.unanswered == fetch.nbytes
    assert fetch.is_hungry
    for start, nbytes in ((0, CHUNK), (2 * CHUNK, 5), (CHUNK, CHUNK)):
        assert list(fetch.finished()) == []
        fetch.came(start, nbytes)
    assert list(fetch.finished()) == ["all"]
    assert list(fetch.finished()) == []
    assert (fetch.unanswered, fetch.nbytes_come) == (0, fetch.nbytes)
    assert not fetch.is_hungry


def test_no_more_than_there_is_room_for() -> None:
    fetch: FetchPlan[str] = FetchPlan(3 * CHUNK)
    fetch.request(0, fetch.nbytes, "all")
    assert fetch.ask(CHUNK - 1) is None, "a sliver"
    assert fetch.ask(CHUNK) == (0, CHUNK)


def test_what_was_wanted_before_is_not_asked_for_again() -> None:
    fetch: FetchPlan[str] = FetchPlan(100)
    fetch.request(0, 20, "head")
    fetch.request(10, 40, "layer")
    assert everything(fetch) == [(0, 20), (20, 40)]
    fetch.came(0, 20)
    assert list(fetch.finished()) == ["head"]
    fetch.request(0, 100, "all")
    fetch.came(20, 20)
    assert list(fetch.finished()) == ["layer"]
    assert everything(fetch) == [(40, 100)]
    fetch.came(40, 60)
    assert list(fetch.finished()) == ["all"]


def test_what_is_there_already_is_complete_at_once() -> None:
    fetch: FetchPlan[str] = FetchPlan(10)
    fetch.request(3, 3, "nothing")
    assert list(fetch.finished()) == ["nothing"]
    fetch.request(0, 10, "all")
    everything(fetch)
    fetch.came(0, 10)
    fetch.request(2, 8, "again")
    assert list(fetch.finished()) == ["all", "again"]
    assert fetch.ask(WINDOW) is None


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [(50, 1), (49, 2), (0, 51), (0, 0), (0, -1), (100, 1), (2**60, 1), (10, 5), (9, 2), (14, 2)],
)
def test_what_nobody_asked_for_or_came_already(start: int, nbytes: int) -> None:
    fetch: FetchPlan[str] = FetchPlan(100)
    fetch.request(0, 50, "half")
    fetch.request(60, 70, "more")
    assert fetch.ask(WINDOW) == (0, 50)
    fetch.came(10, 5)
    with pytest.raises(WireError, match="came"):
        fetch.came(start, nbytes)
    assert fetch.nbytes_come == 5
    assert fetch.unanswered == 45


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 11), (11, 11)])
def test_a_want_lies_within_the_payload(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="of 10"):
        FetchPlan[str](10).request(start, stop, "x")


@given(
    seed=st.integers(0, 2**32),
    goals=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 80)), max_size=8),
)
def test_any_order_of_arrival(seed: int, goals: list[tuple[int, int]]) -> None:
    """Each label comes when the last byte of its span does: not before, and once."""
    rng = random.Random(seed)
    fetch: FetchPlan[int] = FetchPlan(400)
    there, asked, told = set[int](), list[tuple[int, int]](), list[int]()
    spans = [(start, start + length) for start, length in goals]
    left = list(enumerate(spans))
    while left or asked:
        if left and rng.random() < 0.4:
            number, (start, stop) = left.pop(0)
            fetch.request(start, stop, number)
        while (span := fetch.ask(rng.choice([30, 400]))) is not None:
            asked += [(n, n + 1) for n in range(*span)]
        if asked:
            at = asked.pop(rng.randrange(len(asked)))
            fetch.came(at[0], 1)
            there.add(at[0])
        told += fetch.finished()
        get_state = [n for n, _ in enumerate(spans) if n not in [m for m, _ in left]]
        full = {n for n in get_state if set(range(*spans[n])) <= there}
        assert sorted(told) == sorted(full)
        while (span := fetch.ask(400)) is not None:
            asked += [(n, n + 1) for n in range(*span)]
    assert sorted(told) == list(range(len(spans)))
