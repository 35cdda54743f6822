"""The producer's half of the protocol: a state machine of its transfers, without I/O.

    RESERVED --commit--> COMMITTED --offer--> LEASED --every reader released--> RELEASED
     |   |                   |  ttl: EXPIRED    |  reader lost: COMMITTED again
     | layers.begin      commit                 |
     |   +--> STREAMING -----+                  |
     +-----------+- fail, abort, close: FAILED -+

A kept payload (`readers=None`) is COMMITTED again when its readers have released it. It ends as
WITHDRAWN, also while it is LEASED, or, if nothing uses it and memory is wanted, as EVICTED.

A STREAMING transfer is offered to consumers that take layers while it is written. That of an append
stream (`Transfer.window`) has chunks instead, transfers which its readers get one by one; see
`AppendTable`.

`send` and `free` are called under the owner's lock: neither may block or call back. Time is an
argument (`time.monotonic` seconds), so that tests can drive the table with a clock of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_kvlink.connectors.protocol.append_table import AppendTable
from omni_kvlink.connectors.protocol.expiries import MAX_EXPIRED, Expiries
from omni_kvlink.connectors.protocol.kept_table import KeptTable
from omni_kvlink.connectors.protocol.layer_table import LayerTable
from omni_kvlink.connectors.protocol.messages import (
    Committed,
    Ending,
    Failed,
    Get,
    Layer,
    Location,
    Message,
    Offer,
    Outcome,
    Status,
    shorten,
)
from omni_kvlink.connectors.protocol.phases import (
    IS_APPEND_STREAM,
    IS_PAYLOAD,
    LOADING,
    MISSING,
    PHASES,
)
from omni_kvlink.connectors.protocol.pins import Pins
from omni_kvlink.connectors.protocol.tombstones import Tombstones
from omni_kvlink.connectors.protocol.transfer import Claim, Peer, Transfer, TransferState
from omni_kvlink.connectors.protocol.waiting_gets import WHOLE, WaitingGets
from omni_kvlink.errors import DuplicateKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# By name: an attribute of an enum's class takes ten times as long, and a small put asks for nine.
(
    RESERVED,
    STREAMING,
    COMMITTED,
    LEASED,
    RELEASED,
    FAILED,
    EXPIRED,
    WITHDRAWN,
    EVICTED,
) = TransferState
_DELIVERED = RELEASED, WITHDRAWN, EVICTED
_NO_NAMES = "", ""


class TransferTable:
    """All transfers of a producer, and the gets that wait for them.

    Not thread-safe: every call is made with the owner's lock held. `send` takes a message for a
    peer, and may drop it if the peer is gone; `free` is called when a transfer's memory may be
    reused. `counters` count events since the start.
    """

    def __init__(self, send: Callable[[Peer, Message], None], free: Callable[[Transfer], None]):
        self._send, self._free = send, free
        self._epoch, self._now = 0, 0.0
        self._live: dict[str, Transfer] = {}
        self._expiries = Expiries()
        self._waiting = WaitingGets()
        self._leases: dict[Peer, dict[int, Transfer]] = {}  # by get
        self._tombstones = Tombstones()
        self.pins = Pins()
        self.kept = KeptTable(self._live, self._end_kept)
        self.layers = LayerTable(send, self._offer)
        self._appends = AppendTable(send, self._add_lease, self._end)
        self.counters = dict.fromkeys(
            (
                "committed",
                *("released", "failed", "expired", "withdrawn", "evicted"),
                *("redelivered", "stale", "refused"),
            ),
            0,
        )

    # Calls of the producer itself

    # A caller has a transfer before it begins, and ends it by `abort` after any exception.

    def reserve(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers, not written yet; DuplicateKeyError if a live payload has the key of one.

        The chunk of an append stream has its stream's key.
        """
        for transfer in transfers:
            if transfer.stream is None and transfer.key in self._live:
                self._check_free(transfer.key)
        for transfer in transfers:
            self._add(transfer)
        for transfer in transfers:
            if transfer.stream is None:
                self._notify(transfer.key, RESERVED)

    def _notify(self, key: str, state: TransferState) -> None:
        """Tell the gets that wait for a key how far its payload is."""
        for (peer, get_id), _ in self._waiting.by_key(key):
            self._send(peer, Status(get_id, PHASES[state]))

    def abort(self, transfer: Transfer, reason: str = "", now: float = 0.0) -> None:
        """End a transfer that is not written to any more, also one that did not begin.

        After `commit` this changes nothing.

        Readers of a stream are told. No other transfer of the same key is touched: this one may
        have ended long before, and the key may have been put again. A `reason` fails the gets that
        wait for the key, and those of the next minutes from `now` on; without one they go on
        waiting for another payload.
        """
        is_final = transfer.state.is_final
        has_ended = is_final and transfer.block is None
        if not transfer.has_writer and (transfer.is_committed or has_ended):
            return  # else an interrupt ended an earlier call
        if reason and not is_final:
            self.fail(transfer.key, reason, "failed", now)
        transfer.has_writer = False
        if transfer.state is STREAMING:
            self._end(transfer, FAILED, "its producer gave it up", "failed")
            return
        if self._live.get(transfer.key) is transfer:
            del self._live[transfer.key]
        if transfer.is_lost:
            transfer.finish(FAILED, "it was given up unwritten")
        self._free_if_unused(transfer)

    def commit(
        self, payloads: Sequence[tuple[Transfer, Location]], readers: int | None, expires: float
    ) -> None:
        """Offer complete payloads, each to `readers` readers until `expires`; on an error none.

        With `readers` None each is kept. A transfer that was not reserved begins now. Of a stream,
        `LayerTable.begin` set the location and the readers. DuplicateKeyError if a live payload has
        the key of one that begins, TransferFailed if one was aborted while it was being written.
        """
        for transfer, _ in payloads:
            if transfer.epoch or transfer.stream is not None:
                (transfer.stream or transfer).check_writing()
            elif transfer.key in self._live:
                self._check_free(transfer.key)
        for transfer, location in payloads:
            if not transfer.epoch:
                self._add(transfer)
            if transfer.stream is not None:
                self._appends.append(transfer.stream, transfer, location)
                self.counters["committed"] += 1
            else:
                self._commit(transfer, location, readers, expires)

    def lend(self, transfer: Transfer, view: object) -> None:
        """Keep the memory until `on_view_freed`: the caller has a view of it, or it is sent."""
        transfer.views |= {view}
        if transfer.is_kept:
            self.kept.lease(transfer)

    def on_view_freed(self, transfer: Transfer, view: object) -> None:
        """The last reference to a view was dropped."""
        transfer.views -= {view}
        if transfer.is_kept:
            self.kept.release(transfer)
        self._free_if_unused(transfer)

    def fail(self, key: str, reason: str, ending: Ending, now: float) -> None:
        """Fail the payload `key`, the gets that wait for it, and later gets for a while."""
        transfer = self._live.get(key)
        if transfer is not None:
            self._end(transfer, FAILED, reason, ending)
        self._fail_gets(key, self._tombstones.add_failed(key, reason, ending, now), ending)

    def fail_missing(self, key: str, reason: str) -> None:
        """Fail the gets that wait for a key, unless it has a payload; later ones may wait again."""
        for claim, _ in [] if key in self._live else self._waiting.by_key(key):
            self.kept.count_miss(key)
            self._fail_get(key, claim, shorten(reason), "missing")

    def close(self, reason: str) -> None:
        """Fail every transfer and every waiting get."""
        for transfer in list(self._live.values()):
            self._end(transfer, FAILED, reason, "closed")
        for peer, get_id in self._waiting.clear():
            self._send(peer, Failed(get_id, reason, "closed"))

    def tick(self, now: float) -> float:
        """Expire transfers and tombstones that are due; return when to call next.

        At most `MAX_EXPIRED` transfers a call: `now` is returned if more may be due, so that other
        threads get the owner's lock in between.
        """
        self._now = max(self._now, now)
        if self._tombstones.failed or self._tombstones.aborted:
            self._tombstones.tick(now)
        for _ in range(MAX_EXPIRED):
            if (due := self._expiries.next_time()) > now:
                return due
            transfer = self._expiries.pop()
            if transfer.is_offerable:
                reason = f"its time to live passed with {transfer.missing_readers}"
                self._end(transfer, EXPIRED, reason, "expired")
                reason = self._tombstones.add_failed(transfer.key, reason, "expired", now)
                self._fail_gets(transfer.key, reason, "expired")
        return now

    def has_waiting_reader(self, key: str) -> bool:
        """Return whether a get waits for `key` that takes it while it is being written."""
        return any(streamed for _, (streamed, _) in self._waiting.by_key(key))

    def find_leased(self, peer: Peer, get_id: int, epoch: int) -> Transfer | None:
        """Return the transfer that a get may fetch bytes of, or None if it has no such lease.

        A committed one can be fetched also after it ended; a stream that failed cannot.
        """
        transfer = self._find_lease(peer, get_id, epoch)
        if transfer is None or (transfer.state.is_final and not transfer.is_committed):
            return None
        return transfer

    def stats(self) -> dict[str, int]:
        """Return the numbers now (live, leased, waiting, pinned) and those since the start."""
        waiting = len(self._waiting) + self._appends.waiting
        leased = sum(map(len, self._leases.values()))
        now = {"live": len(self._live), "leased": leased, "waiting": waiting}
        kept = {"pinned": len(self.pins), "kept": len(self.kept)}
        return {**now, **kept, **self.counters, **self.kept.counters}

    @property
    def live(self) -> list[Transfer]:
        """The payloads that are live, in the order of their epochs."""
        return list(self._live.values())

    # Events of the peers

    def on_get(self, peer: Peer, get: Get, now: float) -> None:
        """A consumer requests a key or a chunk, before or after it exists."""
        get_id, key, claim = get.get_id, get.key, (peer, get.get_id)
        transfer, self._now = self._live.get(key), now
        tombstone = self._tombstones.failed.get(key) or self._tombstones.aborted.get(key)
        if get.stream not in (0, get_id):
            is_taken = get_id in self._leases.get(peer, ())
            self._appends.on_get(transfer, peer, get, tombstone, is_taken=is_taken)
            return
        if transfer is None and tombstone is not None:
            self._send(peer, Failed(get_id, tombstone.reason, tombstone.ending))
            return
        reason = self._waiting.refusal(peer, key)
        is_known = self._waiting.find_key(peer, get_id) is not None
        if not reason and (is_known or get_id in self._leases.get(peer, ())):
            reason = f"get {get_id} waits already, or has a payload"
        if reason:
            self.counters["refused"] += 1
            self._send(peer, Failed(get_id, reason, "failed"))
            return
        start = get.chunk if get.stream else WHOLE
        self._waiting.add(key, claim, (get.streamed, start))
        if transfer is not None:
            self._offer_to(transfer, claim, get.streamed, start)  # the others wait for a reason
        if self._waiting.is_waiting(key, claim):  # its reader may be here before the next put
            self._leave_waiting(claim, key, transfer, waits=get.waits)

    def on_cancel(self, peer: Peer, get_id: int) -> None:
        """A get is cancelled; what it was offered meanwhile is delivered to another one."""
        key = self._waiting.find_key(peer, get_id)
        if key is not None:
            self._waiting.remove(key, (peer, get_id))
            return
        if self._appends.cancel(peer, get_id):
            return
        transfer = self._leases.get(peer, {}).get(get_id)
        if transfer is not None:
            self._end_lease(transfer, (peer, get_id), redeliver=True)

    def on_abort(self, key: str, reason: str, now: float) -> None:
        """A consumer ends a key for both sides, also one that is not put yet."""
        if key in self._live:
            self.fail(key, reason, "aborted", now)
        else:
            self._fail_gets(key, self._tombstones.add_aborted(key, reason, now), "aborted")

    def on_release(
        self, peer: Peer, get_id: int, epoch: int, outcome: Outcome, reason: str, now: float
    ) -> None:
        """A consumer ends its lease; a stale message (earlier epoch, repeated) changes nothing.

        One that was disconnected meanwhile reads the memory no more.
        """
        transfer = self._find_lease(peer, get_id, epoch)
        if transfer is None:
            pinned = self.pins.find(epoch, (peer, get_id))
            if pinned is not None:
                self._unpin(pinned, {(peer, get_id)})
            else:
                self.counters["stale"] += 1
            return
        if outcome == "rejected":
            self.on_reject(peer, get_id, epoch, reason, now)
        self._end_lease(transfer, (peer, get_id), redeliver=outcome == "unread")

    def on_reject(self, peer: Peer, get_id: int, epoch: int, reason: str, now: float) -> None:
        """A consumer found wrong bytes: the transfer fails; the lease goes on until `on_release`.

        A stale message changes nothing.
        """
        transfer = self._find_lease(peer, get_id, epoch)
        if transfer is None:
            self.counters["stale"] += 1
        elif not transfer.state.is_final:
            self.fail(transfer.key, f"a reader rejected it: {reason}", "failed", now)

    def cancel_gets(self, peer: Peer) -> None:
        """Cancel the waiting gets of a peer; its leases stay."""
        for get_id, key in self._waiting.by_peer(peer):
            self._waiting.remove(key, (peer, get_id))
        self._appends.cancel_gets(peer)

    def on_disconnect(self, peer: Peer) -> bool:
        """A peer is disconnected, but its process lives and may read the memory of its leases.

        The payloads can be delivered again and end as they would; only their memory is not reused
        until the peer's `on_release`, or `on_peer_lost`. Returns whether there is such memory.
        """
        self.cancel_gets(peer)
        for get_id, transfer in list(self._leases.get(peer, {}).items()):
            self.pins.add(transfer, (peer, get_id))
            self._end_lease(transfer, (peer, get_id), redeliver=True)
        return bool(self.pins.by_peer(peer))

    def on_peer_lost(self, peer: Peer) -> None:
        """A peer is gone: cancel its gets, deliver its leases to others, unpin its memory."""
        self.cancel_gets(peer)
        for get_id, transfer in list(self._leases.get(peer, {}).items()):
            self._end_lease(transfer, (peer, get_id), redeliver=True)
        for transfer, pins in self.pins.by_peer(peer):
            self._unpin(transfer, pins)

    # Inside

    def _commit(
        self, transfer: Transfer, location: Location, readers: int | None, expires: float
    ) -> None:
        if transfer.state is RESERVED:
            transfer.location, transfer.unclaimed = location, readers or 1
            transfer.is_kept = readers is None
        try:
            # In one line: an interrupt comes before it or after it.
            transfer.expires, transfer.has_writer, transfer.is_committed = expires, False, True
            self.counters["committed"] += 1
            if transfer.direct is not None:
                transfer.direct.release_tensors()
            transfer.state = LEASED if transfer.leases else COMMITTED
            for peer, get_id in transfer.leases:
                self._send(peer, Committed(get_id, transfer.extra))
            if transfer.window is not None:
                self._appends.fail_gets(transfer.window, "the stream has ended", "complete")
            if transfer.is_kept:
                self.kept.add(transfer)
            self._offer(transfer)
            # Last, because a reader may sleep until it has the offer.
            self._expiries.add(transfer, len(self._live))
        except BaseException:  # an interrupt, at any line
            if transfer.is_committed and not transfer.state.is_final:
                self._expiries.add(transfer, len(self._live))
                transfer.state = LEASED if transfer.leases else COMMITTED
                if transfer.is_kept:
                    self.kept.add(transfer)
                self._offer(transfer)  # again: a reader may be sent its offer twice
            raise
        if not transfer.unclaimed and not transfer.leases:
            self._end(transfer, RELEASED, "", "closed")

    def _add(self, transfer: Transfer) -> None:
        key, is_payload = transfer.key, transfer.stream is None
        if is_payload and self._live.setdefault(key, transfer) is not transfer:
            self._check_free(key)
        self._epoch += 1
        transfer.epoch = self._epoch
        if is_payload:
            for endings in self._tombstones.all:
                if key in endings:  # a `pop` takes four times as long
                    del endings[key]

    def _check_free(self, key: str) -> None:
        other = self._live.get(key)
        if other is not None:
            cure = "withdraw it" if other.is_kept else "wait for its receipt, or abort it"
            state = f"{other.state.value}{' and kept' * other.is_kept}"
            raise DuplicateKeyError(f"key {key!r} is taken by a payload that is {state}; {cure}")

    def _unpin(self, transfer: Transfer, claims: set[Claim]) -> None:
        self.pins.remove(transfer, claims)
        if transfer.is_kept:
            self.kept.release(transfer)
        self._free_if_unused(transfer)

    def _offer(self, transfer: Transfer) -> None:
        """Lease the payload to the gets that wait longest, as long as readers are missing."""
        if transfer.location is None or not (transfer.unclaimed or transfer.leases):
            return  # before the list of waiting gets, which may be long, is copied
        for claim, (streamed, start) in self._waiting.by_key(transfer.key):
            if not transfer.unclaimed and claim not in transfer.leases:
                return
            self._offer_to(transfer, claim, streamed, start)

    def _offer_to(self, transfer: Transfer, claim: Claim, streamed: bool, start: int) -> None:
        """Lease the payload to a get that waits, if it can be, or fail the get if it never can."""
        is_leased = claim in transfer.leases  # an interrupt came before its offer was sent
        if self._now >= transfer.expires and not is_leased:
            return  # `tick` expires it: readers that come and go do not keep it
        if transfer.location is None or not (transfer.unclaimed or is_leased):
            return
        if (start == WHOLE) is not (transfer.window is None):
            reason = IS_APPEND_STREAM if transfer.window is not None else IS_PAYLOAD
            self._fail_get(transfer.key, claim, reason, "failed")
        elif streamed or transfer.state is not STREAMING:
            if transfer.window is not None and not is_leased:
                transfer.window.add_reader(claim, start)
            self._lease(transfer, transfer.location, claim)
            self._waiting.remove(transfer.key, claim)
            if transfer.window is not None:
                self._appends.release_read(transfer)

    def _lease(self, transfer: Transfer, location: Location, claim: Claim) -> None:
        if claim not in transfer.leases:
            unclaimed = transfer.unclaimed - (not transfer.is_kept)
            # In one line: an interrupt comes before it or after it.
            transfer.unclaimed, transfer.leases = unclaimed, transfer.leases | {claim}
        if transfer.is_kept:
            self.kept.lease(transfer)
        self._add_lease(transfer, claim)
        peer, get_id = claim
        path: str = getattr(peer, "path_names", _NO_NAMES)[bool(transfer.inline)]
        if path != transfer.path and path not in transfer.path.split(", "):
            transfer.path = f"{transfer.path}, {path}" if transfer.path else path
        if transfer.state is not STREAMING:
            transfer.state = LEASED
            inline = memoryview(transfer.inline)
            extra = transfer.extra
            offer = Offer(get_id, transfer.epoch, location, inline=inline, extra=extra)
            self._send(peer, offer)
            return
        direct = transfer.direct is not None
        self._send(peer, Offer(get_id, transfer.epoch, location, transfer.draft, direct))
        for first, digests in transfer.layers or ():
            self._send(peer, Layer(get_id, first, digests))
        transfer.check_sent()

    def _find_lease(self, peer: Peer, get_id: int, epoch: int) -> Transfer | None:
        transfer = self._leases.get(peer, {}).get(get_id)
        return transfer if transfer is not None and transfer.epoch == epoch else None

    def _add_lease(self, transfer: Transfer, claim: Claim) -> None:
        if claim not in transfer.leases:
            transfer.leases |= {claim}
        peer, get_id = claim
        self._leases.setdefault(peer, {})[get_id] = transfer

    def _end_lease(self, transfer: Transfer, claim: Claim, *, redeliver: bool) -> None:
        transfer.leases -= {claim}
        peer, get_id = claim
        leases = self._leases[peer]
        leases.pop(get_id, None)
        if not leases:
            del self._leases[peer]
        was_final = transfer.state.is_final
        if transfer.stream is not None:
            self._appends.end_lease(transfer, claim, is_read=not redeliver)
        if was_final:
            self._free_if_unused(transfer)
        if was_final or transfer.stream is not None:
            return
        if transfer.window is not None:
            self._appends.remove_reader(transfer, claim, is_lost=redeliver)
        if redeliver and transfer.is_committed and transfer.direct is not None:
            reason = "its reader was lost; it was sent from tensors that are the caller's again"
            self.fail(transfer.key, reason, "failed", self._now)
            return
        if redeliver:
            transfer.unclaimed += not transfer.is_kept
            transfer.lost_readers += 1
            self.counters["redelivered"] += 1
            if transfer.is_committed:
                self._expiries.add(transfer, len(self._live))
        is_idle = transfer.state is LEASED and not transfer.leases
        if is_idle and transfer.unclaimed:
            transfer.state = COMMITTED
            if transfer.is_kept:
                self.kept.release(transfer)
        if redeliver:
            self._offer(transfer)
        elif is_idle and not transfer.unclaimed:
            self._end(transfer, RELEASED, "", "closed")
        if transfer.direct is not None:
            transfer.check_sent()

    def _end(self, transfer: Transfer, state: TransferState, reason: str, ending: Ending) -> None:
        """Reach a final state; readers of an unfinished stream are told.

        A committed payload stays with its readers; its memory is freed when nothing uses it.
        """
        if transfer.state is STREAMING:
            for peer, get_id in transfer.leases:
                self._send(peer, Failed(get_id, shorten(reason), ending))
        if self._live.get(transfer.key) is transfer:
            del self._live[transfer.key]
            if state in _DELIVERED:  # gets that wait, and later ones, are told so
                self._tombstones.add_delivered(transfer.key, state)
                self._notify(transfer.key, state)
        if transfer.is_kept:
            self.kept.remove(transfer)
        if transfer.window is not None:
            self._appends.fail_gets(transfer.window, reason, ending)
            for chunk in transfer.window.take_all():
                self._end(chunk, state, reason, ending)
        self.counters[state._value_] += 1
        if transfer.direct is not None:
            transfer.direct.release_tensors()
        transfer.finish(state, reason)
        self._free_if_unused(transfer)

    def _end_kept(self, transfer: Transfer, state: TransferState) -> None:
        """Withdraw or evict a payload."""
        count = self.counters[state._value_]
        try:
            self._end(transfer, state, PHASES[state], "closed")
        except BaseException:  # an interrupt, at any line: nobody could end it any more
            if transfer.state.is_final:
                self._free_if_unused(transfer)
            else:
                self.counters[state._value_] = count
                self._end(transfer, state, PHASES[state], "closed")
            raise

    def _free_if_unused(self, transfer: Transfer) -> None:
        is_used = transfer.leases or transfer.pins or transfer.has_writer or transfer.views
        if transfer.state.is_final and not is_used:
            self._free(transfer)

    def _fail_gets(self, key: str, reason: str, ending: Ending) -> None:
        for claim, _ in self._waiting.by_key(key):
            self._fail_get(key, claim, reason, ending)

    def _fail_get(self, key: str, claim: Claim, reason: str, ending: Ending) -> None:
        """End a get that waits."""
        self._waiting.remove(key, claim)
        peer, get_id = claim
        self._send(peer, Failed(get_id, reason, ending))

    def _leave_waiting(
        self, claim: Claim, key: str, transfer: Transfer | None, *, waits: bool
    ) -> None:
        """Tell a get how far its payload is; one that does not wait fails."""
        peer, get_id = claim
        backing = self.kept.backing
        if transfer is None and backing is not None and backing.request(key):
            self._send(peer, Status(get_id, LOADING))
            return
        state = self._tombstones.delivered.get(key) if transfer is None else transfer.state
        phase = "" if state is None else PHASES[state]
        if waits:
            if phase:
                self._send(peer, Status(get_id, phase))
            return
        reason = self.kept.count_miss(key) or phase or MISSING
        self._fail_get(key, claim, reason, "missing")
