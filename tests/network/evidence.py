"""What the diaries of a campaign prove, and what contradicts them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

Payload: TypeAlias = tuple[str, int]
"""A key, and the life of the producer that put it: no two have the same bytes."""


UNREAD = ("TransferFailed", "TransferTimeout")
"""How a reader hears that it will not have a payload."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a diary.

    Args:
        number: of "put" for how many readers; of "read" which life of the producer made the bytes.
    """

    key: str
    word: str
    number: int = -1


@dataclasses.dataclass(frozen=True)
class Witness:
    """One life's diary.

    Args:
        killed: whether SIGKILL ended it.
    """

    role: str
    who: str
    number: int
    killed: bool
    entries: Sequence[Entry]

    @property
    def reads(self) -> list[Payload]:
        return [(entry.key, entry.number) for entry in self.entries if entry.word == "read"]

    @property
    def completed(self) -> list[Payload]:
        """Read to the end and let go of, which was heard: something else was read after it.

        Of the last one that a killed reader read nobody knows whether letting go of it was heard.
        """
        return self.reads[:-1] if self.killed else self.reads


def parse(path: Path) -> list[Entry]:
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines]
    return [Entry(key, word, int(number)) for key, word, number in words]


def complaints(orders: Mapping[str, Sequence[str]], witnesses: Sequence[Witness]) -> Iterator[str]:
    """Contradictions to: each payload was read once by each of its readers, or ended otherwise.

    Args:
        orders: the readers that each key is for.
    """
    producers = [witness for witness in witnesses if witness.role == "producer"]
    readers = [witness for witness in witnesses if witness.role == "reader"]
    for witness in witnesses:
        for entry in witness.entries:
            if entry.word in ("WRONG", "BROKE"):
                yield f"{witness.who}.{witness.number}: {entry.key} {entry.word}"
    yield from _receipts(producers, readers)
    yield from _deliveries(orders, producers, readers)


def _receipts(producers: Sequence[Witness], readers: Sequence[Witness]) -> Iterator[str]:
    completed = Counter(payload for reader in readers for payload in reader.completed)
    read = Counter(payload for reader in readers for payload in reader.reads)
    known = set()
    for producer in producers:
        states = {entry.key: entry.word for entry in producer.entries if entry.word != "put"}
        for entry in producer.entries:
            if entry.word != "put":
                continue
            payload, state = (entry.key, producer.number), states.get(entry.key, "")
            known.add(payload)
            done, seen = completed[payload], read[payload]
            story = f"{payload}: {state or 'no'} receipt, for {entry.number}, {done}…{seen} reads"
            if done > entry.number:
                yield f"twice: {story}"
            elif state == "released" and seen < entry.number:
                yield f"lost: {story}"
            elif state in ("failed", "expired") and done == entry.number:
                yield f"delivered, but denied: {story}"
            elif state not in ("released", "failed", "expired") and not producer.killed:
                yield f"not ended: {story}"
    for payload in read.keys() - known:
        yield f"nobody put {payload}, which was read"


def _deliveries(
    orders: Mapping[str, Sequence[str]],
    producers: Sequence[Witness],
    readers: Sequence[Witness],
) -> Iterator[str]:
    completed = Counter((r.who, key) for r in readers for key, _ in r.completed)
    read = {(r.who, key) for r in readers for key, _ in r.reads}
    words = {(entry.key, entry.word) for producer in producers for entry in producer.entries}
    shares = Counter((r.who, payload) for r in readers for payload in r.reads)
    # A reader that was killed, and asked again for what it had let go of, took another's share.
    taken = {(key, who) for (who, (key, _)), times in shares.items() if times > 1}
    heard = {(r.who, entry.key) for r in readers for entry in r.entries if entry.word in UNREAD}
    for key, names in orders.items():
        for name in names:
            if completed[name, key] > 1:
                yield f"{name} read {key} {completed[name, key]} times"
            told = {(key, "failed"), (key, "expired")} & words
            by_another = any(owner == key and who != name for owner, who in taken)
            if by_another and (name, key) in heard:
                continue
            if (name, key) not in read and not told:
                yield f"{name} never had {key}, and no receipt says so"
