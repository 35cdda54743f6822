"""How transfers end in the producer's state machine, driven by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import DuplicateKeyError, TransferFailed
from omni_kvlink.connectors.protocol import tombstones, waiting_gets
from omni_kvlink.connectors.protocol.expiries import MAX_EXPIRED
from omni_kvlink.connectors.protocol.messages import Failed, Get, Status
from omni_kvlink.connectors.protocol.tombstones import TOMBSTONE_SECONDS
from support.connectors.transfer_tables import HERE, Bench, offer, state_of

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Transfer

# Reaches into _expiries, _key_chars, _keys, _leases, _waiting: what a table keeps of transfers that
# have ended costs memory, and shows nowhere.


def remember_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_TOMBSTONES", 3)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_keys_of_one_peer_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_gets, "MAX_KEY_CHARS", 10)
    bench.request("a", 1, "12345678")
    bench.request("a", 2, "abc")
    bench.request("b", 2, "abc")
    reason = "the keys that this reader waits for exceed 10 characters"
    assert bench.sent_messages() == [("a", Failed(2, reason, "failed"))]
    assert bench.transfers.stats()["refused"] == 1
    bench.transfers.on_cancel("a", 1)
    bench.request("a", 3, "abcdefghij")  # the characters are counted back
    bench.request("a", 3, "")
    assert bench.sent_messages() == [
        ("a", Failed(3, "get 3 waits already, or has a payload", "failed"))
    ]
    bench.transfers.fail("abcdefghij", "x", "failed", 0.0)
    bench.transfers.cancel_gets("b")
    assert not bench.transfers._waiting._keys
    assert not bench.transfers._waiting._key_chars
    bench.sent_messages()
    bench.request("a", 4, "1234567890")
    assert bench.sent_messages() == []


def test_a_cancel_looks_at_no_other_peer(bench: Bench) -> None:
    """Its cost does not grow with what others wait for, or have."""

    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            type(self).compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    for number in range(300):
        peer = Counted(f"peer {number}")
        bench.transfers.on_get(peer, Get(1, f"k{number}"), 0.0)
        bench.put(f"own {number}")
        bench.transfers.on_get(peer, Get(2, f"own {number}"), 0.0)
    Counted.compared = 0
    for number in range(300):
        bench.transfers.on_cancel(Counted(f"peer {number}"), 1)
        bench.transfers.on_peer_lost(Counted(f"peer {number}"))
    assert Counted.compared < 300 * 20
    assert not bench.transfers._leases


def test_many_expire_in_steps(bench: Bench) -> None:
    """A producer's other threads get its lock in between."""
    transfers = [bench.put(f"k{n}", expires=10.0) for n in range(3 * MAX_EXPIRED + 1)]
    bench.put("later", expires=20.0)
    for step in range(1, 4):
        assert bench.transfers.tick(10.0) == 10.0
        assert len(bench.freed) == step * MAX_EXPIRED
    assert bench.transfers.tick(10.0) == 20.0
    assert bench.freed == transfers


def test_what_ended_before_its_time_is_not_kept_until_then(bench: Bench) -> None:
    bench.put("first", expires=5.0)
    for number in range(1000):
        transfer = bench.put("k", expires=1e9)
        bench.request("a", number, "k")
        bench.release("a", number, transfer)
    assert len(bench.transfers._expiries) < 2 * MAX_EXPIRED
    assert bench.transfers.tick(1.0) == 5.0


def test_a_lease_that_ends_unread_after_the_time_expires(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    assert bench.transfers.tick(10.0) == float("inf")
    for number in (1, 2):  # again and again, it is scheduled once
        bench.release("a", number, transfer, "unread")
        bench.request("a", number + 1, "k")
    bench.release("a", 3, transfer, "unread", now=11.0)
    assert len(bench.transfers._expiries) == 1
    bench.transfers.tick(11.0)
    assert state_of(transfer) == "expired"


def test_readers_that_come_and_go_keep_no_payload(bench: Bench) -> None:
    """Two connections take turns: one waits while the other one is lost."""
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k", 9.0)
    bench.transfers.tick(10.0)
    bench.request("b", 1, "k", 11.0)
    bench.transfers.on_peer_lost("a")
    assert not transfer.leases
    bench.transfers.tick(12.0)
    assert state_of(transfer) == "expired"
    assert bench.freed == [transfer]


def test_expiry(bench: Bench) -> None:
    bench.put("late", expires=20.0)
    transfer = bench.put("k", expires=10.0)
    assert bench.transfers.tick(9.9) == 10.0
    assert transfer.state.value == "committed"
    assert bench.transfers.tick(10.0) == 20.0
    assert transfer.state.value == "expired"
    bench.request("a", 1, "k", 11.0)
    ((_, failed),) = bench.sent_messages()
    assert isinstance(failed, Failed)
    assert failed.ending == "expired"


def test_expiry_does_not_free_what_is_read(bench: Bench) -> None:
    transfer = bench.put("k", readers=2, expires=10.0)
    bench.request("a", 1, "k")
    bench.transfers.tick(10.0)
    assert transfer.state.value == "expired"
    assert bench.freed == [], "freed under a reader"
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]


