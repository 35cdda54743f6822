"""The producer's state machine, driven by hand: the clock is an argument, messages are recorded."""

from __future__ import annotations

import pytest

from omni_kvlink import DuplicateKeyError
from omni_kvlink.connectors.protocol.messages import Get, Message, Outcome, Status
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.memory.block import Block
from support.connectors.transfer_tables import HERE, Bench, offer

# Reaches into _free, _send: an interrupt comes within them; the table has them from its owner once
# for all.


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_get_before_commit(bench: Bench) -> None:
    bench.request("a", 1, "k")
    assert bench.sent_messages() == []
    transfer = bench.reserve("k")
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it"))
    ]
    bench.transfers.commit([(transfer, HERE)], 1, 100.0)
    assert bench.sent_messages() == [("a", offer(1, transfer))]
    assert transfer.state.value == "leased"
    bench.release("a", 1, transfer)
    assert transfer.state.value == "released"
    assert transfer.is_done
    assert bench.freed == [transfer]


@pytest.mark.parametrize("sent", [False, True], ids=["before it is sent", "behind it"])
def test_an_interrupted_offer_is_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """The payload is committed: its producer cannot give it up. A reader is missing: it expires."""
    send, interrupts = bench.send, [KeyboardInterrupt()]

    def interrupt(peer: object, message: Message) -> None:
        if sent or not interrupts:
            send(peer, message)
        if interrupts:
            raise interrupts.pop()

    transfer = bench.reserve("k")
    bench.request("a", 1, "k")
    bench.sent_messages()
    monkeypatch.setattr(bench.transfers, "_send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.transfers.commit([(transfer, HERE)], 2, 100.0)
    assert bench.sent_messages() == [("a", offer(1, transfer))] * (1 + sent)
    stats = bench.transfers.stats()
    assert (stats["committed"], stats["leased"], stats["waiting"]) == (1, 1, 0)
    assert transfer.unclaimed == 1
    bench.release("a", 1, transfer)
    bench.transfers.tick(100.0)
    assert transfer.state.value == "expired"
    assert bench.freed == [transfer]


def test_an_offer_that_is_interrupted_again_and_again_expires(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(peer: object, message: object) -> None:
        raise KeyboardInterrupt

    transfer = bench.reserve("k")
    bench.request("a", 1, "k")
    monkeypatch.setattr(bench.transfers, "_send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.transfers.commit([(transfer, HERE)], 2, 100.0)
    monkeypatch.undo()
    assert bench.transfers.stats()["committed"] == 1
    monkeypatch.undo()
    bench.transfers.tick(100.0)
    assert transfer.state.value == "expired"


def test_a_transfer_that_did_not_begin_is_freed_when_it_is_given_up(bench: Bench) -> None:
    bench.put("k")
    transfer = Transfer("k")
    with pytest.raises(DuplicateKeyError):
        bench.transfers.reserve([transfer])
    bench.transfers.abort(transfer)
    bench.transfers.abort(transfer)
    assert bench.freed == [transfer]
    assert bench.transfers.stats()["live"] == 1


def test_an_interrupted_abort_goes_on_when_it_is_called_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(transfer: Transfer) -> None:
        raise KeyboardInterrupt

    transfer = bench.reserve("k")
    transfer.block = Block(0, 0, 100)
    with monkeypatch.context() as patch:
        patch.setattr(bench.transfers, "_free", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.transfers.abort(transfer)
    bench.transfers.abort(transfer)
    assert bench.freed == [transfer]
    assert bench.transfers.stats()["live"] == 0


def test_the_pins_of_one_reader_are_not_another_s(bench: Bench) -> None:
    """A reader that was disconnected may read its own leases' memory, and nobody else's."""
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    assert bench.transfers.on_disconnect("a")
    assert not bench.transfers.on_disconnect("b")
    assert transfer.location is not None
    assert bench.transfers.pins.nbytes() == {"a": transfer.location.nbytes}
    assert transfer.location.nbytes > 0


def test_get_after_commit(bench: Bench) -> None:
    transfer = bench.put("k")
    assert transfer.state.value == "committed"
    bench.request("a", 1, "k")
    assert bench.sent_messages() == [("a", offer(1, transfer))]


def test_get_while_it_is_written(bench: Bench) -> None:
    bench.reserve("k")
    bench.request("a", 1, "k")
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it"))
    ]


def test_offers_are_sent_in_the_order_of_the_gets(bench: Bench) -> None:
    for number, peer in enumerate("cab"):
        bench.request(peer, number, "k")
    transfer = bench.put("k", readers=2)
    assert bench.offers() == [("c", offer(0, transfer)), ("a", offer(1, transfer))]
    assert bench.transfers.stats()["waiting"] == 1
    bench.request("d", 9, "k")
    ((_, status),) = bench.sent_messages()
    assert isinstance(status, Status)
    assert "every declared reader" in status.phase


def test_every_reader_must_release(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.release("a", 1, transfer)
    assert not transfer.is_done
    assert bench.freed == []
    bench.release("b", 1, transfer)
    assert bench.freed == [transfer]


def test_released_with_a_reader_missing_waits_for_it(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.release("a", 1, transfer)
    assert transfer.state.value == "committed"
    bench.request("b", 1, "k")
    bench.release("b", 1, transfer)
    assert transfer.state.value == "released"


def test_one_peer_may_read_twice(bench: Bench) -> None:
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.request("a", 2, "k")
    bench.release("a", 1, transfer)
    bench.release("a", 1, transfer)  # repeated
    assert transfer.state.value == "leased"
    assert bench.transfers.stats()["stale"] == 1
    bench.release("a", 2, transfer)
    assert transfer.state.value == "released"


def test_stale_releases_change_nothing(bench: Bench) -> None:
    first = bench.put("k")
    bench.request("a", 1, "k")
    bench.release("a", 1, first)
    second = bench.put("k")
    bench.request("b", 1, "k")
    for peer, number, transfer in (("a", 1, first), ("a", 1, second), ("b", 2, second)):
        for outcome in ("read", "unread", "rejected"):
            bench.release(peer, number, transfer, outcome)
    assert second.state.value == "leased"
    assert bench.freed == [first]
    assert bench.transfers.stats()["stale"] == 9
    bench.release("b", 1, first)  # an earlier epoch, of a get that has a lease
    assert second.state.value == "leased"
    assert bench.transfers.stats()["stale"] == 10


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
    assert (bench.transfers.stats()["redelivered"], transfer.lost_readers) == (1, 1)
    bench.release("a", 1, transfer)  # its release arrives late
    assert transfer.state.value == "leased"


def test_payload_of_a_lost_reader_waits_for_the_next(bench: Bench) -> None:
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    bench.request("a", 2, "other")
    bench.transfers.on_peer_lost("a")
    assert transfer.state.value == "committed"
    assert bench.transfers.stats()["waiting"] == 0
    assert bench.transfers.tick(5.0) == 10.0
    bench.transfers.tick(10.0)
    assert transfer.state.value == "expired"
    assert bench.freed == [transfer]


def test_reader_that_cancels_its_gets_keeps_its_leases(bench: Bench) -> None:
    transfer = bench.put("k")
    bench.request("a", 1, "k")
    bench.request("a", 2, "other")
    bench.transfers.cancel_gets("a")
    assert transfer.state.value == "leased"
    assert bench.transfers.stats()["waiting"] == 0
    bench.release("a", 1, transfer)
    assert transfer.state.value == "released"


@pytest.mark.parametrize("end", ["released", "expired", "failed"])
def test_memory_of_a_disconnected_reader_is_not_reused(bench: Bench, end: str) -> None:
    """The payload is delivered again; its memory is kept until the reader exits."""
    transfer = bench.put("k", expires=10.0)
    bench.request("a", 1, "k")
    bench.sent_messages()
    assert bench.transfers.on_disconnect("a")
    assert transfer.state.value == "committed"
    if end == "released":
        bench.request("b", 7, "k")
        assert bench.sent_messages() == [("b", offer(7, transfer))]
        bench.release("b", 7, transfer)
    elif end == "expired":
        bench.transfers.tick(10.0)
    else:
        bench.transfers.fail("k", "no", "failed", 1.0)
    assert transfer.state.value == end
    assert transfer.is_done
    assert bench.freed == []
    bench.release("b", 1, transfer)  # another reader's: it says nothing
    bench.release("a", 2, transfer)
    assert bench.freed == []
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]


@pytest.mark.parametrize("outcome", ["read", "rejected"])
def test_release_of_a_disconnected_reader(bench: Bench, outcome: Outcome) -> None:
    """It frees the memory as its exit does, and changes nothing else, and counts once."""
    transfer = bench.put("k", readers=2)
    bench.request("a", 1, "k")
    bench.request("a", 2, "k")
    assert bench.transfers.on_disconnect("a")
    bench.transfers.fail("k", "no", "failed", 1.0)
    bench.release("a", 1, transfer, outcome)
    assert bench.freed == []
    assert bench.transfers.on_disconnect("a")
    bench.release("a", 2, transfer, outcome)
    assert bench.freed == [transfer]
    assert not bench.transfers.on_disconnect("a")
    bench.release("a", 2, transfer, outcome)
    assert bench.transfers.stats()["stale"] == 1
    assert (transfer.state.value, transfer.reason) == ("failed", "no")
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]


def test_exit_of_a_disconnected_reader_does_not_free_a_live_payload(bench: Bench) -> None:
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


def test_cancel(bench: Bench) -> None:
    bench.request("a", 1, "k")
    bench.request("b", 1, "k")
    bench.transfers.on_cancel("a", 1)
    bench.transfers.on_cancel("a", 1)
    bench.transfers.on_cancel("c", 5)
    transfer = bench.put("k")
    assert bench.offers() == [("b", offer(1, transfer))]


def test_cancel_releases_what_was_offered(bench: Bench) -> None:
    """A reader that closes sends Cancel alone: it never uses an offer that is on its way."""
    bench.request("a", 1, "k")
    transfer = bench.put("k")
    bench.request("b", 7, "k")
    bench.sent_messages()
    bench.transfers.on_cancel("a", 2)
    assert bench.sent_messages() == []
    bench.transfers.on_cancel("a", 1)
    assert bench.sent_messages() == [("b", offer(7, transfer))]
    bench.release("a", 1, transfer, "unread")  # the reader's own release of the same offer
    assert bench.transfers.stats()["stale"] == 1
    assert not bench.transfers.on_disconnect("a")


def test_a_path_whose_name_is_part_of_another_is_told(bench: Bench) -> None:
    """What went by a lesser path than another reader's must not hide behind it."""

    class PeerOnPath:
        def __init__(self, path: str):
            self.path_names = path, path

    transfer = bench.put("k", readers=3)
    for number, path in enumerate(("zmq+tcp+curve", "zmq+tcp", "zmq+tcp")):
        bench.transfers.on_get(PeerOnPath(path), Get(number, "k"), 0.0)
    assert transfer.path == "zmq+tcp+curve, zmq+tcp"
