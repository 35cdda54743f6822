"""The check of a campaign's logs: what it accepts, and each contradiction that it finds."""

from __future__ import annotations

import pytest

from support.network.evidence import Entry, Record, contradictions, with_cuts

ORDERS = {"k": ["A", "B"]}


def producer(*events: str, killed: bool = False) -> Record:
    states = [Entry("k", word) for word in events]
    return Record("producer", "P", 0, killed, [Entry("k", "put", 2), *states])


def reader(peer: str, *keys: str, killed: bool = False, incarnation: int = 0) -> Record:
    return Record("reader", peer, 0, killed, [Entry(key, "read", incarnation) for key in keys])


def writer(state: str, *, readers: int = 1, killed: bool = False) -> Record:
    """The producer of a stream of three chunks."""
    ends = [Entry("s", state)] if state else []
    return Record("producer", "P", 0, killed, [Entry("s", "put", readers, 3), *ends])


def chunks(peer: str, *events: str | int, killed: bool = False) -> Record:
    """A reader of the stream: the chunks that it read, and what else it wrote."""
    entries = [
        Entry("s", "chunk", 0, one) if isinstance(one, int) else Entry("s", *_parsed(one))
        for one in events
    ]
    return Record("reader", peer, 0, killed, entries)


def _parsed(event: str) -> tuple[str, int, int]:
    name, _, part = event.partition(" ")
    return name, -1 if name == "from" else 0, int(part or -1)


TIMED_OUT = Record("reader", "B", 0, False, [Entry("k", "TransferTimeout")])
READ_AGAIN = [producer("released"), reader("A", "k", killed=True), reader("A", "k")]
"""Killed after it had released the payload; its successor repeats the get."""
OTHER_KEYS = Record("producer", "P", 0, True, [Entry("x", "put", 9), Entry("y", "put", 9)])
CONSISTENT = {
    "both read it": [producer("released"), reader("A", "k"), reader("B", "k")],
    "the killed reader read it again": [
        producer("released"),
        reader("A", "k"),
        reader("B", "k", killed=True),
        reader("B", "k"),
    ],
    "the killed reader had read it": [
        producer("released"),
        reader("A", "k"),
        reader("B", "k", killed=True),
    ],
    "one reader never read it": [producer("expired"), reader("A", "k"), reader("B")],
    "a repeated get took another's share, and that reader timed out": [*READ_AGAIN, TIMED_OUT],
    "its producer died": [producer(killed=True), reader("A", "k"), reader("B", "k")],
}
CONSISTENT["its reader learned it from a producer that was killed before it wrote it down"] = [
    producer(killed=True),
    reader("A", "k"),
    Record("reader", "B", 0, False, [Entry("k", "TransferFailed")]),
]
CONTRADICTIONS = {
    "lost": [producer("released"), reader("A", "k"), reader("B")],
    "twice": [producer("released"), reader("A", "k", "k"), reader("B", "k")],
    "A read k 2 times": [producer(killed=True), reader("A", "k", "k")],
    "denied": [producer("expired"), reader("A", "k"), reader("B", "k")],
    "not ended: ('k', 0): leased": [producer("leased"), reader("A", "k"), reader("B", "k")],
    "not ended: ('k', 0): no": [producer(), reader("A", "k"), reader("B", "k")],
    "B never had k": [producer(killed=True), reader("A", "k"), reader("B")],
    "B never had k, and": [*READ_AGAIN, reader("B")],
    "nobody put ('k', 7)": [
        producer("released"),
        reader("A", "k", incarnation=7),
        reader("B", "k"),
    ],
    "WRONG": [producer("released"), Record("reader", "A", 0, False, [Entry("k", "WRONG")])],
    "BROKE": [producer("released"), Record("reader", "A", 0, False, [Entry("-", "BROKE")])],
    "LEAK": [producer("released"), Record("reader", "A", 0, False, [Entry("-", "LEAK")])],
    "for 2, 3…3 reads": [
        producer("released"),
        reader("A", "k", "x", killed=True),
        reader("A", "k"),
        reader("B", "k"),
        OTHER_KEYS,
    ],
}


STREAM = {"s": ["A"]}
CONSISTENT_STREAMS = {
    "read to the end": [writer("released"), chunks("A", 0, 1, 2, "ended")],
    "killed before it wrote the end": [writer("released"), chunks("A", 0, 1, 2, killed=True)],
    "a successor that was told where to begin": [
        writer("released"),
        chunks("A", 0, 1, "back 2", killed=True),
        chunks("A", "told 2", 2, "ended"),
    ],
    "a successor that reads a chunk again": [
        writer("released"),
        chunks("A", 0, 1, killed=True),
        chunks("A", 1, 2, "ended"),
    ],
    "left in the middle, and nobody came": [writer("expired"), chunks("A", 0, 1, "back 2")],
    "all chunks, but not the end": [writer("expired"), chunks("A", 0, 1, 2)],
    "two readers, of which one needs no first chunk": [
        writer("released", readers=2),
        chunks("A", 0, 1, 2, "ended"),
        chunks("B", "from 1", 1, 2, "ended"),
    ],
}
STREAM_CONTRADICTIONS = {
    "lost: chunk 1 had 0": [writer("released"), chunks("A", 0, "back 1")],
    "lost: chunk 2 had 1": [
        writer("released", readers=2),
        chunks("A", 0, 1, 2, "ended"),
        chunks("B", 0, 1, "back 2"),
    ],
    "lost: chunk 1 was refused": [
        writer("", killed=True),
        chunks("A", 0, "back 1", killed=True),
        chunks("A", "told 2", 2, "ended"),
    ],
    "chunk 0 was read 2 times": [writer("released"), chunks("A", 0, 1, 2, 0, "ended")],
    "delivered, but denied": [writer("expired"), chunks("A", 0, 1, 2, "ended")],
    "twice": [writer("released"), chunks("A", 0, 1, 2, "ended", "ended")],
    "not ended": [writer(""), chunks("A", 0, 1, 2, "ended")],
    "A never had s": [writer("released"), chunks("A", 0, 1, "back 2")],
    "nobody put ('s', 0)": [chunks("A", 0, 1, 2, "ended")],
}


