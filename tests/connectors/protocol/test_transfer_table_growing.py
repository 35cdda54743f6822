"""The producer's half of the protocol: append streams, without I/O."""

from __future__ import annotations

from typing import Any

import pytest

from omni_kvlink import TransferFailed
from omni_kvlink.connectors.protocol import append_table
from omni_kvlink.connectors.protocol.chunk_window import MAX_AHEAD, ChunkWindow
from omni_kvlink.connectors.protocol.messages import Committed, Failed, Get, Message
from omni_kvlink.connectors.protocol.transfer import Transfer
from support.connectors.transfer_tables import HERE, Bench, offer, state_of

FOREVER = float("inf")


class StreamBench(Bench):
    """A bench with one stream, "g", whose readers have get 1 of their peer."""

    def __init__(self, readers: int = 1, window: int = 9) -> None:
        super().__init__()
        self.head = self.reserve("g")
        self.window = ChunkWindow[Transfer](readers, window)
        self.transfers.layers.begin(self.head, HERE, 50, readers, window=self.window)

    def open(self, peer: str, start: int = 0, number: int = 1) -> None:
        self.transfers.on_get(peer, Get(number, "g", True, number, start), 0.0)

    def get(self, peer: str, chunk: int, number: int, stream: int = 1) -> None:
        self.transfers.on_get(peer, Get(number, "g", False, stream, chunk), 0.0)

    def reserve_chunk(self) -> Transfer:
        chunk = Transfer(self.head.key, stream=self.head)
        self.transfers.reserve([chunk])
        return chunk

    def append(self) -> Transfer:
        chunk = self.reserve_chunk()
        self.transfers.commit([(chunk, HERE)], 1, FOREVER)
        return chunk

    def commit(self, expires: float = 100.0) -> None:
        self.transfers.commit([(self.head, HERE)], 1, expires)

    def failures(self) -> list[tuple[str, str, str]]:
        """Peer, ending and reason of each get that failed since the last call."""
        found: list[tuple[str, Message]] = self.sent_messages()
        return [(p, m.ending, m.reason) for p, m in found if isinstance(m, Failed)]


def test_a_chunk_is_kept_until_each_reader_has_released_it_and_those_before() -> None:
    bench = StreamBench(readers=3)
    bench.open("a")
    bench.open("b")
    chunks = [bench.append() for _ in range(3)]
    bench.sent_messages()
    for peer in ("a", "b"):
        for number in range(3):
            bench.get(peer, number, 10 + number)
    assert [m for _, m in bench.offers()] == 2 * [offer(10 + n, c) for n, c in enumerate(chunks)]
    for number in (11, 12):
        bench.release("a", number, chunks[number - 10])
        bench.release("b", number, chunks[number - 10])
    bench.release("a", 10, chunks[0])
    assert not bench.freed
    bench.release("b", 10, chunks[0])
    assert not bench.freed, "a third reader has not come"
    bench.open("c", start=2)
    assert bench.freed == chunks[:2]
    bench.get("c", 2, 12)
    bench.release("c", 12, chunks[2])
    assert bench.freed == chunks
    assert [state_of(chunk) for chunk in chunks] == 3 * ["released"]
    assert bench.window.first == bench.window.stop == 3


def test_a_get_waits_for_its_chunk_and_learns_the_end() -> None:
    bench = StreamBench()
    bench.open("a")
    bench.get("a", 0, 2)
    bench.get("a", 1, 3)
    bench.get("a", 2, 4)
    assert bench.transfers.stats()["waiting"] == 3
    bench.sent_messages()
    first = bench.append()
    assert bench.sent_messages() == [("a", offer(2, first))]
    second = bench.append()
    assert bench.sent_messages() == [("a", offer(3, second))]
    bench.commit()
    assert bench.sent_messages() == [
        ("a", Committed(1)),
        ("a", Failed(4, "the stream has ended", "complete")),
    ]
    bench.get("a", 2, 5)
    assert bench.failures() == [("a", "complete", "the stream has ended")]
    assert bench.transfers.stats()["waiting"] == 0
    bench.release("a", 2, first)
    bench.release("a", 3, second)
    assert bench.freed == [first, second]
    bench.release("a", 1, bench.head)
    assert bench.freed == [first, second, bench.head]
    assert state_of(bench.head) == "released"


def test_a_lost_reader_is_replaced_at_its_cursor() -> None:
    bench = StreamBench()
    bench.open("a")
    chunks = [bench.append() for _ in range(4)]
    for number in range(3):
        bench.get("a", number, 10 + number)
    bench.get("a", 4, 14)
    bench.release("a", 10, chunks[0])
    bench.release("a", 12, chunks[2])
    bench.transfers.on_peer_lost("a")
    assert bench.freed == [chunks[0]]
    assert bench.transfers.stats()["waiting"] == 0
    bench.open("b")
    bench.sent_messages()
    bench.get("b", 0, 2)
    ((_, ending, reason),) = bench.failures()
    assert ending == "failed"
    assert "chunk 0 was released before" in reason
    assert "start=1" in reason
    for number in (1, 2, 3):
        bench.get("b", number, 10 + number)
    assert [m for _, m in bench.offers()] == [offer(10 + n, chunks[n]) for n in (1, 2, 3)]


