"""What every producer with pooled memory does alike: reserve, publish, fail, expire, close."""

from __future__ import annotations

import os
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import _faults
from ..arena import ArenaPool, Block
from ..errors import CapacityError, ClosedError, SchemaError
from ..ledger import Ledger
from ..memory import Lease, Mapping, Region
from .base import Options, Producer, Receipt
from .exchange import Exchange
from .loop import Loop
from .messages import Abort, Location, Message, Release, Unwant, Want, unexpected
from .transfer import Peer, Transfer

SLOT = 256
"""Bytes of a slot's head; the payload follows, so it keeps the payload's alignment."""
_HEAD = struct.Struct("<8sQQQ")
_MAGIC = b"kvlslot1"


class PooledProducer(Producer):
    """A producer whose payloads lie in an `ArenaPool`; subclasses carry the messages.

    Args:
        name: for the thread and the messages.
        options: quota, mode, prefault.
        make: maps an arena of so many bytes.
    """

    def __init__(self, name: str, options: Options, make: Callable[[int], Mapping]):
        self._name, self._options = name, options
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._exchange = Exchange(self._send, self._free)
        pooled = options.mode == "pooled"
        self._pool = ArenaPool(make, options.quota, self._retire, keep=pooled)
        if options.prefault and pooled:
            self._pool.prefault(options.prefault)
        self._loop = Loop(f"kvlink-{name}", self._tick, self._crashed)

    # For subclasses

    def _send(self, peer: Peer, message: Message) -> None:
        """Carry a message; called with the lock held, must not block."""
        raise NotImplementedError

    def _retire(self, arena: int) -> None:
        """An arena was dropped; called with the pool's lock held."""

    def _disconnect(self) -> None:
        """Close what subclasses opened; called once, in the loop's thread."""

    # The contract

    def reserve(self, key: str, nbytes: int, *, timeout: float, draft: int = 0) -> Lease:
        self._check_open()
        with self._lock:
            transfer = self._exchange.reserve(key)
        try:
            transfer.block = block = self._pool.reserve(SLOT + nbytes + draft, timeout=timeout)
            slot = self._pool.region(block)
            _write_head(slot, transfer.epoch, nbytes, committed=False)
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
        with self._lock:
            self._exchange.lend(transfer)
        back = partial(self._loop.call, partial(self._take_back, transfer))
        weakref.finalize(region.span, back).atexit = False
        return region

    def receipt(self, lease: Lease, ledger: Ledger) -> Receipt:
        return Receipt(_transfer(lease), ledger)

    def begin(self, lease: Lease, draft: bytes, *, readers: int) -> None:
        self._check_open()
        if readers < 1:
            raise SchemaError(f"readers {readers}: at least one")
        transfer = _transfer(lease)
        slot = self._pool.region(_block(transfer))
        nbytes = lease.region.nbytes
        _write_head(slot, transfer.epoch, nbytes, committed=False)  # it may be less than reserved
        slot.view(SLOT + nbytes, SLOT + nbytes + len(draft))[:] = draft
        with self._lock:
            self._exchange.begin(transfer, _location(transfer, nbytes), len(draft), readers)

    def announce(self, lease: Lease, first: int, digests: tuple[bytes, ...]) -> None:
        self._check_open()
        with self._lock:
            self._exchange.announce(_transfer(lease), first, digests)

    def publish(self, lease: Lease, *, readers: int, ttl: float, ledger: Ledger) -> Receipt:
        self._check_open()
        if readers < 1 or not ttl > 0:
            raise SchemaError(f"readers {readers}, ttl {ttl}: at least one reader, more than 0 s")
        transfer = _transfer(lease)
        region = lease.move()
        expires = time.monotonic() + ttl
        try:
            _faults.point("publish.before")
            slot = self._pool.region(_block(transfer))
            _write_head(slot, transfer.epoch, region.nbytes, True)
            with self._lock:
                location = _location(transfer, region.nbytes)
                self._exchange.commit(transfer, location, readers, expires)
        except BaseException:
            # An interrupt after the commit leaves a payload that is whole and will expire.
            self._discard(transfer)
            raise
        self._loop.remind(expires)
        _faults.point("publish.after")
        return Receipt(transfer, ledger)

    def give_up(self, lease: Lease, reason: str, *, soon: bool = False) -> None:
        end = partial(self._give_up, _transfer(lease), reason)
        if soon:
            self._loop.call(end)
        elif os.getpid() == self._pid:
            end()

    def fail(self, key: str, reason: str, *, aborted: bool = False) -> None:
        self._check_open()
        with self._lock:
            now = time.monotonic()
            self._exchange.fail(key, reason, "aborted" if aborted else "failed", now)

    def health(self) -> dict[str, Any]:
        self._check_process()  # before the lock: the fork may have happened while it was held
        with self._lock:
            transfers = self._exchange.stats()
        return {
            "role": "producer",
            "name": self._name,
            "closed": self._closed,
            "mode": self._options.mode,
            "transfers": transfers,
            "memory": self._pool.stats(),
        }

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            self._closed = True
            return
        self._closed = True
        self._loop.call(partial(self._shut, f"the producer {self._name!r} closed the link"))
        self._loop.stop()

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

    def _discard(self, transfer: Transfer) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._exchange.discard(transfer)

    def _give_up(self, transfer: Transfer, reason: str) -> None:
        with self._lock:
            self._exchange.give_up(transfer, reason, time.monotonic())

    def _take_back(self, transfer: Transfer) -> None:
        with self._lock:
            self._exchange.give_back(transfer)

    def _free(self, transfer: Transfer) -> None:
        """The exchange says that a payload's memory may be reused."""
        block, transfer.block = transfer.block, None
        if isinstance(block, Block):
            self._pool.free(block)

    def _on_message(self, peer: Peer, message: Message) -> None:
        """What a greeted reader said; in the loop's thread. WireError if it may not say that."""
        now = time.monotonic()
        with self._lock:
            if isinstance(message, Want):
                self._exchange.want(peer, message.want, message.key, now, streamed=message.streamed)
            elif isinstance(message, Unwant):
                self._exchange.unwant(peer, message.want)
            elif isinstance(message, Release):
                self._exchange.release(
                    peer, message.want, message.epoch, message.outcome, message.reason, now
                )
            elif isinstance(message, Abort):
                self._exchange.fail(message.key, message.reason, "aborted", now)
            else:
                unexpected(message)

    def _on_lost(self, peer: Peer) -> None:
        with self._lock:
            self._exchange.lost(peer)

    def _tick(self, now: float) -> float:
        with self._lock:
            return self._exchange.tick(now)

    def _shut(self, reason: str) -> None:
        with self._lock:
            self._exchange.close(reason)
        self._disconnect()
        self._pool.close()

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


def _write_head(slot: Region, epoch: int, nbytes: int, committed: bool) -> None:
    """The commit word repeats the epoch; whoever reads a slot compares both with its offer."""
    slot.view()[: _HEAD.size] = _HEAD.pack(_MAGIC, epoch, nbytes, epoch if committed else 0)


def holds(slot: Region, epoch: int, nbytes: int, *, committed: bool) -> bool:
    """Whether a slot holds exactly the payload that was offered, whole or being written."""
    head = bytes(slot.view()[: _HEAD.size])
    whole = _HEAD.pack(_MAGIC, epoch, nbytes, epoch)
    return head == whole or (not committed and head == _HEAD.pack(_MAGIC, epoch, nbytes, 0))
