"""`PooledProducer`: one lock, one table of transfers, one pool, and the listeners around them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from omni_kvlink.connectors.base import Options, Producer, PutRequest
from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.inspection import inspected_page
from omni_kvlink.connectors.protocol.messages import (
    SLOT,
    Abort,
    Cancel,
    Contained,
    Contains,
    Get,
    Hello,
    Inspect,
    Inspected,
    Location,
    Message,
    Refused,
    Reject,
    Release,
    own_hello,
    unexpected,
    write_head,
)
from omni_kvlink.connectors.protocol.transfer import (
    Claim,
    Ledger,
    PackedLease,
    Peer,
    Receipt,
    Transfer,
)
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.append_window import wait_for_room
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.connectors.runtime.kept_payloads import PooledKeptPayloads
from omni_kvlink.connectors.runtime.listener import (
    Listener,
    PeerHandle,
    open_all,
    path_refusals,
    reader_paths,
)
from omni_kvlink.connectors.runtime.outbox import Outbox
from omni_kvlink.errors import (
    CapacityError,
    ConnectorError,
    SchemaError,
    TransferTimeout,
    WireError,
    format_seconds,
)
from omni_kvlink.memory.arena import ArenaPool
from omni_kvlink.memory.region import CallAtEnd, Lease, Region, call_if_alive

if TYPE_CHECKING:
    from collections import Counter

    from omni_kvlink.memory.mapping import MakeArena
    from omni_kvlink.system.waits import Deadline


Opener = Callable[["PooledProducer"], Listener]
"""Makes a listener of the producer that it is given."""


class PooledProducer(Producer):
    """A producer whose payloads lie in an `ArenaPool`, which maps arenas by `make`.

    The listeners run in the thread of `loop`; if one fails to open, all are closed again. `lock`
    guards `transfers`. `incarnation` identifies this run of the producer. With `is_one_arena`,
    `make` is called once, for all of the quota. `is_shared`: it maps shared memory, new pages of
    which are slow, so that the first arena is mapped ahead even if `Options.prefault` is not given.
    """

    tells_path = True

    def __init__(
        self,
        name: str,
        options: Options,
        make: MakeArena,
        *openers: Opener,
        is_one_arena: bool = False,
        is_shared: bool = False,
    ):
        super().__init__(repr(name))
        self._name, self._options, self.inline_limit = name, options, options.inline
        self.lock = threading.Lock()
        self._outbox = Outbox()
        self.transfers = TransferTable(self._outbox.send, self._free)
        self.listeners: list[Listener] = []
        self.incarnation = os.urandom(8).hex()
        # An RLock, for interrupts: see docs/threads.md.
        self._reserving = threading.RLock()
        pooled = options.mode == "pooled" or is_one_arena
        least = options.quota if is_one_arena else None
        self.pool = ArenaPool(make, options.quota, self._retire_arena, keep=pooled, min_arena=least)
        self.pool.make_room, self.transfers.kept.on_idle = self._evict, self.pool.wake
        if is_one_arena:
            self.pool.prefault(1)
        self.loop = EventLoop(f"kvlink-{name}", self._tick, self._crashed)
        try:
            for opener in openers:
                self.listeners.append(opener(self))
            if refusal := path_refusals(self.listeners, self.require):
                raise ConnectorError(f"link {self._label}: {refusal}")
            self._queueing = [listener for listener in self.listeners if listener.has_queue]
            # Weakly: a thread must not keep it.
            on_mapped = partial(call_if_alive, WeakMethod(self._pass_arena))
            if options.prefault and pooled and not is_one_arena:
                self.pool.begin_prefault(options.prefault_nbytes, on_mapped)
            elif options.prefault is None and pooled and is_shared:
                self.pool.begin_ahead(on_mapped)
            opened = Future[None]()
            self.loop.call(partial(open_all, self.listeners, opened))
            opened.result()
        except BaseException:
            self.close()
            raise

    # For listeners, in the loop's thread

    @property
    def require(self) -> tuple[str, ...]:
        """Requirements for the path to each reader."""
        return self._options.require

    @property
    def hello(self) -> Hello:
        """The answer to a consumer's Hello."""
        transports = [name for listener in self.listeners for name in listener.transports]
        return own_hello(self.incarnation, tuple(transports), self.require)

    def handle(self, peer: Peer, *messages: Message) -> None:
        """Handle messages of a peer after its handshake; what they cause is sent together.

        WireError if it must not send one of them.
        """
        now = time.monotonic()
        with self.lock:
            if len(messages) == 1:
                self._handle(peer, now, messages[0])
            else:
                self._outbox.coalesce(lambda: [*map(partial(self._handle, peer, now), messages)])

    def on_peer_lost(self, peer: Peer) -> None:
        """A peer is gone, and so is its access to the memory."""
        with self.lock:
            self.transfers.on_peer_lost(peer)

    def on_disconnect(self, peer: Peer) -> bool:
        """A peer is disconnected but lives; return whether it may still read leased memory."""
        with self.lock:
            return self.transfers.on_disconnect(peer)

    def pinned(self) -> Counter[Peer]:
        """Return the bytes that each disconnected peer may still read; any thread."""
        with self.lock:
            return self.transfers.pins.nbytes()

    def cancel_gets(self, peer: Peer) -> None:
        """Cancel the waiting gets of a peer; its leases stay."""
        with self.lock:
            self.transfers.cancel_gets(peer)

    def find_leased(self, peer: Peer, get_id: int, epoch: int) -> Transfer | None:
        """Return the transfer that a get may fetch bytes of, or None if it has no such lease."""
        with self.lock:
            return self.transfers.find_leased(peer, get_id, epoch)

    def piece(self, transfer: Transfer, start: int, stop: int) -> Region:
        """Return bytes of a leased payload; those of a stream's draft header follow the payload's.

        Raises WireError if there are no such bytes, or not in one piece.
        """
        if transfer.direct is not None:
            return transfer.direct.find(start, stop)
        assert transfer.location is not None
        nbytes = transfer.location.nbytes + transfer.draft
        if not start <= stop <= nbytes:
            raise WireError(f"bytes {start}…{stop} of {nbytes}")
        if transfer.inline:
            return Region.of_buffer(memoryview(transfer.inline)).slice(start, stop - start)
        assert transfer.block is not None
        return self.pool.region(transfer.block).slice(SLOT + start, stop - start)

    def lend_piece(
        self, transfer: Transfer, claim: Claim, start: int, stop: int, sent: Callable[[int], None]
    ) -> Region:
        """Return bytes to send for `claim`; their memory is kept until their last view is freed.

        Then `sent` is called with their number, in the loop. Raises WireError as `piece` does.
        """
        fault_points.point("send.chunk")
        piece, view = self.piece(transfer, start, stop), object()

        def on_sent() -> None:  # or its connection was closed
            with self.lock:
                transfer.on_sent(claim, start, stop)
                self.transfers.on_view_freed(transfer, view)
            sent(stop - start)

        with self.lock:
            self.transfers.lend(transfer, view)
        CallAtEnd.of(piece.span, partial(self.loop.call, on_sent))
        return piece

    # The contract of `Producer`

    @property
    def bound_url(self) -> tuple[str, str]:
        """The bound address of the first listener that has one."""
        return next((one.bound_url for one in self.listeners if one.bound_url[0]), ("", ""))

    def give_way(self) -> None:
        """Let the loop answer readers."""
        self.loop.give_way()

    @property
    def kept(self) -> PooledKeptPayloads:
        """The kept payloads of the open producer."""
        self._check_open()
        return PooledKeptPayloads(self.transfers, self.lock, self.piece, self.loop.call)

    def has_waiting_reader(self, key: str) -> bool:
        """Return whether a get waits that takes the payload while it is written."""
        self._check_open()
        with self.lock:
            return self.transfers.has_waiting_reader(key)

    def direct_refusal(self, device: str) -> str:
        """Return the reason of the first listener that cannot; "" if all can."""
        return next(filter(None, (one.direct_refusal(device) for one in self.listeners)), "")

    def reserve(
        self, requests: Sequence[PutRequest], *, deadline: Deadline, leases: list[Lease]
    ) -> None:
        """Reserve memory; blocks while the pool, or the window of an append stream, is full."""
        if self._closed:  # the call costs more than the test
            self._check_open()
        transfers: list[Transfer] = []  # `list[Transfer]()` takes longer than `share_all`
        packed: list[Transfer] = []
        sizes: list[int] = []
        for request in requests:
            stream = None if request.stream is None else _transfer(request.stream)
            if stream is not None:
                assert stream.window is not None
                wait_for_room(stream.window, self.lock, deadline)
            transfer = Transfer(request.key, inline=request.packed, stream=stream)
            transfers.append(transfer)
            if request.packed:
                packed.append(transfer)
                sizes.append(request.nbytes)
        try:
            if len(packed) == len(transfers) and self.pool.share_all(sizes, packed):
                leases.extend(map(PackedLease, transfers, repeat(self._abort)))
            else:
                self._reserve_slots(transfers, packed, requests, deadline, leases)
        except BaseException:
            self._end_all(transfers)
            raise

    def _reserve_slots(
        self,
        transfers: Sequence[Transfer],
        packed: Sequence[Transfer],
        requests: Sequence[PutRequest],
        deadline: Deadline,
        leases: list[Lease],
    ) -> None:
        """Reserve slots of the pool, and a part of the quota for packed payloads among others.

        One call at a time waits for the memory of several payloads: two that each have a part of it
        would wait for each other.
        """
        is_batch, total = len(requests) > 1, 0
        for request in requests:
            total += request.nbytes
        if is_batch and total > self._options.quota:
            text = f"{len(requests)} payloads of {total} bytes never fit together into a quota of "
            text += f"{self._options.quota}: put fewer at once, or raise quota="
            raise CapacityError(text, requested=total, free=self._options.quota)
        try:
            timeout = min(deadline.timeout, threading.TIMEOUT_MAX)
            if is_batch and not self._reserving.acquire(timeout=timeout):
                waited = format_seconds(deadline.timeout)
                text = f"another put_many waited for memory for all of {waited}"
                raise CapacityError(text, requested=total)
            if packed:
                sizes, is_mixed = [len(one.inline) for one in packed], len(packed) < len(transfers)
                if not (is_mixed and self.pool.share_all(sizes, packed)):
                    for transfer in packed:  # they get slots, as the others do
                        transfer.inline = b""
            with self.lock:
                if is_batch:
                    self._outbox.coalesce(partial(self.transfers.reserve, transfers))
                else:
                    self.transfers.reserve(transfers)
            for transfer, request in zip(transfers, requests, strict=True):
                if transfer.inline:
                    leases.append(PackedLease(transfer, self._abort))
                else:
                    leases.append(self._lease_slot(transfer, request, deadline))
        finally:
            if is_batch:
                with contextlib.suppress(RuntimeError):  # it was not acquired
                    self._reserving.release()

    def _lease_slot(self, transfer: Transfer, request: PutRequest, deadline: Deadline) -> Lease:
        """Reserve a slot of the pool; a packed payload is copied to it."""
        key, nbytes = transfer.key, request.nbytes
        try:
            slot_nbytes, timeout = SLOT + nbytes + request.draft, deadline.timeout_left
            block = self.pool.reserve(slot_nbytes, transfer, timeout=timeout)
        except CapacityError as error:
            with self.lock:
                text = f"key {key!r}: {error}{self.transfers.pins.describe()}"
            raise CapacityError(text, requested=error.requested, free=error.free) from None
        except TransferTimeout as error:
            text, waited = f"key {key!r}: {error}", deadline.timeout
            raise TransferTimeout(text, key=key, waited=waited, phase=error.phase) from None
        slot = self.pool.region(block)
        write_head(slot, transfer.epoch, nbytes, committed=False)
        if request.packed:
            slot.write(SLOT, request.packed)
        abort = partial(self._abort, transfer)
        return Lease(slot.slice(SLOT, nbytes), abort, transfer, partial(self.loop.call, abort))

    def lend(self, lease: Lease) -> Region:
        """Return the leased memory; it stays until the last view is freed."""
        self._check_open()
        transfer, view = _transfer(lease), object()
        region = lease.region.slice(0, lease.region.nbytes)

        def on_freed() -> None:
            with self.lock:
                self.transfers.on_view_freed(transfer, view)

        # First: after an interrupt it is released with the region.
        CallAtEnd.of(region.span, partial(self.loop.call, on_freed))
        with self.lock:
            self.transfers.lend(transfer, view)
        return region

    def receipt(self, lease: Lease, ledger: Ledger) -> Receipt:
        """Return the receipt of a payload that is not published yet."""
        return Receipt(_transfer(lease), ledger, self._process)

    def begin(
        self,
        lease: Lease,
        draft: bytes,
        *,
        readers: int | None,
        tensors: Sequence[tuple[int, Region]] = (),
        nbytes: int = 0,
        window: int = 0,
    ) -> None:
        """Write the draft header and offer the payload to gets that take layers or chunks."""
        self._check_open()
        if readers is not None and readers < 1:
            raise SchemaError(f"readers {readers}: at least one")
        transfer, header_end = _transfer(lease), lease.region.nbytes
        block = transfer.block
        assert block is not None
        slot = self.pool.region(block)
        direct: DirectSource | None = None
        if nbytes:
            head = slot.slice(SLOT, header_end + len(draft))
            direct = DirectSource(head, header_end, tensors, nbytes)
        write_head(slot, transfer.epoch, header_end, committed=False)  # it may have shrunk
        slot.write(SLOT + header_end, draft)
        location = Location(block[0], block[1], nbytes or header_end)
        chunks = ChunkWindow[Transfer](readers, window) if window and readers else None
        with self.lock:
            self.transfers.layers.begin(transfer, location, len(draft), readers, direct, chunks)

    def announce(self, lease: Lease, first: int, digests: tuple[bytes, ...]) -> None:
        """Announce tensors that are written."""
        self._check_open()
        with self.lock:
            self.transfers.layers.announce(_transfer(lease), first, digests)

    def publish(
        self,
        leases: Sequence[Lease],
        *,
        readers: int | None,
        ttl: float,
        ledgers: Sequence[Ledger],
        deadline: float = 0.0,
        extra: bytes = b"",
    ) -> list[Receipt]:
        """Commit the payloads; blocks only for readers of the caller's own tensors."""
        if self._closed:  # the call costs more than the test
            self._check_open()
        if (readers is not None and readers < 1) or not ttl > 0:
            raise SchemaError(f"readers {readers}, ttl {ttl}: at least one reader, more than 0 s")
        expires = time.monotonic() + ttl
        try:
            fault_points.point("publish.before")
            payloads = list(map(self._complete, leases))
            if extra:
                _transfer(leases[0]).extra = extra
            while (unsent := self._commit(payloads, readers, expires)) is not None:
                unsent.wait_sent(deadline)
            for listener in self._queueing:
                listener.flush()
        except BaseException:
            # An interrupt after the commit leaves payloads that are whole and will expire.
            self._end_all([_transfer(lease) for lease in leases])
            raise
        self.loop.tick_by(expires)
        fault_points.point("publish.after")
        pairs = zip(payloads, ledgers, strict=True)
        return [Receipt(transfer, ledger, self._process) for (transfer, _), ledger in pairs]

    def _complete(self, lease: Lease) -> tuple[Transfer, Location]:
        """Spend a lease and mark its slot as committed; return its transfer and where it lies."""
        transfer = lease.tag
        assert isinstance(transfer, Transfer)
        if transfer.inline:
            return transfer, Location(0, 0, len(transfer.inline))
        region = lease.move()
        block = transfer.block
        assert block is not None
        write_head(self.pool.region(block), transfer.epoch, region.nbytes, committed=True)
        return transfer, Location(block[0], block[1], region.nbytes)

    def _commit(
        self, payloads: Sequence[tuple[Transfer, Location]], readers: int | None, expires: float
    ) -> Transfer | None:
        """Commit, or return a transfer whose readers still need the caller's own tensors."""
        with self.lock:
            for transfer, _ in payloads:
                direct = transfer.direct
                if direct is not None and not transfer.is_sent and not transfer.state.is_final:
                    direct.all_sent.clear()
                    return transfer
            if len(payloads) == 1:  # to collect its messages costs a small payload a microsecond
                self.transfers.commit(payloads, readers, expires)
            else:
                self._outbox.coalesce(partial(self.transfers.commit, payloads, readers, expires))
        return None

    def abort(self, lease: Lease, reason: str, *, deferred: bool = False) -> None:
        """End the transfer of this lease."""
        abort = partial(self._abort, _transfer(lease), reason)
        if deferred:
            self.loop.call(abort)
        else:
            abort()

    def fail(self, key: str, reason: str, *, aborted: bool = False) -> None:
        """Fail a key."""
        self._check_open()
        with self.lock:
            now = time.monotonic()
            self.transfers.fail(key, reason, "aborted" if aborted else "failed", now)

    def stats(self) -> dict[str, Any]:
        """Return the state, the counters of the transfers and of the pool."""
        self._check_process()  # before the lock: the fork may have happened while it was held
        with self.lock:
            transfers = self.transfers.stats()
        listeners = [listener.stats() for listener in self.listeners]
        return {
            "role": "producer",
            "name": self._name,
            "closed": self._closed,
            "mode": self._options.mode,
            "transfers": transfers,
            "memory": self.pool.stats(),
            "path": reader_paths(self.listeners),
            **(listeners[0] if len(listeners) == 1 else {"listeners": listeners}),
        }

    def close(self) -> None:
        """Fail every transfer and get, close the listeners, end the loop; blocks for that."""
        if not self._begin_close():
            return
        self.loop.call(partial(self._close, f"the producer {self._name!r} closed the link"))
        if any(listener.is_own_thread for listener in self.listeners):
            # The link was garbage-collected in a listener's thread, which closing waits for.
            threading.Thread(target=self.loop.close, name="kvlink-close", daemon=True).start()
        else:
            self.loop.close()

    def close_deferred(self) -> None:
        """Close in the loop's thread."""
        self.loop.call(self.close)

    # Inside

    def _abort(self, transfer: Transfer, reason: str = "") -> None:
        if self._process.is_current:  # a forked child shares no state with the producer
            with self.lock:
                self.transfers.abort(transfer, reason, time.monotonic())

    def _evict(self) -> bool:
        """Make room in the pool, for a put that waits; False if nothing can be evicted."""
        if not self.transfers.kept:
            return False
        with self.lock:
            return self.transfers.kept.evict()

    def _free(self, transfer: Transfer) -> None:
        """Free the memory of a transfer."""
        self.pool.release(transfer)
        transfer.inline = b""

    def _handle(self, peer: Peer, now: float, message: Message) -> None:
        match message:
            case Get():
                self.transfers.on_get(peer, message, now)
            case Release(get_id, epoch, outcome, reason):
                self.transfers.on_release(peer, get_id, epoch, outcome, reason, now)
            case Cancel(get_id):
                self.transfers.on_cancel(peer, get_id)
            case Reject(get_id, epoch, reason):
                self.transfers.on_reject(peer, get_id, epoch, reason, now)
            case Abort(key, reason):
                self.transfers.on_abort(key, reason, now)
            case Contains(query, keys):
                self._outbox.send(peer, Contained(query, self.transfers.kept.contains(keys, now)))
            case Refused(reason):
                assert isinstance(peer, PeerHandle)
                peer.listener.refuse_path(peer.name, reason)
            case Inspect():
                self._outbox.send(peer, self._inspect(peer, message, now))
            case _:
                unexpected(message)

    def _inspect(self, peer: Peer, message: Inspect, now: float) -> Inspected:
        """Return a page of the payloads to the owner, and to others why not."""
        assert isinstance(peer, PeerHandle)
        if refusal := peer.inspect_refusal():
            peer.listener.refuse_inspect(peer.name, refusal)
            return Inspected(message.inspect_id, reason=refusal)
        return inspected_page(message, self.transfers, self.pool.stats, now)

    def _end_all(self, transfers: Sequence[Transfer]) -> None:
        """After an error or interrupt, send collected messages and abort what is not committed."""
        with self.lock:
            self._outbox.flush()
        for transfer in transfers:
            self._abort(transfer)

    def _pass_arena(self, arena: int) -> None:
        """Pass an arena on that was mapped ahead; any thread."""
        for listener in self.listeners:
            self.loop.call(partial(listener.pass_arena, arena))

    def _retire_arena(self, arena: int) -> None:
        for listener in self.listeners:
            listener.retire_arena(arena)

    def _tick(self, now: float) -> float:
        with self.lock:
            due = self.transfers.tick(now)
        for listener in self.listeners:
            due = min(due, listener.tick(now))
        return due

    def _close(self, reason: str) -> None:
        with self.lock:
            self._outbox.coalesce(partial(self.transfers.close, reason))
        for listener in self.listeners:
            listener.close()
        self.pool.close()

    def _crashed(self, error: BaseException) -> None:
        warnings.warn(f"link {self._name!r} broke down: {error!r}", RuntimeWarning, stacklevel=2)
        self._closed = True
        self._close(f"the producer {self._name!r} broke down: {error!r}")


def _transfer(lease: Lease) -> Transfer:
    assert isinstance(lease.tag, Transfer)
    return lease.tag
