"""One transfer of the producer: its state, its receipt, and the ledger of what it cost."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import msgspec

from omni_kvlink.connectors.protocol.chunk_window import ChunkWindow
from omni_kvlink.connectors.protocol.direct_source import DirectSource
from omni_kvlink.connectors.protocol.messages import Location
from omni_kvlink.errors import TransferFailed, TransferTimeout, format_seconds
from omni_kvlink.memory.block import Part
from omni_kvlink.memory.region import Lease
from omni_kvlink.system import process
from omni_kvlink.system.waits import LazyEvent, check_timeout, made_of

Peer = Hashable
Claim = tuple[Peer, int]
"""One get of one consumer: the peer, and the peer's number of the get."""


# To compare states takes four times as long.
_FINAL = frozenset(("released", "failed", "expired", "withdrawn", "evicted"))
_OFFERABLE = frozenset(("committed", "leased"))


class TransferState(enum.Enum):
    """The state of a transfer; the last five are final, two of them those of a kept payload."""

    RESERVED = "reserved"
    STREAMING = "streaming"
    COMMITTED = "committed"
    LEASED = "leased"
    RELEASED = "released"
    FAILED = "failed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    EVICTED = "evicted"

    @property
    def is_final(self) -> bool:
        """Whether the transfer has ended."""
        return self._value_ in _FINAL