def test_fully_leased_does_not_expire(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    assert bench.transfers.tick(99.0) == float("inf")
    assert transfer.state.value == "leased"
    bench.transfers.on_peer_lost("a")
    bench.transfers.tick(99.0)
    assert transfer.state.value == "expired"


def test_tombstone_answers_until_it_expires(bench: Bench) -> None:
    bench.request("a", 1, "k")
    bench.transfers.fail("k", "why", "failed", 0.0)
    assert bench.sent_messages() == [("a", Failed(1, "why", "failed"))]
    bench.transfers.tick(1.0)
    bench.request("a", 2, "k", 1.0)
    assert bench.sent_messages() == [("a", Failed(2, "why", "failed"))]
    bench.transfers.tick(TOMBSTONE_SECONDS)
    bench.request("a", 3, "k", TOMBSTONE_SECONDS)
    assert bench.sent_messages() == []


def test_tombstone_ends_with_the_next_put(bench: Bench) -> None:
    bench.transfers.fail("k", "why", "failed", 0.0)
    bench.reserve("k")
    bench.request("a", 1, "k", 1.0)
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it"))
    ]


def test_tombstones_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_three(monkeypatch)
    for number in range(5):
        bench.transfers.fail(f"k{number}", "why", "failed", float(number))
    for number in range(5):
        bench.request("a", number, f"k{number}", 5.0)
    assert [
        message.get_id for _, message in bench.sent_messages() if isinstance(message, Failed)
    ] == [2, 3, 4]


def phase_of(bench: Bench, peer: str, number: int) -> str:
    """What the get was told last; each message since the last call is for it."""
    *_, (to, status) = bench.sent_messages()
    assert isinstance(status, Status)
    assert (to, status.get_id) == (peer, number)
    return status.phase


def test_a_get_of_a_released_key_is_told_so_and_gets_the_next_put(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.request("b", 2, "k")
    assert "every declared reader has it" in phase_of(bench, "b", 2)
    bench.release("a", 1, transfer)
    assert transfer.state.value == "released"
    assert "delivered to every declared reader" in phase_of(bench, "b", 2)
    bench.request("a", 3, "k")
    assert "delivered to every declared reader" in phase_of(bench, "a", 3)
    again = bench.put("k", readers=2)
    assert bench.offers() == [("b", offer(2, again)), ("a", offer(3, again))]


def test_a_key_that_is_put_again_is_not_taken_for_released(bench: Bench) -> None:
    bench.release("a", 1, read_by(bench, "a", 1))
    bench.transfers.abort(bench.reserve("k"))  # given up: it is as never put
    bench.request("a", 2, "k")
    assert bench.sent_messages() == []


def test_released_keys_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_three(monkeypatch)
    for number in range(5):
        bench.release("a", number, read_by(bench, "a", number, f"k{number}"))
    for number in range(5):
        bench.request("b", number, f"k{number}")
    statuses = [message for _, message in bench.sent_messages() if isinstance(message, Status)]
    assert [message.get_id for message in statuses] == [2, 3, 4]


def test_released_keys_do_not_displace_failed_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_three(monkeypatch)
    bench.transfers.fail("failed", "why", "failed", 0.0)
    for number in range(5):
        bench.release("a", number, read_by(bench, "a", number, f"k{number}"))
    bench.request("a", 9, "failed", 1.0)
    assert bench.sent_messages()[-1] == ("a", Failed(9, "why", "failed"))


def read_by(bench: Bench, peer: str, number: int, key: str = "k") -> Transfer:
    """A payload that was put for one reader, which has it."""
    transfer = bench.put(key)
    bench.request(peer, number, key)
    bench.sent_messages()
    return transfer


def test_waiting_gets_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_gets, "MAX_WAITING", 3)
    for number in range(5):
        bench.request("a", number, "same")
    assert [type(message) for _, message in bench.sent_messages()] == [Failed, Failed]
    for number in range(5):
        bench.request("b", number, f"k{number}")
    # One peer cannot take all: another one has its share of the places, one of three.
    refused = [message for _, message in bench.sent_messages() if isinstance(message, Failed)]
    assert [message.get_id for message in refused] == [1, 2, 3, 4]


def test_aborts_of_readers_evict_no_reason_of_the_producer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_three(monkeypatch)
    bench.transfers.fail("own", "why", "failed", 0.0)
    for number in range(5):
        bench.transfers.on_abort(f"k{number}", "gone", 0.0)
    bench.request("a", 9, "own", 0.0)
    for number in range(5):
        bench.request("a", number, f"k{number}", 0.0)
    failed = [message for _, message in bench.sent_messages() if isinstance(message, Failed)]
    assert [(message.get_id, message.ending) for message in failed] == [
        (9, "failed"),
        *((number, "aborted") for number in (2, 3, 4)),
    ]


