"""`Pins`: payloads whose memory a disconnected reader, whose process lives, may still read."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Claim, Peer, Transfer


class Pins:
    """The pinned transfers of a `TransferTable`, by epoch; under the owner's lock.

    A pin is the claim of a get: a transfer has them in `pins`.
    """

    def __init__(self) -> None:
        self._transfers: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: Transfer, claim: Claim) -> None:
        """Pin a transfer for a get that had a lease of it."""
        transfer.pins |= {claim}
        self._transfers[transfer.epoch] = transfer

    def remove(self, transfer: Transfer, claims: set[Claim]) -> None:
        """Unpin a transfer for these gets."""
        transfer.pins -= claims
        if not transfer.pins:
            self._transfers.pop(transfer.epoch, None)

    def find(self, epoch: int, claim: Claim) -> Transfer | None:
        """The transfer of this epoch, if it is pinned for this get."""
        transfer = self._transfers.get(epoch)
        return transfer if transfer is not None and claim in transfer.pins else None

    def by_peer(self, peer: Peer) -> list[tuple[Transfer, set[Claim]]]:
        """The transfers that a peer has pinned, and its pins of each."""
        own = [
            (transfer, {pin for pin in transfer.pins if pin[0] == peer})
            for transfer in self._transfers.values()
        ]
        return [(transfer, pins) for transfer, pins in own if pins]

    def nbytes(self) -> Counter[Peer]:
        """The bytes of the payloads that each disconnected peer may still read."""
        nbytes: Counter[Peer] = Counter()
        for transfer in self._transfers.values():
            for peer in {peer for peer, _ in transfer.pins}:
                nbytes[peer] += transfer.location.nbytes if transfer.location is not None else 0
        return nbytes

    def describe(self) -> str:
        """Return the disconnected processes that keep memory, with the cure; "" if none does."""
        pinned = sorted((getattr(peer, "name", ""), n) for peer, n in self.nbytes().items())
        if not pinned:
            return ""
        readers = ", ".join(f"{name}: {nbytes} bytes" for name, nbytes in pinned)
        text = "memory is kept for processes that were disconnected and may still read it"
        return f"; {text} ({readers}): end those processes"

    def list_after(self, epoch: int, limit: int) -> list[Transfer]:
        """The transfers above an epoch, in the order of their epochs, `limit` of them at most."""
        epochs = sorted(self._transfers)
        first = bisect_right(epochs, epoch)
        return [self._transfers[number] for number in epochs[first : first + limit]]
