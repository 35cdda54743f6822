"""Kept payloads in a simulation: what producers and readers do with them, and who may see what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink import MissingError, PeerLostError

if TYPE_CHECKING:
    from typing import Any

    from omni_kvlink.connectors.protocol.get_table import GetTable
    from support.simulation.parties import Producer, SimConsumer, SimPeer

KEPT_KEYS = "cde"
"""Keys that payloads are kept under; the first has other payloads, too."""
OUTCOMES = ("missing", "withdrawn", "evicted", "asked")


def evict(producer: Producer) -> None:
    """Evict a payload: one that nobody uses."""
    chosen = producer.transfers.kept.find_least_recent()
    if producer.alive and producer.transfers.kept.evict():
        assert chosen is not None
        assert chosen.state.value == "evicted"
        assert not (chosen.leases | chosen.pins | chosen.views), "it was evicted while in use"


def withdraw(producer: Producer, key: str) -> None:
    """Withdraw a payload, also while readers have it."""
    if producer.alive:
        producer.transfers.kept.withdraw(key)


def withdraw_all(producer: Producer) -> None:
    """Withdraw what is kept."""
    for transfer in producer.reserved:
        if transfer.is_kept:
            withdraw(producer, transfer.key)


def found_now(producer: Producer, key: str) -> bool:
    """Whether a get would have a payload: told by the transfers, not by the table of the live."""
    return any(
        transfer.key == key
        and transfer.is_committed
        and not transfer.is_done
        and transfer.unclaimed > 0
        and producer.clock.now < transfer.expires
        for transfer in producer.reserved
    )


class Question:
    """What a reader asks by `contains`; the answer is what was so when it was given."""

    def __init__(
        self,
        reader: SimConsumer,
        producer: Producer,
        peer: SimPeer,
        get_table: GetTable[Any],
        key: str,
    ):
        self._reader, self._key = reader, key
        try:
            self._query = get_table.query([key])
        except PeerLostError:
            return
        reader.open += 1
        self._given = producer.answers.setdefault((peer, self._query.number), [])
        self._query.answer.add_done_callback(lambda _: self._answered())

    def _answered(self) -> None:
        self._reader.open -= 1
        if self._query.answer.error is not None:
            self._reader.outcomes["asked in vain"] += 1
            return
        assert self._query.answer.result() in self._given, f"{self._key!r}: {self._given}"
        self._reader.outcomes["asked"] += 1


def outcome_of(error: BaseException | None) -> str:
    """How a get ended that was not delivered."""
    return "missing" if isinstance(error, MissingError) else "failed"
