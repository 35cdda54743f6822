"""The producer's half of the protocol: one state machine for every connector, without I/O.

    RESERVED --commit--> COMMITTED --offer--> LEASED --every reader released--> RELEASED
     |   |                   |  ttl: EXPIRED    |  reader lost: COMMITTED again
     | begin             commit                 |
     |   +--> STREAMING -----+                  |
     +-----------+- fail, abort, close: FAILED -+

While STREAMING it is offered to readers that take layers as they come; each layer is announced.

It is driven by calls and answers through `send` and `free`, both called under the owner's lock,
so neither may block or call back. Time is an argument: tests drive it with a clock of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.messages import (
    Committed,
    Ending,
    Failed,
    Layer,
    Location,
    Message,
    Offer,
    Outcome,
    Status,
    short,
)
from omni_kvlink.connectors.protocol.transfer import Claim, Peer, Transfer, TransferState
from omni_kvlink.errors import DuplicateKeyError, TransferFailed

MAX_TOMBSTONES = 4096
TOMBSTONE_SECONDS = 300.0
MAX_WANTS = 1 << 16


class TransferTable:
    """All transfers of a producer, and who waits for which.

    Args:
        send: takes a message for a peer; may drop it if the peer is gone.
        free: told when a transfer's memory may be reused.
    """

    def __init__(self, send: Callable[[Peer, Message], None], free: Callable[[Transfer], None]):
        self._send, self._free = send, free
        self._epoch, self._now = 0, 0.0
        self._live: dict[str, Transfer] = {}
        self._leased: dict[int, Transfer] = {}
        self._pinned: set[Transfer] = set()
        self._wants: dict[str, OrderedDict[Claim, bool]] = {}
        self._tombstones: OrderedDict[str, tuple[float, str, Ending]] = OrderedDict()
        self.counters = dict.fromkeys(
            ("committed", "released", "failed", "expired", "redelivered", "stale"), 0
        )

    # Calls of the producer itself

    def reserve(self, key: str) -> Transfer:
        """Claim a key for a payload in the making.

        Raises:
            DuplicateKeyError: a live payload has it.
        """
        other = self._live.get(key)
        if other is not None:
            raise DuplicateKeyError(
                f"key {key!r} is taken by a payload that is {other.state.value}; "
                "wait for its receipt, or abort it"
            )
        self._epoch += 1
        transfer = self._live[key] = Transfer(key, self._epoch)
        self._tombstones.pop(key, None)
        for peer, get_id in self._wants.get(key, ()):
            self._send(peer, Status(get_id, _PHASE[TransferState.RESERVED]))
        return transfer

    def give_up(self, transfer: Transfer, reason: str, now: float) -> None:
        """The writer cannot finish it: who waits is told why. Another payload of its key is not
        touched: this one may have been ended, and the key put again, long before.
        """
        if transfer.has_writer and not transfer.state.is_final:
            self.fail(transfer.key, reason, "failed", now)
        self.discard(transfer)

    def discard(self, transfer: Transfer) -> None:
        """Give up a reservation that was never committed; who waits goes on waiting.

        A stream was announced, so its readers are told. After `commit` this changes nothing.
        """
        if not transfer.has_writer:
            return
        transfer.has_writer = False
        if transfer.state is TransferState.STREAMING:
            self._end(transfer, TransferState.FAILED, "its producer gave it up", "failed")
            return
        if self._live.get(transfer.key) is transfer:
            del self._live[transfer.key]
            transfer.state, transfer.reason = TransferState.FAILED, "it was given up unwritten"
            transfer.settled.set()
        self._free_if_unseen(transfer)

    def begin(
        self,
        transfer: Transfer,
        location: Location,
        draft: int,
        readers: int,
        direct: DirectSource | None = None,
    ) -> None:
        """Offer a payload that is still being written to readers that take its layers.

        Args:
            direct: where it lies, if that is its caller's memory: it may be committed when it
                `is_taken`, and cannot be delivered again then.
        """
        self._check_writing(transfer)
        transfer.direct = direct
        transfer.location, transfer.draft, transfer.unclaimed = location, draft, readers
        transfer.state = TransferState.STREAMING
        self._offer(transfer)

    def announce(self, transfer: Transfer, first: int, digests: tuple[bytes, ...]) -> None:
        """The tensors from number `first` on are written.

        Raises:
            TransferFailed: the transfer was aborted, or a reader rejected it.
        """
        self._check_writing(transfer)
        transfer.layers.append((first, digests))
        for peer, get_id in transfer.leases:
            self._send(peer, Layer(get_id, first, digests))

    def took(self, transfer: Transfer, claim: Claim, start: int, stop: int) -> None:
        """Bytes have left for a reader."""
        if transfer.direct is not None:
            transfer.direct.took(claim, start, stop)
            self._see_if_taken(transfer)

    def commit(self, transfer: Transfer, location: Location, readers: int, expires: float) -> None:
        """The payload is whole: offer it to `readers` readers until `expires`.

        Of a stream, `begin` said where it lies and for how many readers.

        Raises:
            TransferFailed: it was aborted while it was being written.
        """
        self._check_writing(transfer)
        if transfer.state is TransferState.RESERVED:
            transfer.location, transfer.unclaimed = location, readers
        transfer.expires, transfer.has_writer, transfer.is_whole = expires, False, True
        if transfer.direct is not None:
            transfer.direct.give_back()
        transfer.state = TransferState.LEASED if transfer.leases else TransferState.COMMITTED
        self.counters["committed"] += 1
        for peer, get_id in transfer.leases:
            self._send(peer, Committed(get_id))
        self._offer(transfer)
        if not transfer.unclaimed and not transfer.leases:
            self._end(transfer, TransferState.RELEASED, "", "closed")

    def lend(self, transfer: Transfer) -> None:
        """The caller holds tensors of the payload: its memory waits for `give_back`."""
        transfer.is_lent = True

    def give_back(self, transfer: Transfer) -> None:
        """The last tensor that was lent is gone."""
        transfer.is_lent = False
        self._free_if_unseen(transfer)

    def fail(self, key: str, reason: str, ending: Ending, now: float) -> None:
        """There is, or will be, no payload `key`: tell who waits, remember it for who comes."""
        transfer = self._live.get(key)
        if transfer is not None:
            self._end(transfer, TransferState.FAILED, reason, ending)
        self._add_tombstone(key, reason, ending, now)

    def close(self, reason: str) -> None:
        """End everything; every want is answered."""
        for transfer in list(self._live.values()):
            self._end(transfer, TransferState.FAILED, reason, "closed")
        for claims in self._wants.values():
            for peer, get_id in claims:
                self._send(peer, Failed(get_id, reason, "closed"))
        self._wants.clear()

    def tick(self, now: float) -> float:
        """Expire what is due; returns when to call next."""
        for transfer in list(self._live.values()):
            if transfer.expires <= now and transfer.is_offerable:
                reason = f"its time to live passed with {transfer.unclaimed} readers missing"
                self._end(transfer, TransferState.EXPIRED, reason, "expired")
                self._add_tombstone(transfer.key, reason, "expired", now)
        while self._tombstones and next(iter(self._tombstones.values()))[0] <= now:
            self._tombstones.popitem(last=False)
        return min((t.expires for t in self._live.values() if t.is_offerable), default=float("inf"))

    def has_waiting_reader(self, key: str) -> bool:
        """Whether somebody waits who would take it while it is being written."""
        return any(self._wants.get(key, {}).values())

    # What peers say

    def request(
        self, peer: Peer, get_id: int, key: str, now: float, *, streamed: bool = False
    ) -> None:
        """A reader asks, before or after the payload exists."""
        transfer, claim, self._now = self._live.get(key), (peer, get_id), now
        if transfer is None and key in self._tombstones:
            _, reason, ending = self._tombstones[key]
            self._send(peer, Failed(get_id, reason, ending))
            return
        claims = self._wants.get(key, OrderedDict())
        if len(self._wants) >= MAX_WANTS or len(claims) >= MAX_WANTS:
            self._send(
                peer, Failed(get_id, f"more than {MAX_WANTS} readers wait already", "failed")
            )
            return
        self._wants.setdefault(key, claims)[claim] = streamed
        if transfer is not None:
            self._offer(transfer)
            if claim in self._wants.get(key, ()):
                self._send(peer, Status(get_id, _PHASE[transfer.state]))

    def cancel(self, peer: Peer, get_id: int) -> None:
        """A reader waits no more; what was offered to it meanwhile goes back unread."""
        for key, claims in self._wants.items():
            if (peer, get_id) in claims:
                self._forget(key, (peer, get_id))
                return
        for transfer, claim in self._held_by(peer):
            if claim == (peer, get_id):
                self._drop_lease(transfer, claim, redeliver=True)

    def release(
        self, peer: Peer, get_id: int, epoch: int, outcome: Outcome, reason: str, now: float
    ) -> None:
        """A reader let go. Stale words (of an earlier epoch, or said twice) change nothing."""
        transfer = self._leased.get(epoch)
        if transfer is None or (peer, get_id) not in transfer.leases:
            self.counters["stale"] += 1
            return
        if outcome == "rejected" and not transfer.state.is_final:
            self._end(transfer, TransferState.FAILED, f"a reader rejected it: {reason}", "failed")
            self._add_tombstone(transfer.key, transfer.reason, "failed", now)
        self._drop_lease(transfer, (peer, get_id), redeliver=outcome == "unread")

    def leased(self, peer: Peer, get_id: int, epoch: int) -> Transfer | None:
        """What a reader has on lease and may fetch, ended or not; unless a stream broke off."""
        transfer = self._leased.get(epoch)
        if transfer is None or (peer, get_id) not in transfer.leases:
            return None
        return transfer if transfer.is_whole or not transfer.state.is_final else None

    def leave(self, peer: Peer) -> None:
        """A peer asks for nothing more: its wants are void, what it holds it will release."""
        for key, claims in list(self._wants.items()):
            for claim in [claim for claim in claims if claim[0] == peer]:
                self._forget(key, claim)

    def detach(self, peer: Peer) -> bool:
        """A peer is cut off but lives, and may look at what it held until `lost` says otherwise.

        That can be delivered again, and ends as it would; only its memory is not reused.
        Returns whether there is any.
        """
        self.leave(peer)
        for transfer, claim in self._held_by(peer):
            transfer.pins.add(peer)
            self._pinned.add(transfer)
            self._drop_lease(transfer, claim, redeliver=True)
        return any(peer in transfer.pins for transfer in self._pinned)

    def lost(self, peer: Peer) -> None:
        """A peer is gone: its wants are void, what it held can be delivered again."""
        self.leave(peer)
        for transfer, claim in self._held_by(peer):
            self._drop_lease(transfer, claim, redeliver=True)
        for transfer in [transfer for transfer in self._pinned if peer in transfer.pins]:
            transfer.pins.discard(peer)
            if not transfer.pins:
                self._pinned.discard(transfer)
            self._free_if_unseen(transfer)

    def stats(self) -> dict[str, int]:
        """Numbers now (live, leased, waiting, pinned) and since the start."""
        waiting = sum(len(claims) for claims in self._wants.values())
        leased = sum(len(transfer.leases) for transfer in self._leased.values())
        now = {"live": len(self._live), "leased": leased, "waiting": waiting}
        return {**now, "pinned": len(self._pinned), **self.counters}

    # The machine

    def _check_writing(self, transfer: Transfer) -> None:
        if transfer.state not in (TransferState.RESERVED, TransferState.STREAMING):
            raise TransferFailed(
                f"key {transfer.key!r} was ended while it was being put: {transfer.reason}",
                key=transfer.key,
                reason=transfer.reason,
            )

    def _offer(self, transfer: Transfer) -> None:
        """Give the payload to who waits longest, as far as readers are missing."""
        if transfer.location is None or not transfer.unclaimed:
            return  # before the list of who waits, which may be long, is copied
        for claim, streamed in list(self._wants.get(transfer.key, {}).items()):
            if not transfer.unclaimed:
                return
            if transfer.is_for(streamed):
                self._forget(transfer.key, claim)
                self._lease(transfer, transfer.location, claim)

    def _lease(self, transfer: Transfer, location: Location, claim: Claim) -> None:
        transfer.unclaimed -= 1
        transfer.leases.add(claim)
        self._leased[transfer.epoch] = transfer
        peer, get_id = claim
        if transfer.state is not TransferState.STREAMING:
            transfer.state = TransferState.LEASED
            self._send(peer, Offer(get_id, transfer.epoch, location))
            return
        direct = transfer.direct is not None
        self._send(peer, Offer(get_id, transfer.epoch, location, transfer.draft, direct))
        for first, digests in transfer.layers:
            self._send(peer, Layer(get_id, first, digests))
        self._see_if_taken(transfer)

    def _drop_lease(self, transfer: Transfer, claim: Claim, *, redeliver: bool) -> None:
        transfer.leases.discard(claim)
        if not transfer.leases:
            self._leased.pop(transfer.epoch, None)
        if transfer.state.is_final:
            self._free_if_unseen(transfer)
            return
        if redeliver and transfer.is_whole and transfer.direct is not None:
            reason = "its reader was lost; it was sent from tensors that are the caller's again"
            self._end(transfer, TransferState.FAILED, reason, "failed")
            self._add_tombstone(transfer.key, reason, "failed", self._now)
            return
        if redeliver:
            transfer.unclaimed += 1
            self.counters["redelivered"] += 1
        if transfer.state is TransferState.LEASED and transfer.unclaimed and not transfer.leases:
            transfer.state = TransferState.COMMITTED
        if redeliver:
            self._offer(transfer)
        elif (
            transfer.state is TransferState.LEASED
            and not transfer.unclaimed
            and not transfer.leases
        ):
            self._end(transfer, TransferState.RELEASED, "", "closed")
        self._see_if_taken(transfer)

    def _see_if_taken(self, transfer: Transfer) -> None:
        if transfer.is_taken:
            transfer.taken.set()

    def _end(self, transfer: Transfer, state: TransferState, reason: str, ending: Ending) -> None:
        """Reach a final state; the memory is freed now, or when nobody is on it any more.

        Who reads a stream is told; a payload that was committed is theirs whatever becomes of it.
        """
        if transfer.state is TransferState.STREAMING:
            for peer, get_id in transfer.leases:
                self._send(peer, Failed(get_id, short(reason), ending))
        transfer.state, transfer.reason = state, reason
        if self._live.get(transfer.key) is transfer:
            del self._live[transfer.key]
        self.counters[state.value] += 1
        transfer.settle()
        self._free_if_unseen(transfer)

    def _free_if_unseen(self, transfer: Transfer) -> None:
        is_seen = transfer.leases or transfer.pins or transfer.has_writer or transfer.is_lent
        if transfer.state.is_final and not is_seen:
            self._free(transfer)

    def _held_by(self, peer: Peer) -> list[tuple[Transfer, Claim]]:
        leased = self._leased.values()
        return [(t, claim) for t in leased for claim in t.leases if claim[0] == peer]

    def _add_tombstone(self, key: str, reason: str, ending: Ending, now: float) -> None:
        reason = short(reason)
        self._tombstones.pop(key, None)
        self._tombstones[key] = (now + TOMBSTONE_SECONDS, reason, ending)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        for peer, get_id in self._wants.pop(key, ()):
            self._send(peer, Failed(get_id, reason, ending))

    def _forget(self, key: str, claim: Claim) -> None:
        self._wants[key].pop(claim, None)
        if not self._wants[key]:
            del self._wants[key]


_PHASE = {
    TransferState.RESERVED: "announced, the producer is still writing it",
    TransferState.STREAMING: "announced, the producer is still writing it",
    TransferState.COMMITTED: "announced, not fetched",
    TransferState.LEASED: "announced, but every declared reader has it already",
}