class Transfer(msgspec.Struct, gc=False, eq=False):
    """One payload from `reserve` to its release; `(key, epoch)` is unique.

    Only the `TransferTable` changes its state. The garbage collector does not look at it: tens of
    thousands may be live. So it may be in no reference cycle but one that its end breaks: a
    chunk's with the window of its stream, and those of the callbacks.
    """

    key: str
    epoch: int = 0  # the table numbers it when it begins
    inline: bytes = b""  # a small payload itself, which has no block
    stream: Transfer | None = None  # of a chunk: its stream's transfer
    block: Part | None = None  # of the owner's memory, until that is freed
    state: TransferState = TransferState.RESERVED
    reason: str = ""  # why it failed or expired
    location: Location | None = None  # once it may be offered
    draft: int = 0  # bytes of the header without digests behind the payload, if it is streamed
    # Announced so far: the number of the first tensor, and the tensors' digests.
    layers: list[tuple[int, tuple[bytes, ...]]] | None = None
    expires: float = float("inf")  # unless every reader has it (`time.monotonic`)
    is_scheduled: bool = False  # whether `TransferTable.tick` will look at it then
    unclaimed: int = 0  # readers that were declared and have no lease; of a kept one always 1
    is_kept: bool = False  # for any number of readers, until it is withdrawn or evicted
    lost_readers: int = 0  # readers that had a lease and left it unread
    is_committed: bool = False  # whether the payload is complete
    leases: frozenset[Claim] = frozenset()
    pins: frozenset[Claim] = frozenset()  # of disconnected peers that may still read it
    has_writer: bool = True  # whether the producer may still write to the memory
    views: frozenset[object] = frozenset()  # of the memory: the caller's, and what is being sent
    done_callbacks: list[Callable[[], None]] | None = None
    extra: bytes = b""  # the metadata at the end of a stream, as messages carry it
    direct: DirectSource | None = None  # the caller's tensors, if they are sent directly
    window: ChunkWindow[Transfer] | None = None  # the chunks and readers of an append stream
    ended: LazyEvent | None = None  # set in a final state; made for the first thread that waits
    path: str = ""  # by which it was offered: that of its readers, or those
    begun: float = msgspec.field(default_factory=time.monotonic)

    @property
    def is_done(self) -> bool:
        """Whether it has reached a final state."""
        return self.state.is_final

    def wait(self, timeout: float) -> bool:
        """Block until `is_done`, for `timeout` seconds at most; return whether it is."""
        if self.state.is_final:
            return True
        ended = made_of(self, "ended", LazyEvent)
        return self.state.is_final or ended.wait(timeout)  # it may have ended before

    @property
    def is_lost(self) -> bool:
        """Whether it has not ended, and is no chunk that its stream has: it was given up."""
        if self.state.is_final:
            return False
        if self.stream is None or self.stream.window is None:
            return True
        return self not in self.stream.window.chunks

    def check_writing(self) -> None:
        """Raise TransferFailed if it was ended while it was being written."""
        if self.state not in (TransferState.RESERVED, TransferState.STREAMING):
            raise TransferFailed(
                f"key {self.key!r} was ended while it was being put: {self.reason}",
                key=self.key,
                reason=self.reason,
            )

    def on_sent(self, claim: Claim, start: int, stop: int) -> None:
        """The bytes `start` to `stop` were sent to a reader; the owner's lock is held."""
        if self.direct is not None:
            self.direct.mark_sent(claim, start, stop)
            self.check_sent()

    def check_sent(self) -> None:
        """Wake `wait_sent` if no reader needs the caller's own tensors any more."""
        if self.direct is not None and self.is_sent:
            self.direct.all_sent.set()

    @property
    def is_sent(self) -> bool:
        """Whether no reader needs the caller's own tensors any more."""
        if self.direct is None:
            return True
        return not self.unclaimed and all(map(self.direct.has_sent_all, self.leases))

    def wait_sent(self, deadline: float) -> None:
        """Block until `is_sent` may be true or the transfer ended; else TransferTimeout."""
        left, direct = max(0.0, deadline - time.monotonic()), self.direct
        if direct is not None and not direct.all_sent.wait(left):
            phase = f"{self.missing_readers}, {len(self.leases)} reading"
            raise TransferTimeout(
                f"payload {self.key!r} was aborted: it is sent from its caller's tensors, and "
                f"not every reader received it in time ({phase})",
                key=self.key,
                phase=phase,
            )

    def finish(self, state: TransferState, reason: str) -> None:
        """Reach a final state, and wake what waits for it."""
        self.reason, self.state = reason, state
        if self.ended is not None:
            self.ended.set()
        if self.direct is not None:
            self.direct.all_sent.set()
        if self.done_callbacks:
            self.call_back()

    def call_back(self) -> None:
        """Make each call of `done_callbacks` once; any thread."""
        while self.done_callbacks:
            try:
                callback = self.done_callbacks.pop(0)
            except IndexError:  # all were called, perhaps by another thread
                return
            callback()

    @property
    def missing_readers(self) -> str:
        """The readers that it still needs, in words, and those that came and left."""
        left = f" ({self.lost_readers} came and left it unread)" if self.lost_readers else ""
        if self.is_kept:
            return f"kept for any reader{left}"
        return f"{self.unclaimed} readers missing{left}"

    @property
    def is_idle(self) -> bool:
        """Whether it is complete, and nothing uses its memory."""
        is_used = self.leases or self.pins or self.views or self.has_writer
        return self.state._value_ == "committed" and not is_used

    @property
    def is_offerable(self) -> bool:
        """Whether it is complete and readers are missing."""
        return self.unclaimed > 0 and self.state._value_ in _OFFERABLE


class PackedLease(Lease):
    """The lease of a payload that travels inside its offers; it has no memory."""

    def __init__(self, transfer: Transfer, abort: Callable[[Transfer], None]):
        self.tag, self._transfer, self._abort = transfer, transfer, abort

    def release(self) -> None:
        """Give the payload up, unless it is published; a second call does nothing."""
        self._abort(self._transfer)