def test_long_reasons_are_cut(bench: Bench) -> None:
    bench.transfers.fail("k", "x" * 10_000, "failed", 0.0)
    bench.request("a", 1, "k", 0.0)
    ((_, failed),) = bench.sent_messages()
    assert isinstance(failed, Failed)
    assert len(failed.reason) == 4096


def test_fail_while_leased(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.transfers.fail("k", "why", "failed", 0.0)
    assert transfer.is_done
    assert bench.freed == []
    again = bench.put("k")
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]
    assert again.state.value == "committed"


def test_late_rejection_does_not_fail_the_next_payload_of_the_key(bench: Bench) -> None:
    first = bench.put("k")
    bench.request("a", 1, "k")
    bench.transfers.fail("k", "why", "failed", 0.0)
    second = bench.put("k")
    bench.release("a", 1, first, "rejected")
    assert second.state.value == "committed"
    assert bench.transfers.stats()["failed"] == 1, "counted twice"
    bench.sent_messages()
    bench.request("b", 1, "k", 1.0)
    assert bench.sent_messages() == [("b", offer(1, second))]
    assert bench.freed == [first]


def test_rejection_fails_it_for_all(bench: Bench) -> None:
    transfer = bench.put("k", readers=3)
    for peer in "ab":
        bench.request(peer, 1, "k")
    bench.sent_messages()
    bench.release("a", 1, transfer, "rejected")
    assert transfer.state.value == "failed"
    assert transfer.reason == "a reader rejected it: bad"
    bench.request("c", 1, "k", 1.0)
    ((_, failed),) = bench.sent_messages()
    assert isinstance(failed, Failed)
    assert bench.freed == []
    bench.release("b", 1, transfer)
    assert bench.freed == [transfer]


def test_a_reported_rejection_fails_it_for_all_and_the_lease_stays(bench: Bench) -> None:
    transfer = bench.put("k", readers=3)
    for peer in "ab":
        bench.request(peer, 1, "k")
    bench.transfers.on_reject("c", 1, transfer.epoch, "no lease", 0.0)
    assert transfer.state.value == "leased"
    for reason in ("bad", "bad again"):
        bench.transfers.on_reject("a", 1, transfer.epoch, reason, 0.0)
    assert transfer.state.value == "failed"
    assert transfer.reason == "a reader rejected it: bad"
    bench.release("b", 1, transfer)
    assert bench.freed == []
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]


def test_abort_while_it_is_written(bench: Bench) -> None:
    """The writer still owns the memory: its commit raises, its abort frees the memory."""
    transfer = bench.reserve("k")
    bench.transfers.fail("k", "the user left", "aborted", 0.0)
    assert bench.freed == []
    successor = bench.reserve("k")
    with pytest.raises(TransferFailed, match="the user left"):
        bench.transfers.commit([(transfer, HERE)], 1, 10.0)
    bench.transfers.abort(transfer)
    assert bench.freed == [transfer]
    bench.transfers.commit([(successor, HERE)], 1, 10.0)
    assert successor.state.value == "committed"


def test_aborted_reservation(bench: Bench) -> None:
    bench.request("a", 1, "k")
    transfer = bench.reserve("k")
    bench.transfers.abort(transfer)
    bench.sent_messages()
    again = bench.put("k")
    assert bench.sent_messages()[-1] == ("a", offer(1, again))


@pytest.mark.parametrize("state", ["reserved", "committed", "leased"])
def test_duplicate_key(bench: Bench, state: str) -> None:
    if state == "reserved":
        bench.reserve("k")
    else:
        bench.put("k")
    if state == "leased":
        bench.request("a", 1, "k")
    with pytest.raises(DuplicateKeyError, match=f"'k'.*{state}"):
        bench.reserve("k")


def test_close_answers_every_get(bench: Bench) -> None:
    committed, leased = bench.put("c"), bench.put("l")
    reserved = bench.reserve("r")
    bench.request("a", 1, "l")
    bench.request("a", 2, "w")
    bench.request("b", 3, "r")
    bench.sent_messages()
    bench.transfers.close("closed")
    message = sorted(bench.sent_messages(), key=repr)
    assert message == [
        ("a", Failed(2, "closed", "closed")),
        ("b", Failed(3, "closed", "closed")),
    ]
    for transfer in (committed, leased, reserved):
        assert transfer.state.value == "failed"
        assert transfer.is_done
    assert bench.freed == [committed]
    bench.transfers.on_peer_lost("a")
    bench.transfers.abort(reserved)
    assert bench.freed == [committed, leased, reserved]
    assert bench.transfers.stats()["live"] == 0
