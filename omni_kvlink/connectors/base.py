"""The contracts of a connector: bytes and manifests only, no torch, no model.

A backend is a module with a `BACKEND: Backend`; a row in `registry` or an entry point names it.
`check_connector` in `omni_kvlink.testing` holds it to what is written here.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from omni_kvlink.connectors.ledger import Ledger
from omni_kvlink.connectors.protocol.messages import Outcome
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.connectors.protocol.transfer import Transfer, TransferState
from omni_kvlink.errors import (
    ClosedError,
    KVLinkError,
    PeerLostError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.memory.region import Lease, Region

MAX_RETRIES = 3
"""Times that a `get` is asked again; connections that always break are no accident."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How a link is set up; a connector takes what concerns it.

    Args:
        quota: bytes of memory that all payloads not yet released may take together.
        mode: "pooled" reuses arenas that every peer maps whole; "sealed" gives each payload a
            memory file of its own, so that a peer sees nothing but what it was offered.
        prefault: bytes to map and touch when serving starts, so that the first put is as fast as
            the later ones.
        directory: where the shared-memory sockets live; a private default.
        keys: of an encrypted link, the file with this side's secret key.
        peers: of an encrypted link, who the other side may be: for a producer the directory with
            its readers' public keys, for a consumer the producer's public key file.
        insecure: allow a link across machines without keys.
        ucx_tls: what UCX may send with, as in UCX_TLS: "rc,tcp".
        ucx_devices: what of this machine's network UCX may use, as in UCX_NET_DEVICES: "eth0".
            Loopback alone if empty; to be named where the link goes to other machines.
        tcp: of `auto://`, the `host:port` for readers that share no memory with the producer.
    """

    quota: int = 4 << 30
    mode: str = "pooled"
    prefault: int = 0
    directory: str = ""
    keys: str = ""
    peers: str = ""
    insecure: bool = False
    ucx_tls: str = "tcp"
    ucx_devices: str = ""
    tcp: str = ""

    def __post_init__(self) -> None:
        if self.mode not in ("pooled", "sealed"):
            raise ValueError(f"mode {self.mode!r}; wanted 'pooled' or 'sealed'")
        if not 0 <= self.prefault <= self.quota:
            raise ValueError(f"prefault {self.prefault} is not within the quota {self.quota}")


def refuse_keys(url: str, options: Options) -> None:
    """For connectors that encrypt nothing: who asks for it must hear that.

    Raises:
        ValueError: keys were given.
    """
    if options.keys or options.peers:
        raise ValueError(
            f"{url} never leaves this machine, and is not encrypted: leave keys= and peers= out"
        )


class Receipt:
    """What became of a payload that was put."""

    def __init__(self, transfer: Transfer, ledger: Ledger):
        self._transfer = transfer
        self.ledger = ledger

    @property
    def key(self) -> str:
        return self._transfer.key

    @property
    def state(self) -> str:
        """ "committed", "leased", or finally "released", "failed" or "expired"."""
        return self._transfer.state.value

    @property
    def done(self) -> bool:
        """Whether the state is final; never blocks."""
        return self._transfer.settled.is_set()

    def wait(self, *, timeout: float) -> None:
        """Return when every declared reader has let go of the payload.

        Raises:
            TransferFailed: it failed, was aborted or rejected, or expired.
            TransferTimeout: `timeout` seconds passed and it is still on its way.
        """
        transfer = self._transfer
        if not transfer.settled.wait(min(timeout, threading.TIMEOUT_MAX)):
            raise TransferTimeout(
                f"payload {self.key!r} is still {self.state} after {timeout:g} s: "
                f"{transfer.unclaimed} readers missing, {len(transfer.leases)} reading",
                key=self.key,
                waited=timeout,
                phase=self.state,
            )
        if transfer.state is not TransferState.RELEASED:
            raise TransferFailed(
                f"payload {self.key!r} {self.state}: {transfer.reason}",
                key=self.key,
                reason=transfer.reason,
            )

    def __repr__(self) -> str:
        return f"<Receipt {self.key!r}: {self.state}>"


class Delivery:
    """A payload that arrived. It is released when the last view of its region is gone.

    Args:
        release: tells the producer; called once, from any thread, must not block or lock.
        draft: of a payload that is still being written, its header without digests.
        progress: how far that one is; None if it is whole.
        copies: times its bytes were copied in this process on their way.
    """

    def __init__(
        self,
        key: str,
        region: Region,
        release: Callable[[Outcome, str], None],
        *,
        draft: bytes = b"",
        progress: Progress | None = None,
        copies: int = 0,
    ):
        self.key, self.copies = key, copies
        self.region: Region | None = region
        self.draft, self.progress = draft, progress
        self._release = release
        self._finalizer = weakref.finalize(region.span, release, "read", "")
        self._finalizer.atexit = False  # at exit the connection's end says it

    def reject(self, reason: str) -> None:
        """The payload is not what was committed: the producer's receipt shall say so."""
        if self._finalizer.detach():
            self._release("rejected", reason[:4096])
        self._let_go(
            TransferFailed(f"payload {self.key!r} was rejected here: {reason}", key=self.key)
        )

    def drop(self) -> None:
        """Let go of the region; views made from it keep it until they die."""
        self._let_go(ClosedError(f"payload {self.key!r} was given back"))

    def give_back(self) -> None:
        """Nobody used it: it shall go to another reader."""
        if self._finalizer.detach():
            self._release("unread", "")
        self.drop()

    def _let_go(self, error: KVLinkError) -> None:
        """Whoever waits for a layer would do so in vain."""
        self.region = None
        if self.progress is not None:
            self.progress.end(error)