class Ledger(msgspec.Struct, gc=False):
    """The cost of one transfer at one side: bytes, copies and seconds.

    Attributes:
        nbytes: the whole payload, header and padding included.
        copies: times the tensors' bytes were copied in host memory.
        reused_nbytes: bytes not sent, because a branch is a prefix of another or the same.
        copier: the copier that moved the bytes; "" if none did.
        instructions: the instruction set it used, where it chooses one.
        digests: "crc32c" or "off".
        seconds: of each phase, in the order they ran.
        path: the way of the bytes, such as "shm", "shm+inline" (inside the message that offers
            them), "zmq+tcp+curve" or "zmq+tcp+lanes" (a connection with lanes, for long ranges). Of
            a receipt those of its readers, "shm, zmq+tcp"; "" before the first.
        trace: W3C's trace context that the payload carries; empty if its put was not traced.
    """

    nbytes: int = 0
    copies: int = 0
    reused_nbytes: int = 0
    copier: str = ""
    instructions: str = ""
    digests: str = "off"
    seconds: dict[str, float] = {}
    path: str = ""
    trace: dict[str, str] = {}

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by their names, as JSON values."""
        return {**msgspec.structs.asdict(self), "seconds": dict(self.seconds)}

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in self.seconds.items())
        return (
            f"{self.nbytes / 1e6:.2f} MB, {self.copies} host copies, "
            f"{self.reused_nbytes / 1e6:.2f} MB not sent, digests {self.digests}"
            f"{', by ' * bool(self.path)}{self.path}: {phases}"
        )


class Receipt(msgspec.Struct, gc=False, eq=False):
    """The producer's view of a payload that was put: its state, and a way to wait for its end.

    `ledger` tells what the put cost.
    """

    _transfer: Transfer
    _ledger: Ledger
    _process: process.OwnerProcess

    @property
    def ledger(self) -> Ledger:
        """Bytes, copies and seconds of the put, and the path to the readers that it has now."""
        self._ledger.path = self._transfer.path
        return self._ledger

    @property
    def key(self) -> str:
        """The payload's key."""
        return self._transfer.key

    @property
    def state(self) -> str:
        """The state now: "committed" or "leased", and finally "released", "failed" or "expired".

        A kept payload ends as "withdrawn" or "evicted" instead of "released".
        """
        return self._transfer.state.value

    @property
    def expires(self) -> float:
        """When it expires unless every reader has it: `ttl` seconds after its commit.

        Seconds of `time.monotonic`; infinite before the commit.
        """
        return self._transfer.expires

    @property
    def lost_readers(self) -> int:
        """Readers so far that had the payload and left before they released it as read.

        They died, lost their connection, or gave it back; another reader receives it.
        """
        return self._transfer.lost_readers

    @property
    def done(self) -> bool:
        """Whether the state is final; never blocks."""
        return self._transfer.state.is_final

    def wait(self, *, timeout: float) -> None:
        """Block until every declared reader has released the payload, `timeout` seconds at most.

        A kept payload has no declared readers: this blocks until it is withdrawn.

        Raises:
            TransferFailed: it failed, was aborted, rejected or evicted, or expired.
            TransferTimeout: it was not released within `timeout` seconds.
        """
        limit = check_timeout(timeout)
        if not self._process.is_current:  # the call costs more than the test
            self._process.check(f"the receipt of {self.key!r}")
        self._transfer.wait(limit)
        self.check(waited=timeout)

    def check(self, *, waited: float) -> None:
        """Raise the error of `wait`, if it is not released after `waited` seconds; never blocks."""
        transfer = self._transfer
        if not transfer.state.is_final:
            raise TransferTimeout(
                f"payload {self.key!r} is still {self.state} after {format_seconds(waited)}: "
                f"{transfer.missing_readers}, {len(transfer.leases)} reading",
                key=self.key,
                waited=waited,
                phase=self.state,
            )
        if transfer.state not in (TransferState.RELEASED, TransferState.WITHDRAWN):
            raise TransferFailed(
                f"payload {self.key!r} {self.state}: {transfer.reason}",
                key=self.key,
                reason=transfer.reason,
            )

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call this once when `done` is true, at once or later; for event loops.

        It runs in any thread, and the link may be locked: it must not block, raise or call back.
        """
        self._process.check(f"the receipt of {self.key!r}")
        made_of(self._transfer, "done_callbacks", list[Any]).append(callback)
        if self.done:
            self._transfer.call_back()

    def remove_done_callback(self, callback: Callable[[], None]) -> None:
        """Undo `add_done_callback`, unless the call was made."""
        with suppress(ValueError):
            made_of(self._transfer, "done_callbacks", list[Any]).remove(callback)

    def __repr__(self) -> str:
        return f"<Receipt {self.key!r}: {self.state}>"
