"""The producer's state machine with payloads that are read while they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import DuplicateKeyError, TransferFailed
from omni_kvlink.connectors.protocol.messages import (
    Committed,
    Ending,
    Failed,
    Get,
    Layer,
    Offer,
    Status,
)
from support.connectors.transfer_tables import HERE, Bench, state_of

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Transfer

K, V = (b"\1\2\3\4", b"\5\6\7\10"), (b"abcd", b"efgh")
DRAFT = 512


class StreamBench(Bench):
    """A `Bench` with streams."""

    def begin(self, key: str = "k", readers: int = 1) -> Transfer:
        transfer = self.reserve(key)
        self.transfers.layers.begin(transfer, HERE, DRAFT, readers)
        return transfer

    def follow(self, peer: str, number: int, key: str = "k") -> None:
        """Request the payload as a stream."""
        self.transfers.on_get(peer, Get(number, key, streamed=True), 0.0)

    def commit(self, transfer: Transfer, expires: float = 100.0) -> None:
        self.transfers.commit([(transfer, HERE)], 99, expires)  # `begin_stream` set the readers

    def failures(self) -> list[tuple[str, int, str]]:
        return [
            (peer, message.get_id, message.reason)
            for peer, message in self.sent_messages()
            if isinstance(message, Failed)
        ]


@pytest.fixture
def bench() -> StreamBench:
    return StreamBench()


def draft(number: int, transfer: Transfer) -> Offer:
    return Offer(number, transfer.epoch, HERE, DRAFT)


def test_from_beginning_to_end(bench: StreamBench) -> None:
    bench.follow("a", 1)
    transfer = bench.begin()
    assert state_of(transfer) == "streaming"
    bench.transfers.layers.announce(transfer, 0, K)
    bench.transfers.layers.announce(transfer, 2, V)
    bench.commit(transfer)
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it")),
        ("a", draft(1, transfer)),
        ("a", Layer(1, 0, K)),
        ("a", Layer(1, 2, V)),
        ("a", Committed(1)),
    ]
    assert state_of(transfer) == "leased"
    bench.release("a", 1, transfer)
    assert state_of(transfer) == "released"
    assert transfer.is_done
    assert bench.freed == [transfer]


def test_late_reader_is_sent_the_earlier_layers_first(bench: StreamBench) -> None:
    transfer = bench.begin(readers=2)
    bench.follow("a", 1)
    bench.transfers.layers.announce(transfer, 2, V)
    bench.sent_messages()
    bench.follow("b", 7)
    assert bench.sent_messages() == [("b", draft(7, transfer)), ("b", Layer(7, 2, V))]
    bench.transfers.layers.announce(transfer, 0, K)
    assert sorted(bench.sent_messages(), key=repr) == [("a", Layer(1, 0, K)), ("b", Layer(7, 0, K))]


def test_a_plain_reader_waits_for_the_commit(bench: StreamBench) -> None:
    transfer = bench.begin(readers=2)
    bench.request("a", 1, "k")
    bench.follow("b", 2)
    bench.transfers.layers.announce(transfer, 0, K)
    assert bench.sent_messages() == [
        ("a", Status(1, "announced, the producer is still writing it")),
        ("b", draft(2, transfer)),
        ("b", Layer(2, 0, K)),
    ]
    bench.commit(transfer)
    assert bench.sent_messages() == [
        ("b", Committed(2)),
        ("a", Offer(1, transfer.epoch, HERE)),
    ]


def test_a_reader_of_layers_takes_a_whole_payload(bench: StreamBench) -> None:
    transfer = bench.put("k", readers=2)
    bench.follow("a", 1)
    stream = bench.begin("s")
    bench.transfers.layers.announce(stream, 0, K)
    bench.commit(stream)
    bench.sent_messages()
    bench.follow("b", 2, "s")
    assert bench.sent_messages() == [("b", Offer(2, stream.epoch, HERE))]
    bench.release("a", 1, transfer)


def test_no_more_readers_than_declared(bench: StreamBench) -> None:
    transfer = bench.begin(readers=1)
    bench.follow("a", 1)
    bench.follow("b", 2)
    bench.request("c", 3, "k")
    bench.transfers.layers.announce(transfer, 0, K)
    bench.commit(transfer)
    assert [peer for peer, message in bench.sent_messages() if not isinstance(message, Status)] == [
        "a"
    ] * 3
    assert bench.transfers.stats()["waiting"] == 2


@pytest.mark.parametrize("how", ["unread", "lost", "disconnect"])
def test_a_reader_that_is_lost_amid_a_stream_is_replaced(bench: StreamBench, how: str) -> None:
    """The next reader gets the earlier layers, too, and the writer goes on."""
    transfer = bench.begin()
    bench.follow("a", 1)
    bench.request("w", 4, "k")
    bench.transfers.layers.announce(transfer, 0, K)
    bench.follow("b", 2)
    bench.sent_messages()
    if how == "unread":
        bench.release("a", 1, transfer, "unread")
    elif how == "lost":
        bench.transfers.on_peer_lost("a")
    else:
        assert bench.transfers.on_disconnect("a")
    assert bench.sent_messages() == [("b", draft(2, transfer)), ("b", Layer(2, 0, K))]
    assert state_of(transfer) == "streaming"
    assert bench.transfers.stats()["redelivered"] == 1
    bench.transfers.layers.announce(transfer, 2, V)
    bench.commit(transfer)
    assert bench.sent_messages() == [("b", Layer(2, 2, V)), ("b", Committed(2))]
    bench.release("b", 2, transfer)
    assert state_of(transfer) == "released"
    assert bench.freed == ([] if how == "disconnect" else [transfer])
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]


def test_the_last_reader_is_lost_and_the_stream_goes_on(bench: StreamBench) -> None:
    transfer = bench.begin()
    bench.follow("a", 1)
    bench.transfers.on_peer_lost("a")
    bench.transfers.layers.announce(transfer, 0, K)
    assert state_of(transfer) == "streaming"
    bench.commit(transfer, expires=10.0)
    assert state_of(transfer) == "committed"
    assert bench.transfers.tick(5.0) == 10.0
    bench.transfers.tick(10.0)
    assert state_of(transfer) == "expired"
    assert bench.freed == [transfer]


def test_no_time_to_live_before_the_commit(bench: StreamBench) -> None:
    bench.begin()
    assert bench.transfers.tick(1e6) == float("inf")
    assert bench.transfers.stats()["expired"] == 0


def test_commit_after_every_reader_released(bench: StreamBench) -> None:
    """Every declared reader released before the commit: the payload is released and freed."""
    transfer = bench.begin(readers=2)
    for number, peer in enumerate("ab"):
        bench.follow(peer, number)
        bench.release(peer, number, transfer)
    assert state_of(transfer) == "streaming"
    assert not transfer.is_done
    assert bench.freed == []
    bench.transfers.layers.announce(transfer, 0, K)
    bench.commit(transfer)
    assert state_of(transfer) == "released"
    assert bench.freed == [transfer]
    assert bench.transfers.stats()["live"] == 0


def test_commit_with_one_reader_missing(bench: StreamBench) -> None:
    transfer = bench.begin(readers=2)
    bench.follow("a", 1)
    bench.release("a", 1, transfer)
    bench.commit(transfer)
    assert state_of(transfer) == "committed"
    bench.request("b", 2, "k")
    bench.release("b", 2, transfer)
    assert state_of(transfer) == "released"


def test_rejection_ends_it_for_all(bench: StreamBench) -> None:
    transfer = bench.begin(readers=3)
    bench.follow("a", 1)
    bench.follow("b", 2)
    bench.request("c", 3, "k")
    bench.sent_messages()
    bench.release("a", 1, transfer, "rejected")
    why = "a reader rejected it: bad"
    assert sorted(bench.failures()) == [("a", 1, why), ("b", 2, why), ("c", 3, why)]
    assert state_of(transfer) == "failed"
    with pytest.raises(TransferFailed, match="rejected it: bad"):
        bench.transfers.layers.announce(transfer, 0, K)
    with pytest.raises(TransferFailed, match="rejected it: bad"):
        bench.commit(transfer)
    bench.follow("d", 4)
    assert bench.failures() == [("d", 4, why)]
    bench.release("b", 2, transfer)
    assert bench.freed == [], "freed under the writer"
    bench.transfers.abort(transfer)
    assert bench.freed == [transfer]


@pytest.mark.parametrize("ending", ["failed", "aborted"])
def test_readers_of_a_stream_are_told_of_its_failure(bench: StreamBench, ending: Ending) -> None:
    transfer = bench.begin(readers=2)
    bench.follow("a", 1)
    bench.request("b", 2, "k")
    bench.sent_messages()
    bench.transfers.fail("k", "why", ending, 0.0)
    assert sorted(bench.failures()) == [("a", 1, "why"), ("b", 2, "why")]
    bench.transfers.abort(transfer)
    assert bench.freed == [], "freed under a reader"
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]
    assert bench.transfers.stats()["failed"] == 1


def test_readers_of_a_committed_stream_are_not_told(bench: StreamBench) -> None:
    """A failure after the commit sends nothing to readers that have the payload."""
    transfer = bench.begin(readers=2)
    bench.follow("a", 1)
    bench.commit(transfer)
    bench.sent_messages()
    bench.transfers.fail("k", "why", "failed", 0.0)
    assert bench.failures() == []


def test_abort_of_a_stream(bench: StreamBench) -> None:
    transfer = bench.begin()
    bench.follow("a", 1)
    bench.sent_messages()
    bench.transfers.abort(transfer)
    assert bench.failures() == [("a", 1, "its producer gave it up")]
    assert state_of(transfer) == "failed"
    bench.transfers.abort(transfer)
    assert bench.freed == []
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [transfer]


@pytest.mark.parametrize("begun", [False, True])
def test_abort_with_a_reason_fails_every_get(bench: StreamBench, begun: bool) -> None:
    bench.request("a", 1, "k")
    transfer = bench.begin() if begun else bench.reserve("k")
    bench.transfers.abort(transfer, "no layer 3", 0.0)
    bench.follow("b", 2)
    assert bench.failures() == [("a", 1, "no layer 3"), ("b", 2, "no layer 3")]
    assert state_of(transfer) == "failed"
    assert transfer.reason == "no layer 3"
    assert bench.freed == [transfer]


def test_late_abort_does_not_fail_the_next_payload(bench: StreamBench) -> None:
    first = bench.begin()
    bench.transfers.fail("k", "aborted", "aborted", 0.0)
    second = bench.begin()
    bench.follow("a", 1)
    bench.sent_messages()
    bench.transfers.abort(first, "too late", 1.0)
    assert bench.failures() == []
    assert state_of(second) == "streaming"
    assert bench.freed == [first]
    bench.commit(second)
    bench.transfers.abort(second, "after the commit", 2.0)
    assert state_of(second) == "leased"


def test_close_fails_the_readers_of_a_stream(bench: StreamBench) -> None:
    transfer = bench.begin(readers=2)
    bench.follow("a", 1)
    bench.request("b", 2, "k")
    bench.sent_messages()
    bench.transfers.close("closed")
    assert sorted(bench.failures()) == [("a", 1, "closed"), ("b", 2, "closed")]
    bench.transfers.abort(transfer)
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]


def test_duplicate_key_of_a_stream(bench: StreamBench) -> None:
    bench.begin()
    with pytest.raises(DuplicateKeyError, match=r"'k'.*streaming"):
        bench.reserve("k")


@pytest.mark.parametrize("last", ["reader", "engine", "disconnected"])
def test_lent_memory_is_freed_after_its_last_use(bench: StreamBench, last: str) -> None:
    transfer = bench.reserve("k")
    bench.transfers.lend(transfer, "tensor")
    bench.transfers.commit([(transfer, HERE)], 1, 100.0)
    bench.request("a", 1, "k")
    if last == "disconnected":
        bench.transfers.on_disconnect("a")
        bench.transfers.fail("k", "why", "failed", 0.0)
        bench.transfers.on_view_freed(transfer, "tensor")
        assert bench.freed == []
        bench.transfers.on_peer_lost("a")
    elif last == "reader":
        bench.transfers.on_view_freed(transfer, "tensor")
        assert bench.freed == []
        bench.release("a", 1, transfer)
    else:
        bench.release("a", 1, transfer)
        assert state_of(transfer) == "released"
        assert transfer.is_done
        assert bench.freed == []
        bench.transfers.on_view_freed(transfer, "tensor")
    assert bench.freed == [transfer]


@pytest.mark.parametrize("end", ["abort", "fail", "close", "expiry"])
def test_lent_memory_that_is_not_read(bench: StreamBench, end: str) -> None:
    transfer = bench.reserve("k")
    bench.transfers.lend(transfer, "tensor")
    if end == "expiry":
        bench.transfers.commit([(transfer, HERE)], 1, 10.0)
        bench.transfers.tick(10.0)
    elif end == "fail":
        bench.transfers.fail("k", "why", "aborted", 0.0)
    elif end == "close":
        bench.transfers.close("closed")
    bench.transfers.abort(transfer)
    assert bench.freed == []
    bench.transfers.on_view_freed(transfer, "tensor")
    assert bench.freed == [transfer]


def test_lent_memory_released_early(bench: StreamBench) -> None:
    """The engine dropped its tensors before the put: nothing is freed under the writer."""
    transfer = bench.reserve("k")
    bench.transfers.lend(transfer, "tensor")
    bench.transfers.on_view_freed(transfer, "tensor")
    assert bench.freed == []
    bench.transfers.commit([(transfer, HERE)], 1, 100.0)
    bench.request("a", 1, "k")
    bench.release("a", 1, transfer)
    assert bench.freed == [transfer]
