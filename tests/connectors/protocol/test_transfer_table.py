"""The producer's state machine, driven by hand: a clock of our own, every message recorded."""

from __future__ import annotations

import pytest
from transfer_table_fixtures import HERE, Bench, offer

from omni_kvlink.connectors.protocol.messages import Status
from omni_kvlink.connectors.protocol.transfer_table import TransferState


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_want_before_commit(bench: Bench) -> None:
    bench.request("a", 1, "k")
    assert bench.sent_messages() == []
    transfer = bench.transfers.reserve("k")
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it"))
    ]
    bench.transfers.commit(transfer, HERE, 1, 100.0)
    assert bench.sent_messages() == [("a", offer(1, transfer))]
    assert transfer.state is TransferState.LEASED
    bench.release("a", 1, transfer)
    assert transfer.state is TransferState.RELEASED
    assert transfer.done.is_set()
    assert bench.freed == [transfer]


def test_want_after_commit(bench: Bench) -> None:
    transfer = bench.put("k")
    assert transfer.state is TransferState.COMMITTED
    bench.request("a", 1, "k")
    assert bench.sent_messages() == [("a", offer(1, transfer))]


def test_want_while_it_is_written(bench: Bench) -> None:
    bench.transfers.reserve("k")
    bench.request("a", 1, "k")
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it"))
    ]


def test_offers_go_out_in_the_order_of_the_wants(bench: Bench) -> None:
    for number, peer in enumerate("cab"):
        bench.request(peer, number, "k")
    transfer = bench.put("k", readers=2)
    assert bench.offers() == [("c", offer(0, transfer)), ("a", offer(1, transfer))]
    assert bench.transfers.stats()["waiting"] == 1
    bench.request("d", 9, "k")
    ((_, status),) = bench.sent_messages()
    assert isinstance(status, Status)
    assert "every declared reader" in status.phase


def test_every_reader_must_let_go(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.release("a", 1, transfer)
    assert not transfer.done.is_set()
    assert bench.freed == []
    bench.release("b", 1, transfer)
    assert bench.freed == [transfer]


def test_released_with_a_reader_missing_waits_for_it(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.release("a", 1, transfer)
    assert transfer.state is TransferState.COMMITTED
    bench.request("b", 1, "k")
    bench.release("b", 1, transfer)
    assert transfer.state is TransferState.RELEASED


def test_one_peer_may_read_twice(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.request("a", 2, "k")
    bench.release("a", 1, transfer)
    bench.release("a", 1, transfer)  # said twice
    assert transfer.state is TransferState.LEASED
    assert bench.transfers.stats()["stale"] == 1
    bench.release("a", 2, transfer)
    assert transfer.state is TransferState.RELEASED


def test_stale_words_change_nothing(bench: Bench) -> None:
    first = bench.put("k")
    bench.request("a", 1, "k")
    bench.release("a", 1, first)
    second = bench.put("k")
    bench.request("b", 1, "k")
    for peer, number, transfer in (("a", 1, first), ("a", 1, second), ("b", 2, second)):
        for outcome in ("read", "unread", "rejected"):
            bench.release(peer, number, transfer, outcome)
    assert second.state is TransferState.LEASED
    assert bench.freed == [first]
    assert bench.transfers.stats()["stale"] == 9


def test_epochs_never_come_twice(bench: Bench) -> None:
    epochs = []
    for _ in range(5):
        transfer = bench.put("k")
        epochs.append(transfer.epoch)
        bench.request("a", 1, "k")
        bench.release("a", 1, transfer)
    assert len(set(epochs)) == 5
    assert 0 not in epochs, "an empty slot's commit word is 0"


def test_lost_reader_is_replaced(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.sent_messages()
    bench.transfers.on_peer_lost("a")
    assert bench.sent_messages() == [("b", offer(1, transfer))]
    assert bench.transfers.stats()["redelivered"] == 1
    bench.release("a", 1, transfer)  # its last words come late
    assert transfer.state is TransferState.LEASED


def test_lost_reader_leaves_it_to_the_next(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    bench.request("a", 2, "other")
    bench.transfers.on_peer_lost("a")
    assert transfer.state is TransferState.COMMITTED
    assert bench.transfers.stats()["waiting"] == 0
    assert bench.transfers.tick(5.0) == 10.0
    bench.transfers.tick(10.0)
    assert transfer.state is TransferState.EXPIRED
    assert bench.freed == [transfer]


def test_leaving_reader_keeps_what_it_holds(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.request("a", 2, "other")
    bench.transfers.cancel_gets("a")
    assert transfer.state is TransferState.LEASED
    assert bench.transfers.stats()["waiting"] == 0
    bench.release("a", 1, transfer)
    assert transfer.state is TransferState.RELEASED


@pytest.mark.parametrize("end", ["released", "expired", "failed"])
def test_what_a_stranded_reader_sees_is_not_reused(bench: Bench, end: str) -> None:
    """It is delivered again and ends as it would; its memory waits for the reader's death."""
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    bench.sent_messages()
    assert bench.transfers.on_disconnect("a")
    assert transfer.state is TransferState.COMMITTED
    if end == "released":
        bench.request("b", 7, "k")
        assert bench.sent_messages() == [("b", offer(7, transfer))]
        bench.release("b", 7, transfer)
    elif end == "expired":
        bench.transfers.tick(10.0)
    else:
        bench.transfers.fail("k", "no", "failed", 1.0)
    assert transfer.state.value == end
    assert transfer.done.is_set()
    assert bench.freed == []
    bench.release("a", 1, transfer)  # too late to count
    assert bench.freed == []
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]


def test_a_dead_stranger_does_not_free_what_is_on_its_way(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.transfers.on_disconnect("a")
    bench.transfers.on_peer_lost("a")
    assert bench.freed == []
    bench.request("b", 7, "k")
    bench.release("b", 7, transfer)
    assert bench.freed == [transfer]
    assert not bench.transfers.on_disconnect("b")


def test_unread_goes_to_the_next(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.request("b", 7, "k")
    bench.sent_messages()
    bench.release("a", 1, transfer, "unread")
    assert bench.sent_messages() == [("b", offer(7, transfer))]


def test_unwant(bench: Bench) -> None:
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.transfers.on_cancel("a", 1)
    bench.transfers.on_cancel("a", 1)
    bench.transfers.on_cancel("c", 5)
    transfer = bench.put("k")
    assert bench.offers() == [("b", offer(1, transfer))]


def test_unwant_gives_back_what_was_offered(bench: Bench) -> None:
    """A reader that closes says no more than this: it never looks at the offer on its way."""
    bench.request("a", 1, "k")
    transfer = bench.put("k")
    bench.request("b", 7, "k")
    bench.sent_messages()
    bench.transfers.on_cancel("a", 2)
    assert bench.sent_messages() == []
    bench.transfers.on_cancel("a", 1)
    assert bench.sent_messages() == [("b", offer(7, transfer))]
    bench.release("a", 1, transfer, "unread")  # the same once more, in the reader's own words
    assert bench.transfers.stats()["stale"] == 1
    assert not bench.transfers.on_disconnect("a")
