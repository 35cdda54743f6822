"""The producer's state machine, driven by hand: a clock of our own, every message recorded."""

from __future__ import annotations

import pytest

from omni_kvlink import DuplicateKeyError, TransferFailed
from omni_kvlink.connectors import exchange as module
from omni_kvlink.connectors.exchange import TOMBSTONE_SECONDS, Exchange
from omni_kvlink.connectors.messages import Failed, Location, Message, Offer, Status
from omni_kvlink.connectors.transfer import State, Transfer

HERE = Location(0, 4096, 100)


class Bench:
    """An exchange, what it said to whom, and what it freed."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Message]] = []
        self.freed: list[Transfer] = []
        self.exchange = Exchange(self._send, self.freed.append)

    def _send(self, peer: object, message: Message) -> None:
        self.said.append((str(peer), message))

    def put(self, key: str, readers: int = 1, expires: float = 100.0) -> Transfer:
        transfer = self.exchange.reserve(key)
        self.exchange.commit(transfer, HERE, readers, expires)
        return transfer

    def want(self, peer: str, number: int, key: str, now: float = 0.0) -> None:
        self.exchange.want(peer, number, key, now)

    def release(
        self, peer: str, number: int, transfer: Transfer, outcome: str = "read", now: float = 0.0
    ) -> None:
        self.exchange.release(peer, number, transfer.epoch, outcome, "bad", now)  # type: ignore[arg-type]

    def heard(self) -> list[tuple[str, Message]]:
        said, self.said = self.said, []
        return said

    def offers(self) -> list[tuple[str, Message]]:
        return [said for said in self.heard() if isinstance(said[1], Offer)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def offer(number: int, transfer: Transfer) -> Offer:
    return Offer(number, transfer.epoch, HERE)


def test_want_before_commit(bench: Bench) -> None:
    bench.want("a", 1, "k")
    assert bench.heard() == []
    transfer = bench.exchange.reserve("k")
    assert bench.heard() == [("a", Status(1, "announced, the producer is still writing it"))]
    bench.exchange.commit(transfer, HERE, 1, 100.0)
    assert bench.heard() == [("a", offer(1, transfer))]
    assert transfer.state is State.LEASED
    bench.release("a", 1, transfer)
    assert transfer.state is State.RELEASED
    assert transfer.settled.is_set()
    assert bench.freed == [transfer]


def test_want_after_commit(bench: Bench) -> None:
    transfer = bench.put("k")
    assert transfer.state is State.COMMITTED
    bench.want("a", 1, "k")
    assert bench.heard() == [("a", offer(1, transfer))]


def test_want_while_it_is_written(bench: Bench) -> None:
    bench.exchange.reserve("k")
    bench.want("a", 1, "k")
    assert bench.heard() == [("a", Status(1, "announced, the producer is still writing it"))]


def test_offers_go_out_in_the_order_of_the_wants(bench: Bench) -> None:
    for number, peer in enumerate("cab"):
        bench.want(peer, number, "k")
    transfer = bench.put("k", readers=2)
    assert bench.offers() == [("c", offer(0, transfer)), ("a", offer(1, transfer))]
    assert bench.exchange.stats()["waiting"] == 1
    bench.want("d", 9, "k")
    ((_, status),) = bench.heard()
    assert isinstance(status, Status)
    assert "every declared reader" in status.phase


def test_every_reader_must_let_go(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.want("a", 1, "k")
    bench.want("b", 1, "k")
    bench.release("a", 1, transfer)
    assert not transfer.settled.is_set()
    assert bench.freed == []
    bench.release("b", 1, transfer)
    assert bench.freed == [transfer]


def test_released_with_a_reader_missing_waits_for_it(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.want("a", 1, "k")
    bench.release("a", 1, transfer)
    assert transfer.state is State.COMMITTED
    bench.want("b", 1, "k")
    bench.release("b", 1, transfer)
    assert transfer.state is State.RELEASED


def test_one_peer_may_read_twice(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.want("a", 1, "k")
    bench.want("a", 2, "k")
    bench.release("a", 1, transfer)
    bench.release("a", 1, transfer)  # said twice
    assert transfer.state is State.LEASED
    assert bench.exchange.stats()["stale"] == 1
    bench.release("a", 2, transfer)
    assert transfer.state is State.RELEASED


def test_stale_words_change_nothing(bench: Bench) -> None:
    first = bench.put("k")
    bench.want("a", 1, "k")
    bench.release("a", 1, first)
    second = bench.put("k")
    bench.want("b", 1, "k")
    for peer, number, transfer in (("a", 1, first), ("a", 1, second), ("b", 2, second)):
        for outcome in ("read", "unread", "rejected"):
            bench.release(peer, number, transfer, outcome)
    assert second.state is State.LEASED
    assert bench.freed == [first]
    assert bench.exchange.stats()["stale"] == 9


def test_epochs_never_come_twice(bench: Bench) -> None:
    epochs = []
    for _ in range(5):
        transfer = bench.put("k")
        epochs.append(transfer.epoch)
        bench.want("a", 1, "k")
        bench.release("a", 1, transfer)
    assert len(set(epochs)) == 5
    assert 0 not in epochs, "an empty slot's commit word is 0"


def test_lost_reader_is_replaced(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.want("a", 1, "k")
    bench.want("b", 1, "k")
    bench.heard()
    bench.exchange.lost("a")
    assert bench.heard() == [("b", offer(1, transfer))]
    assert bench.exchange.stats()["redelivered"] == 1
    bench.release("a", 1, transfer)  # its last words come late
    assert transfer.state is State.LEASED


def test_lost_reader_leaves_it_to_the_next(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.want("a", 1, "k")
    bench.want("a", 2, "other")
    bench.exchange.lost("a")
    assert transfer.state is State.COMMITTED
    assert bench.exchange.stats()["waiting"] == 0
    assert bench.exchange.tick(5.0) == 10.0
    bench.exchange.tick(10.0)
    assert transfer.state is State.EXPIRED
    assert bench.freed == [transfer]


def test_leaving_reader_keeps_what_it_holds(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.want("a", 1, "k")
    bench.want("a", 2, "other")
    bench.exchange.leave("a")
    assert transfer.state is State.LEASED
    assert bench.exchange.stats()["waiting"] == 0
    bench.release("a", 1, transfer)
    assert transfer.state is State.RELEASED


@pytest.mark.parametrize("end", ["released", "expired", "failed"])
def test_what_a_stranded_reader_sees_is_not_reused(bench: Bench, end: str) -> None:
    """It is delivered again and ends as it would; its memory waits for the reader's death."""
    transfer = bench.put("k", expires=10.0)
    bench.want("a", 1, "k")
    bench.heard()
    assert bench.exchange.strand("a")
    assert transfer.state is State.COMMITTED
    if end == "released":
        bench.want("b", 7, "k")
        assert bench.heard() == [("b", offer(7, transfer))]
        bench.release("b", 7, transfer)
    elif end == "expired":
        bench.exchange.tick(10.0)
    else:
        bench.exchange.fail("k", "no", "failed", 1.0)
    assert transfer.state.value == end
    assert transfer.settled.is_set()
    assert bench.freed == []
    bench.release("a", 1, transfer)  # too late to count
    assert bench.freed == []
    bench.exchange.lost("a")
    assert bench.freed == [transfer]
    bench.exchange.lost("a")
    assert bench.freed == [transfer]


