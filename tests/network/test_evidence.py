"""The check of a campaign's logs: what it accepts, and each contradiction that it finds."""

from __future__ import annotations

import pytest
from evidence import Entry, Record, contradictions

ORDERS = {"k": ["A", "B"]}


def producer(*events: str, killed: bool = False) -> Record:
    states = [Entry("k", word) for word in events]
    return Record("producer", "P", 0, killed, [Entry("k", "put", 2), *states])


def reader(peer: str, *keys: str, killed: bool = False, incarnation: int = 0) -> Record:
    return Record("reader", peer, 0, killed, [Entry(key, "read", incarnation) for key in keys])


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


@pytest.mark.parametrize("story", CONSISTENT)
def test_consistent_logs(story: str) -> None:
    assert list(contradictions(ORDERS, CONSISTENT[story])) == []


@pytest.mark.parametrize("events", CONTRADICTIONS)
def test_contradictions_are_found(events: str) -> None:
    found = list(contradictions(ORDERS, CONTRADICTIONS[events]))
    assert any(events in complaint for complaint in found), found
