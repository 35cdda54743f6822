"""What every producer with pooled memory does alike: reserve, publish, fail, expire, close."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omni_kvlink.connectors.base import Options, Producer, Receipt
from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.messages import (
    Abort,
    Cancel,
    Get,
    Hello,
    Location,
    Message,
    Release,
    own_hello,
    unexpected,
)
from omni_kvlink.connectors.protocol.slot import SLOT, write_head
from omni_kvlink.connectors.protocol.transfer import Claim, Peer, Transfer
from omni_kvlink.connectors.protocol.transfer_table import TransferTable
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.event_loop import EventLoop
from omni_kvlink.connectors.runtime.listener import Listener, PeerHandle
from omni_kvlink.errors import CapacityError, ClosedError, SchemaError, WireError
from omni_kvlink.memory.arena import ArenaPool, Block
from omni_kvlink.memory.region import Lease, Mapping, Region

Opener = Callable[["PooledProducer"], Listener]
"""Opens a door of the producer that it is given."""


class PooledProducer(Producer):
    """A producer whose payloads lie in an `ArenaPool`; readers come by its doors.

    Args:
        name: for the thread and the messages.
        options: quota, mode, prefault.
        make: maps an arena of so many bytes.
        openers: one for each door; if one fails, all are closed again.
    """

    def __init__(
        self, name: str, options: Options, make: Callable[[int], Mapping], *openers: Opener
    ):
        self._name, self._options = name, options
        self._pid = os.getpid()
        self._closed = False
        self.lock = threading.Lock()
        self.transfers = TransferTable(self._send, self._free)
        self.listeners: list[Listener] = []
        self.nonce = os.urandom(8).hex()
        self._flying: Counter[Block] = Counter()
        self._doomed: set[Block] = set()
        pooled = options.mode == "pooled"
        self.pool = ArenaPool(make, options.quota, self._retire, keep=pooled)
        if options.prefault and pooled:
            self.pool.prefault(options.prefault)
        self.loop = EventLoop(f"kvlink-{name}", self._tick, self._crashed)
        try:
            for opener in openers:
                self.listeners.append(opener(self))
        except BaseException:
            self.close()
            raise
        for listener in self.listeners:
            self.loop.call(listener.open)

    # For doors

    @property
    def hello(self) -> Hello:
        """What it says to whoever comes."""
        transports = tuple(
            transport for listener in self.listeners for transport in listener.transports
        )
        return own_hello(self.nonce, transports)

    def handle(self, peer: Peer, message: Message) -> None:
        """What a greeted reader said; in the loop's thread. WireError if it may not say that."""
        now = time.monotonic()
        with self.lock:
            if isinstance(message, Get):
                self.transfers.request(
                    peer, message.get_id, message.key, now, streamed=message.streamed
                )
            elif isinstance(message, Cancel):
                self.transfers.cancel(peer, message.get_id)
            elif isinstance(message, Release):
                self.transfers.release(
                    peer, message.get_id, message.epoch, message.outcome, message.reason, now
                )
            elif isinstance(message, Abort):
                self.transfers.fail(message.key, message.reason, "aborted", now)
            else:
                unexpected(message)

    def on_peer_lost(self, peer: Peer) -> None:
        """A reader is gone."""
        with self.lock:
            self.transfers.lost(peer)

    def leave(self, peer: Peer) -> None:
        """A reader asks for nothing more; what it holds it will release."""
        with self.lock:
            self.transfers.leave(peer)

    def detach(self, peer: Peer) -> bool:
        """A reader is cut off, but lives; whether it may still look at what it held."""
        with self.lock:
            return self.transfers.detach(peer)

    def leased(self, peer: Peer, get_id: int, epoch: int) -> Transfer | None:
        """What a reader has on lease and may fetch."""
        with self.lock:
            return self.transfers.leased(peer, get_id, epoch)

    def piece(self, transfer: Transfer, start: int, stop: int) -> Region:
        """Bytes of what a reader may fetch: the payload, and a stream's draft behind it.

        Raises:
            WireError: there are no such bytes, or they lie in two places.
        """
        if transfer.direct is not None:
            return transfer.direct.find(start, stop)
        assert transfer.location is not None
        nbytes = transfer.location.nbytes + transfer.draft
        if not start <= stop <= nbytes:
            raise WireError(f"bytes {start}…{stop} of {nbytes}")
        return self.pool.region(_block(transfer)).slice(SLOT + start, stop - start)

    def borrow_piece(
        self, transfer: Transfer, claim: Claim, start: int, stop: int, landed: Callable[[int], None]
    ) -> Region:
        """A piece of a payload to send from, later: its memory stays until the last view is gone.

        Args:
            landed: told the bytes then; in the loop's thread.

        Raises:
            WireError: as of `piece`.
        """
        fault_points.point("send.chunk")
        block, piece = _block(transfer), self.piece(transfer, start, stop)
        with self.lock:
            self._flying[block] += piece.nbytes
        took = partial(self.transfers.took, transfer, claim, start, stop)
        back = partial(self._landed, block, took, piece.nbytes, landed)
        weakref.finalize(piece.span, self.loop.call, back).atexit = False
        return piece

    @property
    def flying(self) -> int:
        """Bytes of pieces that somebody still sends from."""
        return self._flying.total()

    # The contract

    @property
    def bound_url(self) -> tuple[str, str]:
        return next(
            (listener.bound_url for listener in self.listeners if listener.bound_url[0]), ("", "")
        )

    def has_waiting_reader(self, key: str) -> bool:
        with self.lock:
            return self.transfers.has_waiting_reader(key)

    def refuses(self, device: str) -> str:
        return next(filter(None, (listener.refuses(device) for listener in self.listeners)), "")

    def reserve(self, key: str, nbytes: int, *, timeout: float, draft: int = 0) -> Lease:
        self._check_open()
        with self.lock:
            transfer = self.transfers.reserve(key)
        try:
            transfer.block = block = self.pool.reserve(SLOT + nbytes + draft, timeout=timeout)
            slot = self.pool.region(block)
            write_head(slot, transfer.epoch, nbytes, committed=False)
            return Lease(slot.slice(SLOT, nbytes), partial(self._discard, transfer), transfer)
        except CapacityError as error:
            self._discard(transfer)
            raise CapacityError(
                f"key {key!r}: {error}", asked=error.asked, free=error.free
            ) from None
        except BaseException:
            self._discard(transfer)
            raise

    def lend(self, lease: Lease) -> Region:
        transfer = _transfer(lease)
        region = lease.region.slice(0, lease.region.nbytes)
        with self.lock:
            self.transfers.lend(transfer)
        back = partial(self.loop.call, partial(self._take_back, transfer))
        weakref.finalize(region.span, back).atexit = False
        return region

    def receipt(self, lease: Lease, ledger: Ledger) -> Receipt:
        return Receipt(_transfer(lease), ledger)

    def begin(self, lease: Lease, draft: bytes, *, readers: int) -> None:
        self._begin(lease, draft, lease.region.nbytes, readers, None)

    def begin_direct(
        self,
        lease: Lease,
        draft: bytes,
        tensors: Sequence[tuple[int, Region]],
        *,
        nbytes: int,
        readers: int,
    ) -> None:
        head = self.pool.region(_block(_transfer(lease)))
        head = head.slice(SLOT, lease.region.nbytes + len(draft))
        direct = DirectSource(head, lease.region.nbytes, tensors, nbytes)
        self._begin(lease, draft, nbytes, readers, direct)

    def announce(self, lease: Lease, first: int, digests: tuple[bytes, ...]) -> None:
        self._check_open()
        with self.lock:
            self.transfers.announce(_transfer(lease), first, digests)

    def publish(
        self, lease: Lease, *, readers: int, ttl: float, ledger: Ledger, until: float = 0.0
    ) -> Receipt:
        self._check_open()
        if readers < 1 or not ttl > 0:
            raise SchemaError(f"readers {readers}, ttl {ttl}: at least one reader, more than 0 s")
        transfer = _transfer(lease)
        region = lease.move()
        expires = time.monotonic() + ttl
        try:
            fault_points.point("publish.before")
            slot = self.pool.region(_block(transfer))
            write_head(slot, transfer.epoch, region.nbytes, committed=True)
            while not self._commit(transfer, region.nbytes, readers, expires):
                transfer.await_taken(until)
            for listener in self.listeners:
                listener.flush()
        except BaseException:
            # An interrupt after the commit leaves a payload that is whole and will expire.
            self._discard(transfer)
            raise
        self.loop.remind(expires)
        fault_points.point("publish.after")
        return Receipt(transfer, ledger)

    def give_up(self, lease: Lease, reason: str, *, soon: bool = False) -> None:
        end = partial(self._give_up, _transfer(lease), reason)
        if soon:
            self.loop.call(end)
        elif os.getpid() == self._pid:
            end()

    def fail(self, key: str, reason: str, *, aborted: bool = False) -> None:
        self._check_open()
        with self.lock:
            now = time.monotonic()
            self.transfers.fail(key, reason, "aborted" if aborted else "failed", now)

    def health(self) -> dict[str, Any]:
        self._check_process()  # before the lock: the fork may have happened while it was held
        with self.lock:
            transfers = self.transfers.stats()
        listeners = [listener.health() for listener in self.listeners]
        return {
            "role": "producer",
            "name": self._name,
            "closed": self._closed,
            "mode": self._options.mode,
            "transfers": transfers,
            "memory": self.pool.stats(),
            **(listeners[0] if len(listeners) == 1 else {"doors": listeners}),
        }

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            self._closed = True
            return
        self._closed = True
        self.loop.call(partial(self._shut, f"the producer {self._name!r} closed the link"))
        if any(
            listener.is_own_thread for listener in self.listeners
        ):  # a forgotten link, collected there
            threading.Thread(target=self.loop.stop, name="kvlink-close", daemon=True).start()
        else:
            self.loop.stop()

    # Inside

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"link {self._name!r} belongs to process {self._pid}; "
                "after fork the child must open its own"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"link {self._name!r} is closed")

    def _begin(
        self, lease: Lease, draft: bytes, nbytes: int, readers: int, direct: DirectSource | None
    ) -> None:
        self._check_open()
        if readers < 1:
            raise SchemaError(f"readers {readers}: at least one")
        transfer, here = _transfer(lease), lease.region.nbytes
        slot = self.pool.region(_block(transfer))
        write_head(slot, transfer.epoch, here, committed=False)  # it may be less than reserved
        slot.view(SLOT + here, SLOT + here + len(draft))[:] = draft
        with self.lock:
            location = _location(transfer, nbytes)
            self.transfers.begin(transfer, location, len(draft), readers, direct)

    def _commit(self, transfer: Transfer, nbytes: int, readers: int, expires: float) -> bool:
        """Unless readers still need the caller's own memory."""
        with self.lock:
            if transfer.is_taken or transfer.state.is_final:
                self.transfers.commit(transfer, _location(transfer, nbytes), readers, expires)
                return True
            transfer.taken.clear()
            return False

    def _discard(self, transfer: Transfer) -> None:
        if os.getpid() == self._pid:
            with self.lock:
                self.transfers.discard(transfer)

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        with self.lock:
            self.transfers.give_up(transfer, reason, time.monotonic())

    def _take_back(self, transfer: Transfer) -> None:
        with self.lock:
            self.transfers.give_back(transfer)

    def _free(self, transfer: Transfer) -> None:
        """The exchange says that no reader has a payload any more; a piece of it may be flying."""
        block, transfer.block = transfer.block, None
        if isinstance(block, Block) and self._flying[block]:
            self._doomed.add(block)
        elif isinstance(block, Block):
            self.pool.free(block)

    def _landed(
        self,
        block: Block,
        took: Callable[[], None],
        nbytes: int,
        landed: Callable[[int], None],
    ) -> None:
        """A piece was let go of: sent, or dropped with its connection."""
        with self.lock:
            took()
            self._flying[block] -= nbytes
            if not self._flying[block]:
                del self._flying[block]
                if block in self._doomed:
                    self._doomed.discard(block)
                    self.pool.free(block)
        landed(nbytes)

    def _send(self, peer: Peer, message: Message) -> None:
        """Called with the lock held."""
        assert isinstance(peer, PeerHandle)
        peer.listener.send(peer, message)

    def _retire(self, arena: int) -> None:
        for listener in self.listeners:
            listener.forget(arena)

    def _tick(self, now: float) -> float:
        with self.lock:
            due = self.transfers.tick(now)
        return min([due, *(listener.tick(now) for listener in self.listeners)])

    def _shut(self, reason: str) -> None:
        with self.lock:
            self.transfers.close(reason)
        for listener in self.listeners:
            listener.shut()
        self.pool.close()

    def _crashed(self, error: BaseException) -> None:
        warnings.warn(f"link {self._name!r} broke down: {error!r}", RuntimeWarning, stacklevel=2)
        self._closed = True
        self._shut(f"the producer {self._name!r} broke down: {error!r}")


def _transfer(lease: Lease) -> Transfer:
    assert isinstance(lease.tag, Transfer)
    return lease.tag


def _block(transfer: Transfer) -> Block:
    assert isinstance(transfer.block, Block)
    return transfer.block


def _location(transfer: Transfer, nbytes: int) -> Location:
    block = _block(transfer)
    return Location(block.arena, block.offset, nbytes)
