"""Calls of kept payloads, in the producer's state machine, that end at any of their lines.

The loop's thread has no signal handlers: what it does for its peers is not interrupted, but by
another error; so a `get` is not among them.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import pytest

from omni_kvlink.connectors.protocol import kept_table, transfer, transfer_table
from support.connectors.transfer_tables import Bench, offer, state_of
from support.processes.line_interrupts import interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.messages import Outcome

# Reaches into _live: the transfer of a key.

TRACED = kept_table.__file__, transfer.__file__, transfer_table.__file__


def run_interrupted(prepare: Callable[[Bench], Callable[[], object]]) -> list[Bench]:
    """Interrupt a call at each of its lines; return the bench of each time."""
    benches = []
    for number in itertools.count():
        bench = Bench()
        call = prepare(bench)
        was_interrupted = interrupted(number, call, [], traced=TRACED)
        benches.append(bench)
        if not was_interrupted:
            return benches
    raise AssertionError


def check_usable(bench: Bench, key: str = "k") -> None:
    """A payload can be got, released and withdrawn or evicted, and nothing is left."""
    kept = bench.transfers._live[key]
    bench.sent_messages()
    bench.request("z", 99, key, waits=False)
    assert bench.offers() == [("z", offer(99, kept))]
    assert not bench.transfers.kept.evict()
    bench.release("z", 99, kept)
    assert state_of(kept) == "committed"
    if len(bench.freed) % 2:
        assert bench.transfers.kept.withdraw(key)
    else:
        assert bench.evicted() == [key]
    bench.check_empty()


@pytest.mark.parametrize("is_reserved", [False, True])
@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_commit_interrupted_at_each_line(is_reserved: bool, is_awaited: bool) -> None:
    def prepare(bench: Bench) -> Callable[[], object]:
        if is_awaited:
            bench.request("a", 1, "k")
        kept = bench.make("k")
        if is_reserved:
            bench.transfers.reserve([kept])
        return partial(bench.commit_kept, kept)

    benches = run_interrupted(prepare)
    assert len(benches) > 15
    committed = 0
    for bench in benches:
        [kept] = bench.made
        bench.transfers.abort(kept)  # as its owner does
        if is_awaited:
            bench.transfers.on_cancel("a", 1)
        if kept.is_committed:
            committed += 1
            check_usable(bench)
        else:
            bench.check_empty()
            bench.keep("k")
            check_usable(bench)
    assert committed > 5


@pytest.mark.parametrize("outcome", ["read", "unread"])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_release_interrupted_at_each_line(outcome: Outcome, is_repeated: bool) -> None:
    def prepare(bench: Bench) -> Callable[[], object]:
        kept = bench.keep("k")
        bench.request("a", 1, "k")
        return partial(bench.release, "a", 1, kept, outcome)

    benches = run_interrupted(prepare)
    assert len(benches) > 10
    for bench in benches:
        if is_repeated:
            bench.release("a", 1, bench.made[0], outcome)
        bench.transfers.on_peer_lost("a")
        check_usable(bench)


@pytest.mark.parametrize("is_leased", [False, True])
def test_a_withdrawal_interrupted_at_each_line(is_leased: bool) -> None:
    """The payload is kept still, or it has ended, and its key can be kept again."""

    def prepare(bench: Bench) -> Callable[[], object]:
        kept = bench.keep("k")
        bench.request("b", 1, "other")
        if is_leased:
            bench.request("a", 1, "k")
        return partial(bench.transfers.kept.withdraw, kept.key)

    benches, states = run_interrupted(prepare), set[str]()
    assert len(benches) > 15
    for bench in benches:
        [kept] = bench.made
        states.add(state_of(kept))
        if is_leased:
            assert bench.taken == 1
            bench.release("a", 1, kept)
        bench.transfers.cancel_gets("b")
        if kept.is_done:
            assert bench.transfers.stats()["withdrawn"] == 1
            bench.check_empty()
            bench.keep("k")
        check_usable(bench)
    assert states == {"leased" if is_leased else "committed", "withdrawn"}


def test_an_eviction_interrupted_at_each_line() -> None:
    """The payload is kept still, or it has ended, and its key can be kept again."""

    def prepare(bench: Bench) -> Callable[[], object]:
        bench.keep("k")
        return bench.transfers.kept.evict

    benches, states = run_interrupted(prepare), set[str]()
    assert len(benches) > 15
    for bench in benches:
        [kept] = bench.made
        states.add(state_of(kept))
        if kept.is_done:
            assert bench.transfers.stats()["evicted"] == 1
            bench.check_empty()
            bench.keep("k")
        check_usable(bench)
    assert states == {"committed", "evicted"}
