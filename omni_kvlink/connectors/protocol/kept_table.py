"""`KeptTable`: the payloads of a producer that any number of readers may get.

A payload is kept until its producer withdraws it, or until it is evicted: a put that finds no
memory evicts the least recently used one that nobody uses. To be got, or asked for by `contains`,
is to be used.

A key may end in an identity, "name@" and 32 hexadecimal digits: see `CacheIdentity`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from omni_kvlink.connectors.protocol.transfer import TransferState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from omni_kvlink.connectors.protocol.transfer import Transfer

IDENTITY_CHARS = 33
"""Characters of the identity at the end of a key: "@", and the digits."""
_LOOKED_AT = 64
"""Payloads at which one search for those that are idle unknown to the table looks, at most."""
_MOST_QUERIES = 4
"""Calls of `contains` whose keys are not marked as used yet, at most."""
OTHER_IDENTITY = "the producer keeps it under another identity, whose bytes would be wrong"


class Backing(Protocol):
    """Finds payloads that are not in memory; called under the owner's lock: never blocks."""

    def holds(self, key: str) -> bool:
        """Whether `request` would bring this key's payload."""

    def holds_other_identity(self, key: str) -> bool:
        """Whether there is a payload of the key's name under another identity."""

    def request(self, key: str) -> bool:
        """Have the payload of a key put soon; False if there is none.

        Where it turns out that there is none, `TransferTable.fail_missing` ends the gets that wait.
        """


_backing: ContextVar[Backing | None] = ContextVar("_backing", default=None)


@contextmanager
def backed_by(backing: Backing | None) -> Iterator[None]:
    """Give each `KeptTable` that is made in the block this backing.

    A connector's `serve` makes the table and answers gets before it returns; a table without its
    backing would answer them that there is no such payload.
    """
    token = _backing.set(backing)
    try:
        yield
    finally:
        _backing.reset(token)


class KeptTable:
    """The kept payloads of a `TransferTable`, whose payloads are `live`; under the owner's lock.

    `end` ends one in the state that it is given. `on_idle` is called when one may be evicted that
    could not be before; it must not block.
    """

    def __init__(
        self, live: Mapping[str, Transfer], end: Callable[[Transfer, TransferState], None]
    ):
        self._live, self._end = live, end
        self._kept: OrderedDict[str, Transfer] = OrderedDict()  # in the order of the search
        self._idle: OrderedDict[str, Transfer] = OrderedDict()  # the least recently used first
        self._queries: list[Sequence[str]] = []  # of `contains`, not marked as used yet
        self._names: Counter[str] = Counter()  # of kept keys that have an identity
        self.on_idle: Callable[[], None] = lambda: None
        self.backing = _backing.get()
        self.counters = {"missed": 0, "other_identity": 0}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, transfer: Transfer) -> None:
        """Keep a payload that was committed; again after an interrupt."""
        if transfer.key not in self._kept:
            self._kept[transfer.key] = transfer
            if name := name_of(transfer.key):
                self._names[name] += 1
        self.release(transfer)

    def remove(self, transfer: Transfer) -> None:
        """Forget a payload that has ended."""
        self._idle.pop(transfer.key, None)
        if self._kept.get(transfer.key) is not transfer:
            return  # it was never committed, or an interrupt came below
        del self._kept[transfer.key]
        if name := name_of(transfer.key):
            self._names[name] -= 1
            if self._names[name] <= 0:
                del self._names[name]

    def lease(self, transfer: Transfer) -> None:
        """A reader has it: it is not evicted."""
        self._idle.pop(transfer.key, None)

    def release(self, transfer: Transfer) -> None:
        """No reader may have it any more; it is the most recently used one then."""
        if transfer.is_idle and self._kept.get(transfer.key) is transfer:
            self._mark_queried()
            self._idle[transfer.key] = transfer
            self._idle.move_to_end(transfer.key)
            self.on_idle()

    def find(self, key: str) -> Transfer | None:
        """Return the kept payload of a key, if it is complete."""
        transfer = self._live.get(key)
        is_here = transfer is not None and transfer.is_kept and transfer.is_committed
        return transfer if is_here else None

    def withdraw(self, key: str) -> bool:
        """End a kept payload; False if there is none. Its readers go on, and new ones wait."""
        transfer = self.find(key)
        if transfer is None:
            return False
        self._end(transfer, TransferState.WITHDRAWN)
        return True

    def evict(self) -> bool:
        """End the payload that nobody uses and that was used least recently; False if none."""
        transfer = self.find_least_recent()
        if transfer is None:
            return False
        self._end(transfer, TransferState.EVICTED)
        return True

    def find_least_recent(self) -> Transfer | None:
        """Return the least recently used payload whose memory nothing uses; None if all are used.

        One that an interrupt has lost is found when there is no other: each call looks at a few,
        so that a put which finds all in use holds up nobody.
        """
        self._mark_queried()
        for transfer in self._idle.values():
            if transfer.is_idle:
                return transfer
        for key in list(islice(self._kept, _LOOKED_AT)):
            if (transfer := self._kept[key]).is_idle:
                return transfer
            self._kept.move_to_end(key)
        return None

    def contains(self, keys: Sequence[str], now: float) -> tuple[bool, ...]:
        """Return whether each key has a complete payload that a reader would get at once."""
        answers, live = [], self._live
        for key in keys:
            transfer = live.get(key)
            if transfer is not None and transfer.is_offerable and now < transfer.expires:
                answers.append(True)
            else:
                answers.append(transfer is None and self._is_backed(key))
                if not answers[-1]:
                    self.count_miss(key)
        self._queries.append(keys)
        if len(self._queries) > _MOST_QUERIES:
            self._mark_queried()
        return tuple(answers)

    def _mark_queried(self) -> None:
        """Mark the keys of earlier calls of `contains` as used, which no answer waits for."""
        queries, self._queries = self._queries, []
        for keys in queries:
            for key in keys:
                if key in self._idle:
                    self._idle.move_to_end(key)

    def count_miss(self, key: str) -> str:
        """Count a reader that did not find a key; return why, if it is here otherwise, or ""."""
        self.counters["missed"] += 1
        is_otherwise = bool(self._names) and name_of(key) in self._names
        if not is_otherwise and self.backing is not None:
            is_otherwise = self.backing.holds_other_identity(key)
        if is_otherwise:
            self.counters["other_identity"] += 1
            return OTHER_IDENTITY
        return ""

    def _is_backed(self, key: str) -> bool:
        return self.backing is not None and self.backing.holds(key)


def name_of(key: str) -> str:
    """Return the name in a key that ends in an identity; "" if it does not."""
    is_identified = len(key) > IDENTITY_CHARS and key[-IDENTITY_CHARS] == "@"
    return key[:-IDENTITY_CHARS] if is_identified else ""
