"""Checks the logs of a campaign for contradictions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Payload: TypeAlias = tuple[str, int]
"""A key, and the number of the producer's incarnation that put it; each has other bytes."""


UNREAD = ("TransferFailed", "TransferTimeout")
"""Errors by which a reader learns that it will not get a payload."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a log.

    Args:
        key: The payload's key.
        event: "put", "read", a receipt's state or an error's name.
        number: Of "put" the number of readers; of "read" the incarnation of the producer.
    """

    key: str
    event: str
    number: int = -1


@dataclasses.dataclass(frozen=True)
class Record:
    """The log of one process.

    Args:
        role: "producer" or "reader".
        peer: Its name.
        number: How many processes of this name were before.
        killed: Whether SIGKILL ended it.
        entries: What it wrote.
    """

    role: str
    peer: str
    number: int
    killed: bool
    entries: Sequence[Entry]

    @property
    def reads(self) -> list[Payload]:
        return [(entry.key, entry.number) for entry in self.entries if entry.event == "read"]

    @property
    def completed(self) -> list[Payload]:
        """Payloads whose release the producer has received.

        Of the last payload that a killed reader read, this is not known.
        """
        return self.reads[:-1] if self.killed else self.reads


def parse(path: Path) -> list[Entry]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines]
    return [Entry(key, event, int(number)) for key, event, number in rows]


def contradictions(orders: Mapping[str, Sequence[str]], records: Sequence[Record]) -> Iterator[str]:
    """Yield contradictions to: each reader reads each of its payloads once, or the receipt says no.

    Args:
        orders: The readers that each key is for.
        records: The logs of all processes.
    """
    producers = [record for record in records if record.role == "producer"]
    readers = [record for record in records if record.role == "reader"]
    for record in records:
        for entry in record.entries:
            if entry.event in ("WRONG", "BROKE", "LEAK"):
                yield f"{record.peer}.{record.number}: {entry.key} {entry.event}"
    yield from _receipts(producers, readers)
    yield from _deliveries(orders, producers, readers)


def _receipts(producers: Sequence[Record], readers: Sequence[Record]) -> Iterator[str]:
    completed = Counter(payload for reader in readers for payload in reader.completed)
    read = Counter(payload for reader in readers for payload in reader.reads)
    known = set()
    for producer in producers:
        states = {entry.key: entry.event for entry in producer.entries if entry.event != "put"}
        for entry in producer.entries:
            if entry.event != "put":
                continue
            payload, state = (entry.key, producer.number), states.get(entry.key, "")
            known.add(payload)
            done, seen = completed[payload], read[payload]
            text = f"{payload}: {state or 'no'} receipt, for {entry.number}, {done}…{seen} reads"
            if done > entry.number:
                yield f"twice: {text}"
            elif state == "released" and seen < entry.number:
                yield f"lost: {text}"
            elif state in ("failed", "expired") and done == entry.number:
                yield f"delivered, but denied: {text}"
            elif state not in ("released", "failed", "expired") and not producer.killed:
                yield f"not ended: {text}"
    for payload in read.keys() - known:
        yield f"nobody put {payload}, which was read"


def _deliveries(
    orders: Mapping[str, Sequence[str]],
    producers: Sequence[Record],
    readers: Sequence[Record],
) -> Iterator[str]:
    completed = Counter((r.peer, key) for r in readers for key, _ in r.completed)
    read = {(r.peer, key) for r in readers for key, _ in r.reads}
    events = {(entry.key, entry.event) for producer in producers for entry in producer.entries}
    shares = Counter((r.peer, payload) for r in readers for payload in r.reads)
    # A killed reader that repeats a get whose payload it had released takes another's share.
    taken = {(key, peer) for (peer, (key, _)), times in shares.items() if times > 1}
    not_delivered = {
        (r.peer, entry.key) for r in readers for entry in r.entries if entry.event in UNREAD
    }
    for key, names in orders.items():
        for name in names:
            if completed[name, key] > 1:
                yield f"{name} read {key} {completed[name, key]} times"
            denied = {(key, "failed"), (key, "expired")} & events
            by_another = any(owner == key and peer != name for owner, peer in taken)
            if by_another and (name, key) in not_delivered:
                continue
            if (name, key) not in read and not denied:
                yield f"{name} never had {key}, and no receipt says so"