class Connector(ABC):
    """One end of a link."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """State and counters, as JSON values."""

    @abstractmethod
    def close(self) -> None:
        """Refuse new work, wake who waits, free what can be freed; a second call does nothing."""


class Producer(Connector):
    """The end that payloads leave from."""

    @property
    def bound_url(self) -> tuple[str, str]:
        """What the URL said, and what it became: the system chose the port."""
        return "", ""

    def has_waiting_reader(self, key: str) -> bool:
        """Whether bytes must travel to a reader that waits now: `begin` lets them set out while
        the rest is being written.
        """
        return False

    @abstractmethod
    def reserve(self, key: str, nbytes: int, *, timeout: float, draft: int = 0) -> Lease:
        """Memory for one payload, in the place it will be sent from.

        Args:
            draft: bytes that `begin` will want for a header; 0 if nothing will be streamed.

        Raises:
            DuplicateKeyError: a live payload has this key.
            CapacityError: no room within `timeout` seconds, or ever.
        """

    @abstractmethod
    def lend(self, lease: Lease) -> Region:
        """The leased memory for somebody who keeps tensors of it beyond `publish`.

        It is not reused before the last view of this region is gone.
        """

    @abstractmethod
    def begin(self, lease: Lease, draft: bytes, *, readers: int) -> None:
        """Announce a payload before it is written, to readers that take its layers.

        Args:
            draft: its header without digests, as long as `reserve` was told.
        """

    def refuses(self, device: str) -> str:
        """Why no payload can be sent from a caller's own memory on this device; "" if it can."""
        return "readers look into the link's own memory here"

    def begin_direct(
        self,
        lease: Lease,
        draft: bytes,
        tensors: Sequence[tuple[int, Region]],
        *,
        nbytes: int,
        readers: int,
    ) -> None:
        """As `begin`, of a payload whose tensors stay where they are: the lease is its header's.

        Each tensor is announced like a stream's. `publish` returns when every reader was sent all
        of them; they may change then, and the payload cannot be delivered again.

        Args:
            tensors: where each begins in the payload, and its memory.
            nbytes: of the payload.
        """
        raise wrong_side("send directly", self.refuses("cpu"))

    @abstractmethod
    def announce(self, lease: Lease, first: int, digests: tuple[bytes, ...]) -> None:
        """The tensors from number `first` on are written; one entry of digests for each.

        Raises:
            TransferFailed: the transfer was ended meanwhile.
        """

    @abstractmethod
    def receipt(self, lease: Lease, ledger: Ledger) -> Receipt:
        """The receipt of a payload that will be published later, or fail."""

    @abstractmethod
    def publish(
        self, lease: Lease, *, readers: int, ttl: float, ledger: Ledger, until: float = 0.0
    ) -> Receipt:
        """Commit a reserved payload; the lease is spent. Readers that wait are woken now.

        Args:
            until: of what `begin_direct` began, when to give up (`time.monotonic`).

        Raises:
            TransferTimeout: so late readers still needed tensors of the caller.
            TransferFailed: the key was aborted meanwhile.
        """

    @abstractmethod
    def give_up(self, lease: Lease, reason: str, *, soon: bool = False) -> None:
        """The payload of this lease will not be finished: as `fail`, but of no other payload.

        Args:
            soon: return before it is done, without a lock: for finalizers.
        """

    @abstractmethod
    def fail(self, key: str, reason: str, *, aborted: bool = False) -> None:
        """Whoever waits for `key`, or asks later, gets TransferFailed with this reason."""