def test_a_dead_stranger_does_not_free_what_is_on_its_way(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.want("a", 1, "k")
    bench.exchange.strand("a")
    bench.exchange.lost("a")
    assert bench.freed == []
    bench.want("b", 7, "k")
    bench.release("b", 7, transfer)
    assert bench.freed == [transfer]
    assert not bench.exchange.strand("b")


def test_unread_goes_to_the_next(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.want("a", 1, "k")
    bench.want("b", 7, "k")
    bench.heard()
    bench.release("a", 1, transfer, "unread")
    assert bench.heard() == [("b", offer(7, transfer))]


def test_unwant(bench: Bench) -> None:
    bench.want("a", 1, "k")
    bench.want("b", 1, "k")
    bench.exchange.unwant("a", 1)
    bench.exchange.unwant("a", 1)
    bench.exchange.unwant("c", 5)
    transfer = bench.put("k")
    assert bench.offers() == [("b", offer(1, transfer))]


def test_unwant_gives_back_what_was_offered(bench: Bench) -> None:
    """A reader that closes says no more than this: it never looks at the offer on its way."""
    bench.want("a", 1, "k")
    transfer = bench.put("k")
    bench.want("b", 7, "k")
    bench.heard()
    bench.exchange.unwant("a", 2)
    assert bench.heard() == []
    bench.exchange.unwant("a", 1)
    assert bench.heard() == [("b", offer(7, transfer))]
    bench.release("a", 1, transfer, "unread")  # the same once more, in the reader's own words
    assert bench.exchange.stats()["stale"] == 1
    assert not bench.exchange.strand("a")


def test_expiry(bench: Bench) -> None:
    bench.put("late", expires=20.0)
    transfer = bench.put("k", expires=10.0)
    assert bench.exchange.tick(9.9) == 10.0
    assert transfer.state is State.COMMITTED
    assert bench.exchange.tick(10.0) == 20.0
    assert transfer.state is State.EXPIRED
    bench.want("a", 1, "k", 11.0)
    ((_, failed),) = bench.heard()
    assert isinstance(failed, Failed)
    assert failed.ending == "expired"


def test_expiry_spares_who_reads(bench: Bench) -> None:
    transfer = bench.put("k", readers=2, expires=10.0)
    bench.want("a", 1, "k")
    bench.exchange.tick(10.0)
    assert transfer.state is State.EXPIRED
    assert bench.freed == [], "freed under a reader"
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]


def test_fully_leased_does_not_expire(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.want("a", 1, "k")
    assert bench.exchange.tick(99.0) == float("inf")
    assert transfer.state is State.LEASED
    bench.exchange.lost("a")
    bench.exchange.tick(99.0)
    assert transfer.state is State.EXPIRED


def test_tombstone_answers_until_it_is_old(bench: Bench) -> None:
    bench.want("a", 1, "k")
    bench.exchange.fail("k", "why", "failed", 0.0)
    assert bench.heard() == [("a", Failed(1, "why", "failed"))]
    bench.want("a", 2, "k", 1.0)
    assert bench.heard() == [("a", Failed(2, "why", "failed"))]
    bench.exchange.tick(TOMBSTONE_SECONDS)
    bench.want("a", 3, "k", TOMBSTONE_SECONDS)
    assert bench.heard() == []


def test_tombstone_ends_with_the_next_put(bench: Bench) -> None:
    bench.exchange.fail("k", "why", "failed", 0.0)
    bench.exchange.reserve("k")
    bench.want("a", 1, "k", 1.0)
    assert bench.heard() == [("a", Status(1, "announced, the producer is still writing it"))]


def test_tombstones_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    for number in range(5):
        bench.exchange.fail(f"k{number}", "why", "failed", float(number))
    for number in range(5):
        bench.want("a", number, f"k{number}", 5.0)
    assert [said.want for _, said in bench.heard() if isinstance(said, Failed)] == [2, 3, 4]


def test_wants_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WANTS", 3)
    for number in range(5):
        bench.want("a", number, "same")
    assert [type(said) for _, said in bench.heard()] == [Failed, Failed]
    for number in range(5):
        bench.want("b", number, f"k{number}")
    assert [type(said) for _, said in bench.heard()] == [Failed, Failed, Failed]


def test_long_reasons_are_cut(bench: Bench) -> None:
    bench.exchange.fail("k", "x" * 10_000, "failed", 0.0)
    bench.want("a", 1, "k", 0.0)
    ((_, failed),) = bench.heard()
    assert isinstance(failed, Failed)
    assert len(failed.reason) == 4096


def test_fail_while_leased(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.want("a", 1, "k")
    bench.exchange.fail("k", "why", "failed", 0.0)
    assert transfer.settled.is_set()
    assert bench.freed == []
    again = bench.put("k")
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]
    assert again.state is State.COMMITTED


def test_late_rejection_spares_the_next_payload_of_the_key(bench: Bench) -> None:
    first = bench.put("k")
    bench.want("a", 1, "k")
    bench.exchange.fail("k", "why", "failed", 0.0)
    second = bench.put("k")
    bench.release("a", 1, first, "rejected")
    assert second.state is State.COMMITTED
    assert bench.exchange.stats()["failed"] == 1, "counted twice"
    bench.heard()
    bench.want("b", 1, "k", 1.0)
    assert bench.heard() == [("b", offer(1, second))]
    assert bench.freed == [first]


def test_rejection_fails_it_for_all(bench: Bench) -> None:
    transfer = bench.put("k", readers=3)
    for peer in "ab":
        bench.want(peer, 1, "k")
    bench.heard()
    bench.release("a", 1, transfer, "rejected")
    assert transfer.state is State.FAILED
    assert transfer.reason == "a reader rejected it: bad"
    bench.want("c", 1, "k", 1.0)
    ((_, failed),) = bench.heard()
    assert isinstance(failed, Failed)
    assert bench.freed == []
    bench.release("b", 1, transfer)
    assert bench.freed == [transfer]


def test_abort_while_it_is_written(bench: Bench) -> None:
    """The writer still owns the memory; its commit is refused, its discard frees."""
    transfer = bench.exchange.reserve("k")
    bench.exchange.fail("k", "the user left", "aborted", 0.0)
    assert bench.freed == []
    successor = bench.exchange.reserve("k")
    with pytest.raises(TransferFailed, match="the user left"):
        bench.exchange.commit(transfer, HERE, 1, 10.0)
    bench.exchange.discard(transfer)
    assert bench.freed == [transfer]
    bench.exchange.commit(successor, HERE, 1, 10.0)
    assert successor.state is State.COMMITTED


def test_discarded_reservation(bench: Bench) -> None:
    bench.want("a", 1, "k")
    transfer = bench.exchange.reserve("k")
    bench.exchange.discard(transfer)
    bench.heard()
    again = bench.put("k")
    assert bench.heard()[-1] == ("a", offer(1, again))


@pytest.mark.parametrize("state", ["reserved", "committed", "leased"])
def test_duplicate_key(bench: Bench, state: str) -> None:
    if state == "reserved":
        bench.exchange.reserve("k")
    else:
        bench.put("k")
    if state == "leased":
        bench.want("a", 1, "k")
    with pytest.raises(DuplicateKeyError, match=f"'k'.*{state}"):
        bench.exchange.reserve("k")


def test_close_answers_everyone(bench: Bench) -> None:
    committed, leased = bench.put("c"), bench.put("l")
    reserved = bench.exchange.reserve("r")
    bench.want("a", 1, "l")
    bench.want("a", 2, "w")
    bench.want("b", 3, "r")
    bench.heard()
    bench.exchange.close("good-bye")
    said = sorted(bench.heard(), key=repr)
    assert said == [("a", Failed(2, "good-bye", "closed")), ("b", Failed(3, "good-bye", "closed"))]
    for transfer in (committed, leased, reserved):
        assert transfer.state is State.FAILED
        assert transfer.settled.is_set()
    assert bench.freed == [committed]
    bench.exchange.lost("a")
    bench.exchange.discard(reserved)
    assert bench.freed == [committed, leased, reserved]
    assert bench.exchange.stats()["live"] == 0
