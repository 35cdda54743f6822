"""The parts of a direct put, and the transfer table that offers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from omni_kvlink import TransferFailed, WireError
from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.messages import Committed, Failed, Get, Layer, Offer
from omni_kvlink.connectors.protocol.transfer import Transfer, TransferState
from omni_kvlink.memory.mapping import Mapping
from support.connectors.transfer_tables import HERE, Bench

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER, FIRST, SECOND = 512, 700, 300
START = 512 + 768
"""Of the second tensor, behind 68 bytes of padding."""
NBYTES = START + SECOND


@pytest.fixture
def direct() -> DirectSource:
    memory = Mapping.anonymous(1 << 16).region
    memory.view()[: 2 * HEADER] = b"h" * HEADER + b"d" * HEADER
    memory.view()[4096 : 4096 + FIRST] = b"1" * FIRST
    memory.view()[8192 : 8192 + SECOND] = b"2" * SECOND
    tensors = [(HEADER, memory.slice(4096, FIRST)), (START, memory.slice(8192, SECOND))]
    return DirectSource(memory.slice(0, 2 * HEADER), HEADER, tensors, NBYTES)


def test_every_byte_is_found(direct: DirectSource) -> None:
    found = b""
    while len(found) < NBYTES + HEADER:
        found += bytes(direct.find(len(found), len(found) + 4).view())
    padding = bytes(START - HEADER - FIRST)
    assert found == b"h" * HEADER + b"1" * FIRST + padding + b"2" * SECOND + b"d" * HEADER


@pytest.mark.parametrize(
    "span",
    [
        (HEADER - 1, HEADER + 1),
        (HEADER, START),
        (START - 1, START + 1),
        (NBYTES - 1, NBYTES + 1),
        (NBYTES, NBYTES + HEADER + 1),
        (NBYTES + HEADER + 1, NBYTES + HEADER + 2),
        (-1, 1),
        (9, 8),
    ],
)
def test_ranges_over_two_parts_or_none_are_refused(
    direct: DirectSource, span: tuple[int, int]
) -> None:
    with pytest.raises(WireError):
        direct.find(*span)


def test_released_tensors_are_not_found(direct: DirectSource) -> None:
    direct.release_tensors()
    for start in (HEADER, START):
        with pytest.raises(WireError):
            direct.find(start, start + 1)
    assert bytes(direct.find(NBYTES, NBYTES + 1).view()) == b"d"
    assert bytes(direct.find(0, 1).view()) == b"h"


def test_a_get_has_all_when_every_tensor_byte_was_sent(direct: DirectSource) -> None:
    for span in ((0, HEADER), (HEADER, HEADER + 9), (HEADER, HEADER + 9), (START, NBYTES)):
        direct.mark_sent("a", *span)
        assert not direct.has_sent_all("a")
    direct.mark_sent("b", HEADER, HEADER + FIRST)
    direct.mark_sent("a", HEADER + 9, HEADER + FIRST)
    assert (direct.has_sent_all("a"), direct.has_sent_all("b")) == (True, False)


class DirectBench(Bench):
    """A transfer table with one direct put."""

    def __init__(self, direct: DirectSource):
        super().__init__()
        self.direct = direct

    def begin(self, readers: int = 1) -> Transfer:
        transfer = self.reserve("k")
        self.transfers.layers.begin(transfer, HERE, HEADER, readers, self.direct)
        self.transfers.layers.announce(transfer, 0, (b"", b""))
        return transfer

    def follow(self, peer: str, number: int = 1) -> None:
        self.transfers.on_get(peer, Get(number, "k", streamed=True), 0.0)

    def take(self, transfer: Transfer, peer: str, number: int = 1) -> None:
        transfer.on_sent((peer, number), HEADER, HEADER + FIRST)
        transfer.on_sent((peer, number), START, NBYTES)

    def commit(self, transfer: Transfer) -> None:
        self.transfers.commit([(transfer, HERE)], 99, 100.0)


@pytest.fixture
def bench(direct: DirectSource) -> DirectBench:
    return DirectBench(direct)


def is_all_sent(transfer: Transfer) -> bool:
    assert transfer.direct is not None
    return transfer.direct.all_sent.is_set()


def test_all_sent_when_every_reader_was_sent_all(bench: DirectBench) -> None:
    transfer = bench.begin(readers=2)
    bench.follow("a")
    bench.take(transfer, "a")
    assert not is_all_sent(transfer)
    bench.follow("b")
    assert bench.offers() == [
        (peer, Offer(1, transfer.epoch, HERE, HEADER, True)) for peer in ("a", "b")
    ]
    assert not is_all_sent(transfer)
    bench.take(transfer, "b")
    assert is_all_sent(transfer)
    bench.commit(transfer)
    assert [message for _, message in bench.sent_messages()] == [Committed(1), Committed(1)]
    bench.release("a", 1, transfer)
    bench.release("b", 1, transfer)
    assert (transfer.state, bench.freed) == (TransferState.RELEASED, [transfer])


def test_a_late_reader_is_told_of_every_layer(bench: DirectBench) -> None:
    bench.begin()
    bench.follow("a")
    assert Layer(1, 0, (b"", b"")) in [message for _, message in bench.sent_messages()]


def test_a_reader_lost_before_the_commit_is_replaced(bench: DirectBench) -> None:
    transfer = bench.begin()
    bench.follow("a")
    bench.take(transfer, "a")
    bench.transfers.on_peer_lost("a")
    assert not transfer.is_sent
    bench.follow("b")
    assert len(bench.offers()) == 2
    bench.take(transfer, "b")
    bench.commit(transfer)
    bench.release("b", 1, transfer)
    assert transfer.state is TransferState.RELEASED


@pytest.mark.parametrize(
    "end",
    [
        lambda bench, transfer: bench.transfers.on_peer_lost("a"),
        lambda bench, transfer: bench.transfers.on_cancel("a", 1),
        lambda bench, transfer: bench.release("a", 1, transfer, "unread"),
    ],
)
def test_a_reader_lost_after_the_commit_fails_the_transfer(
    bench: DirectBench, end: Callable[[DirectBench, Transfer], None]
) -> None:
    transfer = bench.begin()
    bench.follow("a")
    bench.take(transfer, "a")
    bench.commit(transfer)
    bench.sent_messages()
    end(bench, transfer)
    assert (transfer.state, bench.freed) == (TransferState.FAILED, [transfer])
    bench.follow("b", 2)
    ((peer, message),) = bench.sent_messages()
    assert isinstance(message, Failed)
    assert (peer, message.get_id) == ("b", 2)
    assert "the caller's again" in message.reason


def test_a_reader_that_closed_its_stream_needs_no_more_bytes(bench: DirectBench) -> None:
    """Closing a stream counts as reading it."""
    transfer = bench.begin()
    bench.follow("a")
    assert not is_all_sent(transfer)
    bench.release("a", 1, transfer)
    assert is_all_sent(transfer)
    bench.commit(transfer)
    assert transfer.state is TransferState.RELEASED


def test_a_failed_transfer_is_not_waited_for(bench: DirectBench) -> None:
    transfer = bench.begin()
    bench.follow("a")
    bench.transfers.fail("k", "enough", "failed", 1.0)
    assert is_all_sent(transfer)
    with pytest.raises(TransferFailed, match="enough"):
        bench.commit(transfer)
    with pytest.raises(WireError):
        bench.direct.find(HEADER, HEADER + 1)
