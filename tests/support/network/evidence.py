"""Checks the logs of a campaign for contradictions.

A reader writes down what it has seen before it leaves a payload: the log of a process that was
killed tells what it had. "read" and "chunk" say that it saw all bytes of the payload, or of one
chunk of an append stream, and leaves them as read; "back" that it gives them back.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

from support.network.features import is_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Payload: TypeAlias = tuple[str, int]
"""A key, and the number of the producer's incarnation that put it; each has other bytes."""


UNREAD = ("TransferFailed", "TransferTimeout")
"""Errors by which a reader learns that it will not get a payload."""
ANSWERS = ("read", "chunk", "ended", "back", "told", "TransferFailed")
"""What a reader learns from its producer, which has received all that it sent before."""
BROKEN = ("WRONG", "BROKE", "LEAK", "LATE")
"""A wrong byte, an error that no call may raise, what was not freed, and a call that ended late."""
DENIED = ("failed", "expired")
GONE = ("withdrawn", "evicted")
"""Ends of kept payloads, which deny nothing: some readers may have had them, and some not."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of a log.

    Args:
        key: The payload's key.
        event: "put", "read", a receipt's state or an error's name.
        number: Of "put" the number of readers; of "read" the incarnation of the producer.
        part: The number of a chunk; of "put" the number of all chunks, -1 for a payload.
    """

    key: str
    event: str
    number: int = -1
    part: int = -1

    @property
    def payload(self) -> Payload:
        return self.key, self.number


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
        """Payloads that it has read, and streams whose end it has reached."""
        return _whole(self.entries)

    @property
    def completed(self) -> list[Payload]:
        """Those of which the producer knows it, whatever became of this process."""
        return _whole(self.certain)

    @cached_property
    def certain(self) -> list[Entry]:
        """What the producer must have been told of.

        Of a killed reader, all before its last task with an answer: what it sends arrives in order.
        Nothing is certain of what was sent before a connection was lost.
        """
        certain, sent, current = list[Entry](), list[Entry](), list[Entry]()
        task = ""
        for entry in self.entries:
            if task_of(entry.key) != task:
                task, sent, current = task_of(entry.key), sent + current, []
            if entry.event == "lost":
                sent, current = [], []
            elif entry.event in ANSWERS:
                certain, sent = certain + sent, []
                current.append(entry)
        return certain if self.killed else certain + sent + current


def task_of(key: str) -> str:
    """The name of a task: payloads that are put and got together have the same."""
    return key.rpartition(".")[0] or key


def _whole(entries: Sequence[Entry]) -> list[Payload]:
    return [entry.payload for entry in entries if entry.event in ("read", "ended")]


def parse(path: Path) -> list[Entry]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines]
    return [Entry(key, event, int(number), int(part)) for key, event, number, part in rows]


def with_cuts(entries: Sequence[Entry], cuts: Sequence[int]) -> list[Entry]:
    """Return a reader's entries with "lost" where its connection was cut by others.

    `cuts` are the numbers of entries that there were then. The reader goes on as if nothing had
    been: what it releases meanwhile, the end of that task and the next one, may be lost.
    """
    found, left = list[Entry](), 0
    for number, entry in enumerate(entries):
        if number in cuts:
            found.append(Entry(entry.key, "lost"))
            left = 2
        found.append(entry)
        following = entries[number + 1] if number + 1 < len(entries) else None
        if left and (following is None or task_of(following.key) != task_of(entry.key)):
            found.append(Entry(entry.key, "lost"))
            left -= 1
    return found


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
            if entry.event in BROKEN:
                yield f"{record.peer}.{record.number}: {entry.key} {entry.event}"
    yield from _receipts(producers, readers)
    yield from _kept(producers, readers)
    yield from _deliveries(orders, producers, readers)


def _receipts(producers: Sequence[Record], readers: Sequence[Record]) -> Iterator[str]:
    """Compare each receipt with what readers had."""
    completed = Counter(payload for reader in readers for payload in reader.completed)
    read = Counter(payload for reader in readers for payload in reader.reads)
    chunks = _Chunks(readers)
    known = set()
    for producer in producers:
        states = {entry.key: entry.event for entry in producer.entries if entry.event != "put"}
        for entry in producer.entries:
            # Nobody has a receipt of what is looked up; `_kept` has those of what is kept.
            if entry.event in ("insert", "keep"):
                known.add((entry.key, producer.number))
            if entry.event != "put":
                continue
            payload, state = (entry.key, producer.number), states.get(entry.key, "")
            known.add(payload)
            done, seen = completed[payload], read[payload]
            text = f"{payload}: {state or 'no'} receipt, for {entry.number}, {done}…{seen} reads"
            is_stream = entry.part >= 0
            yield from chunks.problems(payload, entry, text, is_released=state == "released")
            if done > entry.number:
                yield f"twice: {text}"
            elif state == "released" and seen < entry.number and not is_stream:
                yield f"lost: {text}"
            elif state in DENIED and done == entry.number:
                yield f"delivered, but denied: {text}"
            elif state not in ("released", *DENIED) and not producer.killed:
                yield f"not ended: {text}"
    for payload in (read.keys() | chunks.payloads) - known:
        yield f"nobody put {payload}, which was read"


