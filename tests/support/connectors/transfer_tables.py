"""A transfer table driven by hand: the clock is an argument, every message is recorded."""

from __future__ import annotations

from omni_kvlink.connectors.protocol.messages import Get, Location, Message, Offer, Outcome
from omni_kvlink.connectors.protocol.transfer import Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.memory.block import Block

HERE = Location(0, 4096, 100)


class Bench:
    """A transfer table, the messages it sent to each peer, and what it freed."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, Message]] = []
        self.freed: list[Transfer] = []
        self.made: list[Transfer] = []  # those with a block, which is freed once
        self.idle = 0  # times that a kept payload could be evicted anew
        self.transfers = TransferTable(self.send, self._free)
        self.transfers.kept.on_idle = self._count_idle

    def _free(self, transfer: Transfer) -> None:
        if transfer in self.made and transfer.block is None:
            return  # freed again, as after an interrupt
        transfer.block = None
        self.freed.append(transfer)

    def _count_idle(self) -> None:
        self.idle += 1

    @property
    def taken(self) -> int:
        """Blocks that were not freed, of `made`."""
        return sum(transfer.block is not None for transfer in self.made)

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

    def make(self, key: str) -> Transfer:
        """Return a transfer with memory, which did not begin."""
        self.made.append(Transfer(key, block=Block(0, 0, HERE.nbytes)))
        return self.made[-1]

    def keep(
        self, key: str, expires: float = float("inf"), *, is_reserved: bool = True
    ) -> Transfer:
        """Keep a payload for any number of readers."""
        transfer = self.make(key)
        if is_reserved:
            self.transfers.reserve([transfer])
        self.commit_kept(transfer, expires)
        return transfer

    def commit_kept(self, transfer: Transfer, expires: float = float("inf")) -> None:
        """Commit a payload that is kept."""
        self.transfers.commit([(transfer, HERE)], None, expires)

    def contains(self, *keys: str, now: float = 0.0) -> tuple[bool, ...]:
        return self.transfers.kept.contains(keys, now)

    def request(
        self,
        peer: str,
        number: int,
        key: str,
        now: float = 0.0,
        *,
        streamed: bool = False,
        waits: bool = True,
    ) -> None:
        self.transfers.on_get(peer, Get(number, key, streamed, waits=waits), now)

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

    def evicted(self) -> list[str]:
        """Evict all that can be; return their keys in this order."""
        before = len(self.freed)
        while self.transfers.kept.evict():
            pass
        assert all(state_of(each) == "evicted" for each in self.freed[before:])
        return [each.key for each in self.freed[before:]]

    def check_empty(self) -> None:
        """Nothing is live, leased, waited for, pinned or kept, and nothing can be evicted."""
        stats = self.transfers.stats()
        names = ("live", "leased", "waiting", "pinned", "kept")
        assert {name: stats[name] for name in names} == dict.fromkeys(names, 0)
        assert not self.transfers.kept.evict()
        assert self.taken == 0

    def offers(self) -> list[tuple[str, Message]]:
        return [sent for sent in self.sent_messages() if isinstance(sent[1], Offer)]


def offer(number: int, transfer: Transfer) -> Offer:
    return Offer(number, transfer.epoch, HERE)


def state_of(transfer: Transfer) -> str:
    """Return the name of its state; a call, because mypy narrows the type of an attribute."""
    return transfer.state.value
