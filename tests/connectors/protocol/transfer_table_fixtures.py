"""An exchange driven by hand: a clock of our own, every message recorded."""

from __future__ import annotations

from omni_kvlink.connectors.protocol.messages import Location, Message, Offer
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable

HERE = Location(0, 4096, 100)


class Bench:
    """An exchange, what it said to whom, and what it freed."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Message]] = []
        self.freed: list[Transfer] = []
        self.transfers = TransferTable(self._send, self.freed.append)

    def _send(self, peer: object, message: Message) -> None:
        self.said.append((str(peer), message))

    def put(self, key: str, readers: int = 1, expires: float = 100.0) -> Transfer:
        transfer = self.transfers.reserve(key)
        self.transfers.commit(transfer, HERE, readers, expires)
        return transfer

    def request(self, peer: str, number: int, key: str, now: float = 0.0) -> None:
        self.transfers.request(peer, number, key, now)

    def release(
        self, peer: str, number: int, transfer: Transfer, outcome: str = "read", now: float = 0.0
    ) -> None:
        self.transfers.release(peer, number, transfer.epoch, outcome, "bad", now)  # type: ignore[arg-type]

    def heard(self) -> list[tuple[str, Message]]:
        said, self.said = self.said, []
        return said

    def offers(self) -> list[tuple[str, Message]]:
        return [said for said in self.heard() if isinstance(said[1], Offer)]


def offer(number: int, transfer: Transfer) -> Offer:
    return Offer(number, transfer.epoch, HERE)