def test_memory_of_a_disconnected_reader_is_not_reused() -> None:
    """Its process lives and may read the chunk; another reader goes on with it."""
    bench = StreamBench()
    bench.open("a")
    chunk = bench.append()
    bench.get("a", 0, 2)
    assert bench.transfers.on_disconnect("a")
    bench.open("b")
    bench.get("b", 0, 2)
    bench.release("b", 2, chunk)
    assert state_of(chunk) == "released"
    assert not bench.freed
    bench.release("a", 2, chunk)
    assert bench.freed == [chunk]


def test_an_unread_chunk_is_offered_again() -> None:
    bench = StreamBench()
    bench.open("a")
    chunk = bench.append()
    bench.get("a", 0, 2)
    bench.release("a", 2, chunk, "unread")
    assert not bench.freed
    bench.sent_messages()
    bench.get("a", 0, 3)
    assert bench.offers() == [("a", offer(3, chunk))]
    bench.transfers.on_cancel("a", 3)
    bench.get("a", 0, 4)
    assert bench.offers() == [("a", offer(4, chunk))]
    bench.release("a", 4, chunk)
    bench.release("a", 4, chunk)
    assert bench.freed == [chunk]
    assert bench.transfers.stats()["stale"] == 1


def test_a_get_of_a_chunk_is_cancelled() -> None:
    bench = StreamBench()
    bench.open("a")
    bench.get("a", 0, 2)
    bench.get("a", 0, 3)
    bench.transfers.on_cancel("a", 2)
    bench.sent_messages()
    chunk = bench.append()
    assert bench.offers() == [("a", offer(3, chunk))]
    assert bench.transfers.stats()["waiting"] == 0


@pytest.mark.parametrize("end", ["fail", "reject", "close", "abort", "expire"])
def test_an_end_reaches_the_waiting_gets_and_frees_what_nobody_reads(end: str) -> None:
    bench = StreamBench(readers=2)
    bench.open("a")
    chunks = [bench.append() for _ in range(3)]
    bench.get("a", 0, 2)
    if end != "expire":
        bench.get("a", 3, 3)
    bench.sent_messages()
    table = bench.transfers
    if end == "fail":
        table.fail("g", "enough", "failed", 1.0)
    elif end == "reject":
        table.on_reject("a", 2, chunks[0].epoch, "enough", 1.0)
    elif end == "close":
        table.close("enough")
    elif end == "abort":
        table.abort(bench.head, "enough", 1.0)
    else:
        bench.commit(expires=5.0)
        assert table.tick(5.0) > 5.0
    if end != "expire":  # both the stream and its chunk
        ((peer, ending, reason), other) = bench.failures()
        assert (peer, ending) == ("a", "closed" if end == "close" else "failed")
        assert reason == other[2]
        assert "enough" in reason
    assert bench.freed[:2] == chunks[1:], "the first is being read"
    bench.release("a", 2, chunks[0])
    assert chunks[0] in bench.freed
    bench.sent_messages()
    bench.get("a", 1, 7)
    ((_, ending, reason),) = bench.failures()
    assert ending in ("failed", "expired")
    assert "enough" in reason or "ttl" in reason or "time to live" in reason or end == "close"
    with pytest.raises(TransferFailed):
        bench.append()
    bench.release("a", 1, bench.head)
    if end != "abort":
        bench.transfers.abort(bench.head)
    assert set(bench.freed) >= {*chunks, bench.head}
    assert table.stats()["live"] == 0


def test_a_reader_that_leaves_keeps_nothing() -> None:
    bench = StreamBench(readers=2)
    bench.open("a")
    bench.open("b")
    first = bench.append()
    for peer in ("a", "b"):
        bench.get(peer, 0, 2)
        bench.get(peer, 1, 3)
        bench.release(peer, 2, first)
    bench.release("a", 1, bench.head)
    assert bench.transfers.stats()["waiting"] == 1
    bench.sent_messages()
    second = bench.append()
    assert bench.offers() == [("b", offer(3, second))]
    bench.release("b", 3, second)
    assert bench.freed == [first, second]
    bench.release("b", 1, bench.head)
    third = bench.append()
    assert bench.freed == [first, second, third], "nobody is left"
    bench.get("a", 2, 9)
    assert bench.failures() == [("a", "failed", "the stream has ended")]