def _kept(producers: Sequence[Record], readers: Sequence[Record]) -> Iterator[str]:
    """Compare receipts of kept payloads with what readers were told of them.

    A producer withdraws a task's payloads when its last one has ended, which a reader reads after
    those that are kept.
    """
    ends = {}
    for producer in producers:
        states = {entry.key: entry.event for entry in producer.entries}
        for entry in producer.entries:
            state = states[entry.key]
            if entry.event == "keep" and state not in (*GONE, *DENIED) and not producer.killed:
                yield f"not ended: {entry.key} of {producer.number}, kept: {state}"
            if entry.event == "keep" and not producer.killed:
                ends[entry.key, producer.number] = state
        # Of a task whose last payload was not released, others were withdrawn early.
        released = {task_of(key) for key, state in states.items() if state == "released"}
        ends = {
            (key, number): "withdrawn early" if early else state
            for (key, number), state in ends.items()
            for early in [number == producer.number and task_of(key) not in released]
        }
    for reader in readers:
        for number, entry in enumerate(reader.entries):
            after = reader.entries[number + 1 :]
            reads_on = any(
                task_of(one.key) == task_of(entry.key)
                and not is_kept(one.key)
                and one.event == "read"
                and one.number == entry.number
                for one in after
            )
            if entry.event == "missing" and reads_on and ends.get(entry.payload) == "withdrawn":
                who = f"{reader.peer}.{reader.number}"
                yield f"{who}: {entry.payload} was missing while it was kept"


class _Chunks:
    """What all readers together have of each chunk of each append stream."""

    def __init__(self, readers: Sequence[Record]):
        self._seen = self._count(chain.from_iterable(reader.entries for reader in readers))
        self._certain = self._count(chain.from_iterable(reader.certain for reader in readers))
        events = [entry for reader in readers for entry in reader.entries]
        self._redirects = [entry for entry in events if entry.event == "told"]
        self._from = [entry for entry in events if entry.event == "from"]
        self.payloads = {payload for payload, _ in self._seen}

    @staticmethod
    def _count(entries: Iterator[Entry]) -> Counter[tuple[Payload, int]]:
        return Counter((one.payload, one.part) for one in entries if one.event == "chunk")

    def problems(
        self, payload: Payload, put: Entry, text: str, *, is_released: bool
    ) -> Iterator[str]:
        for part in range(put.part):
            if self._certain[payload, part] > put.number:
                yield f"chunk {part} was read {self._certain[payload, part]} times: {text}"
            seen = self._seen[payload, part]
            # A reader that knew of nobody's chunks but its own has said that it needs no earlier.
            seen += sum(one.key == put.key and one.part > part for one in self._from)
            if is_released and seen < put.number:
                yield f"lost: chunk {part} had {seen} readers: {text}"
            if not seen and any(
                one.payload == payload and one.part > part for one in self._redirects
            ):
                yield f"lost: chunk {part} was refused to the next reader: {text}"


def _deliveries(
    orders: Mapping[str, Sequence[str]],
    producers: Sequence[Record],
    readers: Sequence[Record],
) -> Iterator[str]:
    completed = Counter((r.peer, key) for r in readers for key, _ in r.completed)
    read = {(r.peer, key) for r in readers for key in keys_read(r, chunk_counts(producers))}
    events = {(entry.key, entry.event) for producer in producers for entry in producer.entries}
    shares = Counter((r.peer, payload) for r in readers for payload in r.reads)
    # A killed reader that repeats a get whose payload it had released takes another's share.
    taken = {(key, peer) for (peer, (key, _)), times in shares.items() if times > 1}
    not_delivered = {
        (r.peer, entry.key) for r in readers for entry in r.entries if entry.event in UNREAD
    }
    unwritten = {key for producer in producers if producer.killed for key in _unwritten(producer)}
    redirected = {key for _, key in not_delivered if key in unwritten}
    for key, names in orders.items():
        for name in names:
            if completed[name, key] > 1 and not is_kept(key):
                yield f"{name} read {key} {completed[name, key]} times"
            ends = (*DENIED, *GONE) if (name, key) in not_delivered else DENIED
            denied = key in redirected or {(key, state) for state in ends} & events
            by_another = any(owner == key and peer != name for owner, peer in taken)
            if by_another and (name, key) in not_delivered:
                continue
            if (name, key) not in read and not denied:
                yield f"{name} never had {key}, and no receipt says so"


def _unwritten(producer: Record) -> set[str]:
    """Keys whose receipts a producer did not write down before it was killed."""
    states = ("released", *DENIED, *GONE)
    ended = {entry.key for entry in producer.entries if entry.event in states}
    return (_keys_of(producer, "put") | _keys_of(producer, "keep")) - ended


def _keys_of(record: Record, event: str) -> set[str]:
    return {entry.key for entry in record.entries if entry.event == event}


def chunk_counts(producers: Sequence[Record]) -> dict[str, int]:
    """The number of chunks of each append stream."""
    puts = (entry for record in producers for entry in record.entries if entry.event == "put")
    return {entry.key: entry.part for entry in puts if entry.part >= 0}


def keys_read(reader: Record, counts: Mapping[str, int]) -> set[str]:
    """What a reader has read to the end, or, of an append stream, to the last chunk."""
    last = {
        entry.key
        for entry in reader.entries
        if entry.event == "chunk" and entry.part + 1 == counts.get(entry.key)
    }
    return last | {key for key, _ in reader.reads}
