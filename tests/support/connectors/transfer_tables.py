"""A transfer table driven by hand: the clock is an argument, every message is recorded."""

from __future__ import annotations

from omni_kvlink.connectors.protocol.messages import Get, Location, Message, Offer, Outcome
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable

HERE = Location(0, 4096, 100)


class Bench:
    """A transfer table, the messages it sent to each peer, and what it freed."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, Message]] = []
        self.freed: list[Transfer] = []
        self.transfers = TransferTable(self.send, self.freed.append)

    def send(self, peer: object, message: Message) -> None:
        self._sent.append((str(peer), message))

    def reserve(self, key: str) -> Transfer:
        transfer = Transfer(key)
        self.transfers.reserve([transfer])
        return transfer

    def put(self, key: str, readers: int = 1, expires: float = 100.0) -> Transfer:
        transfer = self.reserve(key)
        self.transfers.commit([(transfer, HERE)], readers, expires)
        return transfer

    def request(self, peer: str, number: int, key: str, now: float = 0.0) -> None:
        self.transfers.on_get(peer, Get(number, key), now)

    def release(
        self,
        peer: str,
        number: int,
        transfer: Transfer,
        outcome: Outcome = "read",
        now: float = 0.0,
    ) -> None:
        self.transfers.on_release(peer, number, transfer.epoch, outcome, "bad", now)

    def sent_messages(self) -> list[tuple[str, Message]]:
        """The messages since the last call, each with its peer."""
        sent, self._sent = self._sent, []
        return sent

    def offers(self) -> list[tuple[str, Message]]:
        return [sent for sent in self.sent_messages() if isinstance(sent[1], Offer)]


def offer(number: int, transfer: Transfer) -> Offer:
    return Offer(number, transfer.epoch, HERE)


def state_of(transfer: Transfer) -> str:
    """Return the name of its state; a call, because mypy narrows the type of an attribute."""
    return transfer.state.value
