"""The judge of the restarts' diaries: what it accepts, and each contradiction that it sees."""

from __future__ import annotations

import pytest
from evidence import Entry, Witness, complaints

ORDERS = {"k": ["A", "B"]}


def producer(*words: str, killed: bool = False) -> Witness:
    states = [Entry("k", word) for word in words]
    return Witness("producer", "P", 0, killed, [Entry("k", "put", 2), *states])


def reader(who: str, *keys: str, killed: bool = False, life: int = 0) -> Witness:
    return Witness("reader", who, 0, killed, [Entry(key, "read", life) for key in keys])


TOLD = Witness("reader", "B", 0, False, [Entry("k", "TransferTimeout")])
A_TWICE = [producer("released"), reader("A", "k", killed=True), reader("A", "k")]
"""Killed when it had let go of it, and in doubt: it asked again."""
OTHER = Witness("producer", "P", 0, True, [Entry("x", "put", 9), Entry("y", "put", 9)])
FINE = {
    "both had it": [producer("released"), reader("A", "k"), reader("B", "k")],
    "who may have had it had it again": [
        producer("released"),
        reader("A", "k"),
        reader("B", "k", killed=True),
        reader("B", "k"),
    ],
    "who was killed had it after all": [
        producer("released"),
        reader("A", "k"),
        reader("B", "k", killed=True),
    ],
    "one never came": [producer("expired"), reader("A", "k"), reader("B")],
    "who was in doubt took another's share, who heard of it": [*A_TWICE, TOLD],
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
    "B never had k, and": [*A_TWICE, reader("B")],
    "nobody put ('k', 7)": [producer("released"), reader("A", "k", life=7), reader("B", "k")],
    "WRONG": [producer("released"), Witness("reader", "A", 0, False, [Entry("k", "WRONG")])],
    "BROKE": [producer("released"), Witness("reader", "A", 0, False, [Entry("-", "BROKE")])],
    "for 2, 3…3 reads": [
        producer("released"),
        reader("A", "k", "x", killed=True),
        reader("A", "k"),
        reader("B", "k"),
        OTHER,
    ],
}


@pytest.mark.parametrize("story", FINE)
def test_what_may_be(story: str) -> None:
    assert list(complaints(ORDERS, FINE[story])) == []


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_contradiction_is_seen(words: str) -> None:
    found = list(complaints(ORDERS, CONTRADICTIONS[words]))
    assert any(words in complaint for complaint in found), found