class Consumer(Connector):
    """The end that payloads arrive at."""

    @abstractmethod
    def begin(self, key: str, *, timeout: float, streamed: bool = False) -> PendingGet:
        """Ask for a payload without waiting for it; `timeout` bounds a reconnection only.

        Args:
            streamed: take it while it is being written, its layers announced one by one.

        Raises:
            PeerLostError: the producer is gone and did not come back in time.
        """

    @abstractmethod
    def abort(self, key: str, reason: str) -> None:
        """End this key for both sides; own waiting calls raise TransferFailed."""

    def is_back(self, get_id: PendingGet, *, timeout: float) -> bool:
        """Whether only the connection of this want broke: the very producer that it was asked of
        is there again, and can be asked once more.
        """
        return False

    def receive(self, key: str, *, timeout: float, streamed: bool = False) -> Delivery:
        """Wait for a payload; a wake-up, never a sleep loop. If only a connection
        breaks, ask again.


        Args:
            streamed: as for `begin`.

        Raises:
            TransferTimeout: names how far the payload had come.
            TransferFailed: the producer said it failed, or it expired.
            PeerLostError: the producer died, or closed.
        """
        deadline, retries = time.monotonic() + timeout, 0
        while True:
            get_id = self.begin(key, timeout=deadline - time.monotonic(), streamed=streamed)
            try:
                return get_id.wait(timeout=deadline - time.monotonic())
            except PeerLostError:
                retries += 1
                left = deadline - time.monotonic()
                if retries > MAX_RETRIES or not self.is_back(get_id, timeout=left):
                    raise


class PendingGet(ABC):
    """A payload that was asked for and may not have come yet."""

    future: Future[Any]

    @abstractmethod
    def wait(self, *, timeout: float) -> Delivery:
        """Sleep until it comes; the errors of `Consumer.receive`."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask for it no more; if it came meanwhile, it goes back for another reader."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """What a connector module offers.

    Args:
        serve: `(address, options)` to a producer; `address` is the URL without its scheme.
        connect: `(address, options, timeout)` to a consumer, waiting for the producer to appear.
        unavailable: why this cannot run here, with the cure, or None if it can.
    """

    serve: Callable[[str, Options], Producer]
    connect: Callable[[str, Options, float], Consumer]
    unavailable: Callable[[], str | None] = lambda: None


def wrong_side(verb: str, cure: str) -> KVLinkError:
    """The error for a producer's verb at a consumer, or the other way round."""
    return KVLinkError(f"this end of the link cannot {verb}: {cure}")