@pytest.mark.parametrize("story", CONSISTENT_STREAMS)
def test_consistent_streams(story: str) -> None:
    assert list(contradictions(STREAM, CONSISTENT_STREAMS[story])) == []


@pytest.mark.parametrize("events", STREAM_CONTRADICTIONS)
def test_contradictions_of_streams_are_found(events: str) -> None:
    found = list(contradictions(STREAM, STREAM_CONTRADICTIONS[events]))
    assert any(events in complaint for complaint in found), found


KEPT_KEY, COUNTED = "kept.0.0", "kept.0.2"


def keeper(state: str, counted: str = "released", *, killed: bool = False) -> Record:
    """The producer of a payload that is kept, and of that which one reader has after it."""
    entries = [Entry(KEPT_KEY, "keep", 1), Entry(COUNTED, "put", 1)]
    ends = [Entry(COUNTED, counted), *([Entry(KEPT_KEY, state)] if state else [])]
    return Record("producer", "P", 0, killed, [*entries, *ends])


def kept_reader(*events: str, last: str = "read") -> Record:
    """What a reader had of the payload that is kept, and then of the other one."""
    entries = [Entry(KEPT_KEY, event, 0) for event in events]
    return Record("reader", "A", 0, False, [*entries, Entry(COUNTED, last, 0)])


@pytest.mark.parametrize(
    "records",
    [
        [keeper("withdrawn"), kept_reader("read", "again", "again")],
        [keeper("evicted"), kept_reader("read", "missing")],
        [keeper("evicted"), kept_reader("TransferTimeout")],
        [keeper("failed"), kept_reader("read", "missing")],
        [keeper("withdrawn", "expired"), kept_reader("read", "missing", last="TransferFailed")],
        [keeper("", killed=True), kept_reader("read", "missing")],
    ],
)
def test_consistent_logs_of_kept_payloads(records: list[Record]) -> None:
    assert list(contradictions({KEPT_KEY: ["A"], COUNTED: ["A"]}, records)) == []


@pytest.mark.parametrize(
    ("complaint", "records"),
    [
        ("missing while it was kept", [keeper("withdrawn"), kept_reader("read", "missing")]),
        ("not ended", [keeper("committed"), kept_reader("read")]),
        ("A never had kept.0.0", [keeper("withdrawn"), kept_reader()]),
        ("nobody put ('kept.0.0', 0)", [kept_reader("read")]),
    ],
)
def test_contradictions_of_kept_payloads_are_found(complaint: str, records: list[Record]) -> None:
    found = list(contradictions({KEPT_KEY: ["A"], COUNTED: ["A"]}, records))
    assert any(complaint in one for one in found), found


def test_what_a_producer_must_have_been_told() -> None:
    """All before the last task with an answer; nothing of what went by a connection that broke."""
    entries = [
        Entry("put.1.1", "read", 0),
        Entry("many.2.2", "read", 0),
        Entry("many.2.3", "read", 0),
        Entry("put.4.4", "begin"),
    ]
    killed = Record("reader", "A", 0, True, entries)
    assert killed.completed == [("put.1.1", 0)]
    answered = Record("reader", "A", 0, True, [*entries, Entry("put.4.4", "back")])
    assert answered.completed == [("put.1.1", 0), ("many.2.2", 0), ("many.2.3", 0)]
    lost = Record("reader", "A", 0, False, [*entries, Entry("put.4.4", "lost")])
    assert lost.completed == [("put.1.1", 0)]
    assert Record("reader", "A", 0, False, entries).completed == answered.completed


@pytest.mark.parametrize("story", CONSISTENT)
def test_consistent_logs(story: str) -> None:
    assert list(contradictions(ORDERS, CONSISTENT[story])) == []


@pytest.mark.parametrize("events", CONTRADICTIONS)
def test_contradictions_are_found(events: str) -> None:
    found = list(contradictions(ORDERS, CONTRADICTIONS[events]))
    assert any(events in complaint for complaint in found), found


def test_what_was_released_at_a_cut_may_be_denied() -> None:
    """Two tasks about the cut; what was answered before it and after it is certain."""
    read = [Entry(f"k{number}", "read", 0) for number in range(6)]
    record = Record("reader", "A", 0, False, with_cuts(read, [2]))
    assert record.reads == [entry.payload for entry in read]
    denied = {key for key, _ in record.reads} - {key for key, _ in record.completed}
    assert denied == {"k1", "k2", "k3"}
    assert with_cuts(read, []) == read