def test_gets_that_are_not_a_readers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = StreamBench()
    bench.open("a")
    bench.get("a", 0, 2)
    bench.sent_messages()

    def refusal(*get: Any) -> str:
        bench.get(*get)
        ((_, ending, reason),) = bench.failures()
        assert ending == "failed"
        return reason

    assert "ended" in refusal("b", 0, 5), "it has not opened the stream"
    assert "ended" in refusal("a", 0, 5, 4), "its get 4 is of no stream"
    assert "waits already" in refusal("a", 0, 2)
    assert "ahead" in refusal("a", MAX_AHEAD, 5)
    monkeypatch.setattr(append_table, "MAX_CHUNK_GETS", 1)
    assert "wait already" in refusal("a", 1, 5)
    chunk = bench.append()
    bench.append()
    bench.sent_messages()
    assert "has a chunk" in refusal("a", 1, 2), "its number is that of a lease"
    bench.release("a", 2, chunk)
    bench.release("a", 2, chunk)
    assert bench.transfers.stats()["stale"] == 1


def test_a_chunk_that_is_given_up_is_freed_and_the_stream_goes_on() -> None:
    bench = StreamBench()
    bench.open("a")
    lost = bench.reserve_chunk()
    bench.transfers.abort(lost)
    bench.transfers.abort(lost)
    assert bench.freed == [lost]
    bench.get("a", 0, 2)
    bench.sent_messages()
    chunk = bench.append()
    assert chunk.epoch > lost.epoch
    assert bench.offers() == [("a", offer(2, chunk))]


def test_a_reader_gets_the_place_that_begins_nearest_before_its_start() -> None:
    """Two readers are lost, a third never came: what one place has read, another has not."""
    bench = StreamBench(readers=3)
    bench.open("a")
    bench.open("b")
    chunks = [bench.append() for _ in range(4)]
    for peer, count in (("b", 3), ("a", 1)):
        for number in range(count):
            bench.get(peer, number, 10 + number)
            bench.release(peer, 10 + number, chunks[number])
    bench.transfers.on_peer_lost("b")
    bench.transfers.on_peer_lost("a")
    for peer, start in (("c", 3), ("d", 0), ("e", 2)):
        bench.open(peer, start)
    cursors = {peer: cursor.position for (peer, _), cursor in bench.window.readers.items()}
    assert cursors == {"c": 3, "d": 0, "e": 2}
    assert not bench.freed, "a third reader needs all chunks"
    bench.transfers.on_peer_lost("c")
    bench.transfers.on_peer_lost("e")
    bench.sent_messages()
    bench.open("f")
    bench.get("f", 0, 5)
    ((_, _, reason),) = bench.failures()
    assert "(start=2)" in reason, "the first of those that are left"


def test_a_start_that_a_reader_was_told_gives_up_no_chunk() -> None:
    """It was told another place's; that one is taken meanwhile, and this one begins before."""
    bench = StreamBench(readers=2)
    bench.open("a")
    bench.open("b")
    chunks = [bench.append() for _ in range(4)]
    for peer, count in (("a", 1), ("b", 3)):
        for number in range(count):
            bench.get(peer, number, 10 + number)
            bench.release(peer, 10 + number, chunks[number])
    bench.transfers.on_peer_lost("b")
    bench.open("c")
    bench.get("c", 0, 2)
    bench.release("c", 1, bench.head, "unread")
    bench.open("d", start=3)
    bench.transfers.on_peer_lost("a")
    bench.sent_messages()
    bench.open("c", start=3, number=3)
    bench.get("c", 3, 4, stream=3)
    ((_, _, reason),) = bench.failures()
    assert "(start=1)" in reason
    bench.release("c", 3, bench.head, "unread")
    bench.open("c", start=1, number=5)
    bench.sent_messages()
    for number in (1, 2, 3):
        bench.get("c", number, 10 + number, stream=5)
    assert bench.offers() == [("c", offer(10 + n, chunks[n])) for n in (1, 2, 3)]


def test_the_window() -> None:
    window = ChunkWindow[str](1, 2)
    assert not window.is_full
    window.chunks.extend("ab")
    assert window.is_full
    window.add_reader(("p", 1), 1)
    assert list(window.take_released()) == ["a"]
    assert not window.is_full
    assert window.find(1) == "b"
    assert window.find(2) is None


def test_gets_of_the_other_kind_are_refused() -> None:
    """Before the stream or payload is there, and after."""
    bench = StreamBench()
    bench.request("a", 2, "g")
    assert [(ending, "read_stream" in why) for _, ending, why in bench.failures()] == [
        ("failed", True)
    ]
    bench.transfers.on_get("a", Get(3, "p", True, 3), 0.0)
    bench.put("p")
    bench.put("q")
    bench.transfers.on_get("a", Get(4, "q", True, 4), 0.0)
    assert [why for _, _, why in bench.failures()] == 2 * ["it is no append stream: use get"]
    bench.open("a")
    assert len(bench.offers()) == 1
