"""Kept payloads in the producer's state machine, driven by hand: see `Bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import DuplicateKeyError
from omni_kvlink.connectors.protocol.kept_table import OTHER_IDENTITY
from omni_kvlink.connectors.protocol.messages import (
    Committed,
    Failed,
    Offer,
    Status,
)
from omni_kvlink.connectors.protocol.phases import MISSING
from omni_kvlink.connectors.protocol.transfer import Transfer, TransferState
from omni_kvlink.kept import CacheIdentity
from support.connectors.transfer_tables import HERE, Bench, offer, state_of
from support.processes.line_counts import count_lines

if TYPE_CHECKING:
    from collections.abc import Callable

# Reaches into _kept, _idle, _names, _tombstones, _expiries: what a table remembers is bounded.


@pytest.fixture
def bench() -> Bench:
    return Bench()


# The states


def test_any_number_of_readers_at_once_and_one_after_the_other(bench: Bench) -> None:
    kept = bench.keep("k")
    for number in range(3):
        for peer in "ab":
            bench.request(peer, number, "k")
        assert bench.offers() == [("a", offer(number, kept)), ("b", offer(number, kept))]
        assert state_of(kept) == "leased"
        bench.release("a", number, kept)
        assert state_of(kept) == "leased"
        bench.release("b", number, kept)
        assert state_of(kept) == "committed"
    assert bench.transfers.stats()["kept"] == 1
    assert bench.freed == []
    assert bench.transfers.kept.withdraw("k")
    bench.check_empty()


def test_gets_that_waited_are_all_offered_it(bench: Bench) -> None:
    for number in range(5):
        bench.request("a", number, "k")
    kept = bench.keep("k")
    assert bench.offers() == [("a", offer(number, kept)) for number in range(5)]


@pytest.mark.parametrize("is_leased", [False, True], ids=["committed", "leased"])
def test_a_withdrawn_payload_is_its_readers_until_they_release_it(
    bench: Bench, is_leased: bool
) -> None:
    kept = bench.keep("k")
    if is_leased:
        bench.request("a", 1, "k")
    assert bench.transfers.kept.withdraw("k")
    assert state_of(kept) == "withdrawn"
    assert bench.freed == [kept] * (not is_leased)
    assert not bench.transfers.kept.withdraw("k")
    bench.sent_messages()
    bench.request("b", 1, "k")
    why = "it was kept, and its producer withdrew it"
    assert bench.sent_messages() == [("b", Status(1, why))]
    if is_leased:
        bench.release("a", 1, kept)
    assert bench.freed == [kept]
    assert bench.transfers.stats()["withdrawn"] == 1
    again = bench.keep("k")
    assert bench.offers() == [("b", offer(1, again))]
    bench.release("b", 1, again)
    assert bench.transfers.kept.withdraw("k")
    bench.check_empty()


def test_a_get_that_waits_is_told_that_the_payload_was_evicted(bench: Bench) -> None:
    kept = bench.keep("k", expires=5.0)
    bench.request("a", 1, "k", now=5.0)  # it is not offered at this time
    bench.sent_messages()
    assert bench.transfers.kept.evict()
    [(_, status)] = bench.sent_messages()
    assert isinstance(status, Status)
    assert "evicted because memory was wanted" in status.phase
    assert state_of(kept) == "evicted"
    assert kept.reason == status.phase
    bench.transfers.cancel_gets("a")
    bench.check_empty()


@pytest.mark.parametrize("how", ["unread", "cancel", "lost"])
def test_a_reader_that_leaves_it_unread_changes_nothing(bench: Bench, how: str) -> None:
    kept = bench.keep("k")
    bench.request("a", 1, "k")
    if how == "unread":
        bench.release("a", 1, kept, "unread")
    elif how == "cancel":
        bench.transfers.on_cancel("a", 1)
    else:
        bench.transfers.on_peer_lost("a")
    assert state_of(kept) == "committed"
    assert (kept.unclaimed, kept.lost_readers) == (1, 1)
    assert bench.evicted() == ["k"]
    bench.check_empty()


def test_a_reader_that_rejects_it_fails_it_for_all(bench: Bench) -> None:
    kept = bench.keep("k")
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.release("a", 1, kept, "rejected")
    assert state_of(kept) == "failed"
    assert not bench.transfers.kept.withdraw("k")
    assert bench.contains("k") == (False,)
    assert bench.freed == []
    bench.release("b", 1, kept)
    assert bench.freed == [kept]
    bench.check_empty()


@pytest.mark.parametrize("how", ["fail", "abort", "close"])
def test_it_ends_as_any_payload_does(bench: Bench, how: str) -> None:
    kept = bench.keep("k")
    if how == "fail":
        bench.transfers.fail("k", "broken", "failed", 0.0)
    elif how == "abort":
        bench.transfers.on_abort("k", "no longer wanted", 0.0)
    else:
        bench.transfers.close("the link was closed")
    assert state_of(kept) == "failed"
    bench.check_empty()


def test_a_ttl_ends_it_also_while_it_is_read(bench: Bench) -> None:
    kept, endless = bench.keep("k", expires=5.0), bench.keep("e")
    bench.request("a", 1, "k", now=4.9)
    assert bench.contains("k", "e", now=4.9) == (True, True)
    assert bench.contains("k", "e", now=5.0) == (False, True)
    assert bench.transfers.tick(5.0) == float("inf")
    assert state_of(kept) == "expired"
    assert bench.freed == []
    bench.release("a", 1, kept)
    assert bench.freed == [kept]
    bench.transfers.tick(1e12)
    assert state_of(endless) == "committed"


@pytest.mark.parametrize("is_leased", [False, True])
def test_its_key_is_taken(bench: Bench, is_leased: bool) -> None:
    bench.keep("k")
    if is_leased:
        bench.request("a", 1, "k")
    with pytest.raises(DuplicateKeyError, match=r"that is \w+ and kept; withdraw it"):
        bench.reserve("k")
    with pytest.raises(DuplicateKeyError, match="and kept; withdraw it"):
        bench.keep("k", is_reserved=False)
    assert bench.transfers.stats()["kept"] == 1


def test_only_what_is_kept_and_committed_is_withdrawn(bench: Bench) -> None:
    bench.put("counted")
    reserved = bench.reserve("reserved")
    streaming = bench.reserve("streaming")
    bench.transfers.layers.begin(streaming, HERE, 7, None)
    for key in ("counted", "reserved", "streaming", "unknown"):
        assert not bench.transfers.kept.withdraw(key)
    assert not bench.transfers.kept.evict()
    bench.commit_kept(reserved)
    bench.commit_kept(streaming)
    assert bench.transfers.kept.withdraw("reserved")
    assert bench.transfers.kept.withdraw("streaming")


def test_a_stream_that_is_kept_has_readers_before_and_after_its_commit(bench: Bench) -> None:
    stream = bench.reserve("k")
    bench.transfers.layers.begin(stream, HERE, 7, None)
    bench.request("a", 1, "k", streamed=True)
    bench.request("b", 1, "k", streamed=True)
    bench.request("c", 1, "k")
    bench.transfers.layers.announce(stream, 0, (b"",))
    assert bench.contains("k") == (False,)
    bench.sent_messages()
    bench.release("b", 1, stream)  # before the commit: it has what it wanted
    bench.commit_kept(stream)
    assert bench.sent_messages() == [("a", Committed(1)), ("c", offer(1, stream))]
    assert bench.contains("k") == (True,)
    bench.request("d", 1, "k", streamed=True)
    assert bench.offers() == [("d", offer(1, stream))]
    assert not bench.transfers.kept.evict()
    for peer in "acd":
        bench.release(peer, 1, stream)
    assert state_of(stream) == "committed"
    assert bench.evicted() == ["k"]
    bench.check_empty()


def test_a_stream_without_readers_is_kept_at_its_commit(bench: Bench) -> None:
    stream = bench.reserve("k")
    bench.transfers.layers.begin(stream, HERE, 7, None)
    bench.commit_kept(stream)
    assert state_of(stream) == "committed"
    assert bench.evicted() == ["k"]


def test_a_kept_stream_that_is_given_up_is_not_kept(bench: Bench) -> None:
    stream = bench.reserve("k")
    bench.transfers.layers.begin(stream, HERE, 7, None)
    bench.request("a", 1, "k", streamed=True)
    bench.transfers.abort(stream, "the model failed")
    assert state_of(stream) == "failed"
    bench.release("a", 1, stream, "unread")
    bench.check_empty()


# Which is evicted


def test_the_first_that_was_put_is_evicted_first(bench: Bench) -> None:
    for key in "abcd":
        bench.keep(key)
    assert bench.evicted() == [*"abcd"]
    assert bench.transfers.stats()["evicted"] == 4
    bench.check_empty()


def test_to_be_asked_for_is_to_be_used(bench: Bench) -> None:
    for key in "abcd":
        bench.keep(key)
    assert bench.contains("b", "x", "a") == (True, False, True)
    assert bench.evicted() == [*"cdba"]


def test_to_be_released_is_to_be_used(bench: Bench) -> None:
    kept = {key: bench.keep(key) for key in "abcd"}
    for number, key in enumerate("acb"):
        bench.request("a", number, key)
    for number, key in ((1, "c"), (0, "a"), (2, "b")):
        bench.release("a", number, kept[key])
    assert bench.evicted() == [*"dcab"]


def test_none_that_is_used_is_evicted(bench: Bench) -> None:
    """By a reader, by one of two, by a disconnected one, by a view, or by what is sent."""
    kept = {key: bench.keep(key) for key in "abcde"}
    bench.request("r", 1, "a")
    bench.request("s", 1, "a")
    bench.release("s", 1, kept["a"])
    bench.request("t", 1, "b")
    assert bench.transfers.on_disconnect("t")
    view = object()
    bench.transfers.lend(kept["c"], view)
    assert bench.evicted() == ["d", "e"]
    assert bench.contains(*"abc") == (True, True, True)
    bench.idle = 0
    bench.release("r", 1, kept["a"])
    assert bench.idle == 1
    assert bench.evicted() == ["a"]
    bench.transfers.on_view_freed(kept["c"], view)
    assert bench.idle == 2
    assert bench.evicted() == ["c"]
    bench.release("t", 1, kept["b"])
    assert bench.idle == 3
    assert bench.evicted() == ["b"]
    bench.check_empty()


def test_the_end_of_a_disconnected_reader_makes_its_payload_idle(bench: Bench) -> None:
    kept = bench.keep("k")
    bench.request("a", 1, "k")
    assert bench.transfers.on_disconnect("a")
    assert state_of(kept) == "committed"
    bench.request("b", 1, "k")
    assert len(bench.offers()) == 2
    bench.release("b", 1, kept)
    assert not bench.transfers.kept.evict()
    bench.idle = 0
    bench.transfers.on_peer_lost("other")
    assert not bench.idle
    bench.transfers.on_peer_lost("a")
    assert bench.idle
    assert bench.evicted() == ["k"]
    bench.check_empty()


def test_a_withdrawn_payload_of_a_disconnected_reader_is_freed_at_its_end(bench: Bench) -> None:
    kept = bench.keep("k")
    bench.request("a", 1, "k")
    bench.transfers.on_disconnect("a")
    assert bench.transfers.kept.withdraw("k")
    assert bench.freed == []
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [kept]
    bench.check_empty()


def test_a_view_outlives_what_was_withdrawn(bench: Bench) -> None:
    kept, view = bench.keep("k"), object()
    bench.transfers.lend(kept, view)
    assert bench.transfers.kept.withdraw("k")
    assert bench.freed == []
    bench.transfers.on_view_freed(kept, view)
    assert bench.freed == [kept]
    bench.check_empty()


def test_each_payload_that_is_kept_tells_that_it_is_idle(bench: Bench) -> None:
    bench.keep("k")
    assert bench.idle == 1
    bench.request("a", 1, "k")
    assert bench.idle == 1


# Those that do not wait


def test_a_get_that_does_not_wait_is_answered_at_once(bench: Bench) -> None:
    """In each state of its key: unknown, reserved, streaming, taken, ended."""

    def check_missing(why: str) -> None:
        bench.sent_messages()
        bench.request("a", 9, "k", waits=False)
        [(peer, answer)] = bench.sent_messages()
        assert (peer, type(answer)) == ("a", Failed)
        assert isinstance(answer, Failed)
        assert answer.ending == "missing"
        assert why in answer.reason
        assert not bench.transfers.stats()["waiting"]

    check_missing(MISSING)
    writing = bench.reserve("k")
    check_missing("still writing it")
    bench.transfers.layers.begin(writing, HERE, 7, None)
    check_missing("still writing it")
    bench.request("a", 9, "k", waits=False, streamed=True)
    [(_, offered)] = bench.sent_messages()
    assert isinstance(offered, Offer)
    bench.transfers.on_cancel("a", 9)
    bench.commit_kept(writing)
    bench.request("a", 9, "k", waits=False)
    assert bench.offers() == [("a", offer(9, writing))]
    bench.release("a", 9, writing)
    bench.transfers.kept.withdraw("k")
    check_missing("withdrew it")
    bench.keep("k")
    bench.transfers.kept.evict()
    check_missing("memory was wanted")
    counted = bench.put("k")
    bench.request("b", 1, "k", waits=False)
    assert bench.offers() == [("b", offer(1, counted))]
    check_missing("every declared reader has it")
    bench.release("b", 1, counted)
    check_missing("was delivered to every declared reader")
    bench.keep("k", expires=5.0)
    bench.sent_messages()
    bench.request("a", 9, "k", now=5.0, waits=False)
    [(_, late)] = bench.sent_messages()
    assert isinstance(late, Failed)
    assert late.ending == "missing"
    bench.transfers.tick(5.0)
    bench.request("a", 9, "k", now=5.0, waits=False)
    [(_, expired)] = bench.sent_messages()
    assert isinstance(expired, Failed)
    assert expired.ending == "expired"
    assert bench.transfers.stats()["missed"] == 8
    bench.check_empty()


def test_a_miss_of_another_identity_is_counted_until_the_last_of_its_name_has_ended(
    bench: Bench,
) -> None:
    one, two, other = (CacheIdentity(name).key("block") for name in ("one", "two", "other"))
    bench.keep(one)
    bench.keep(two)
    bench.keep("plain")

    def check_missing() -> tuple[str, int]:
        before = bench.transfers.stats()["other_identity"]
        bench.sent_messages()
        bench.request("a", 1, other, waits=False)
        [(_, failed)] = bench.sent_messages()
        assert isinstance(failed, Failed)
        assert bench.contains(other) == (False,)
        return failed.reason, bench.transfers.stats()["other_identity"] - before

    assert check_missing() == (OTHER_IDENTITY, 2)
    bench.transfers.kept.withdraw(one)
    assert check_missing() == (OTHER_IDENTITY, 2)
    assert bench.contains(CacheIdentity("one").key("another block"), "plai") == (False, False)
    bench.transfers.kept.evict()
    assert check_missing() == (MISSING, 0)


def test_what_is_remembered_of_them_is_bounded(bench: Bench) -> None:
    """A table that has kept many has no more than that which is kept now."""
    keys = [CacheIdentity("m").key(str(number)) for number in range(6000)]
    kept = bench.transfers.kept
    for number, key in enumerate(keys):
        bench.keep(key, expires=1e9)
        if number >= 10:
            assert kept.withdraw(key) if number % 2 else kept.evict()
    sizes = len(kept), len(kept._kept), len(kept._idle), len(kept._names)
    assert sizes == (10, 10, 10, 10)
    assert len(bench.transfers._tombstones.delivered) <= 4096
    assert len(bench.transfers._expiries) < 200


# What grows with their number


def steps_among(count: int) -> dict[str, int]:
    """The lines that each call runs while `count` payloads are kept."""
    bench = Bench()
    keys = [f"k{number}" for number in range(count)]
    kept = [bench.keep(key) for key in keys]
    middle, last = count // 2, keys[-8:]
    new = bench.make("new")

    def get() -> None:
        bench.request("a", 1, keys[middle])
        bench.release("a", 1, kept[middle])

    calls: dict[str, Callable[[], object]] = {
        "put": lambda: bench.commit_kept(new),
        "get": get,
        "miss": lambda: bench.request("a", 2, "none", waits=False),
        "contains": lambda: bench.contains(*last),
        "stats": bench.transfers.stats,
        "tick": lambda: bench.transfers.tick(1.0),
        "withdraw": lambda: bench.transfers.kept.withdraw("new"),
        "disconnect": lambda: bench.transfers.on_disconnect("a"),
        "lost": lambda: bench.transfers.on_peer_lost("a"),
        "evict": bench.transfers.kept.evict,
    }
    return {name: count_lines(call) for name, call in calls.items()}


def test_no_call_takes_more_steps_where_more_is_kept() -> None:
    assert steps_among(2000) == steps_among(20)


def all_read(bench: Bench, count: int) -> list[Transfer]:
    """Keep payloads that a reader has, each."""
    kept = [bench.keep(f"k{number}") for number in range(count)]
    for number in range(count):
        bench.request("a", number, f"k{number}")
    return kept


def test_a_put_that_finds_all_in_use_does_not_look_at_all() -> None:
    """It would hold the lock of every reader meanwhile, and once more for each wake."""
    steps = list[int]()
    for count in (300, 3000):
        bench = Bench()
        all_read(bench, count)
        steps.append(count_lines(bench.transfers.kept.evict))
        assert bench.transfers.stats()["kept"] == count
    assert steps[0] == steps[1]


def test_what_an_interrupt_has_lost_is_evicted_in_the_end() -> None:
    bench = Bench()
    kept = all_read(bench, 300)
    bench.transfers.kept.lease(kept[250])
    kept[250].leases, kept[250].state = frozenset(), TransferState.COMMITTED
    assert [bench.transfers.kept.evict() for _ in range(4)] == [False, False, False, True]
    assert state_of(kept[250]) == "evicted"
