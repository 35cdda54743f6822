"""The contracts of a connector, which moves bytes and manifests between stages: no torch, no model.

A backend is a module with a `BACKEND: Backend`; a row in `registry` or an entry point names it.
`check_connector` in `omni_kvlink.testing` checks a backend against these contracts.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from omni_kvlink._native.device_memory import number_of
from omni_kvlink.connectors.protocol.messages import DEFAULT_INLINE, INLINE, SLOT
from omni_kvlink.connectors.protocol.path import REQUIREMENTS
from omni_kvlink.errors import ClosedError, KVLinkError, SchemaError, UnavailableError
from omni_kvlink.payload.format import MAX_HEADER
from omni_kvlink.payload.layout_cache import LayoutCache
from omni_kvlink.settings import (
    Choice,
    Choices,
    FilePath,
    Integer,
    ListOf,
    Settings,
    Size,
    Text,
)
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.protocol.delivery import Delivery as Delivery
    from omni_kvlink.connectors.protocol.get_table import GetRequest
    from omni_kvlink.connectors.protocol.messages import Inspected
    from omni_kvlink.connectors.protocol.transfer import Ledger as Ledger
    from omni_kvlink.connectors.protocol.transfer import Receipt as Receipt
    from omni_kvlink.memory.region import Lease, Region
    from omni_kvlink.system.waits import Deadline, LazyEvent

_SLOT_OVERHEAD = SLOT + 2 * (8 + MAX_HEADER)
"""Bytes of a payload's slot that are no tensors: its head, the header, and the draft of one."""
MAX_RETRIES = 3
"""Times that a `get` is repeated when only its connection broke."""


class Device(Text):
    """The name of a CUDA device, or one of the other texts given here; by default the empty one."""

    def __init__(self, *also: str):
        super().__init__()
        self.also = ("", *also)
        others = " or ".join(map(repr, self.also))
        self.allowed = f"'cuda:0', with this or another number, or {others}"

    def _read(self, value: Any, name: str) -> str:
        text = super()._read(value, name)
        is_known = text in self.also or number_of(text) is not None
        return text if is_known else self.refuse(value, name)


class Uids(ListOf):
    """A list, a tuple or a set of user ids, which becomes a tuple; in a URL "1000,1001"."""

    def __init__(self) -> None:
        super().__init__(Integer(least=0, most=(1 << 32) - 2))

    def _read(self, value: Any, name: str) -> tuple[Any, ...]:
        is_set = isinstance(value, (set, frozenset))
        return super()._read(list(value) if is_set else value, name)

    def _parse(self, text: str, name: str) -> tuple[Any, ...]:
        return tuple(self.rule.parse(uid, name) for uid in text.split(","))


@dataclasses.dataclass(frozen=True)
class Options(Settings):
    """The options of a link's end; a connector uses those that concern it.

    Keywords of `KVLink.serve` and `KVLink.connect`; they may stand in the URL, too. Sizes are whole
    numbers of bytes, or texts: "8GB" is 8 × 10⁹ bytes, "512MiB" is 512 × 2²⁰. Flags are True or
    False, and in a URL true, false, 1 or 0. SchemaError if a value is of another type or range.

    Args:
        quota: bytes of memory that all payloads not yet released may take together.
        mode: "pooled" reuses arenas that every peer maps whole; "sealed" gives each payload a
            memory file of its own, so that a peer sees nothing but what it was offered.
        prefault: bytes of payloads for which memory is mapped and touched in a thread from the
            moment the link opens, so that the first transfer is as fast as the later ones; or a
            payload as large as the largest one, such as `KVCacheTransferData.blank` returns. Of a
            `shm://` link the producer's alone counts. What needs the memory earlier waits for it.
            `stats()["memory"]["prefault"]` says when it is mapped. If it is not given, the
            producer of a `shm://` or `auto://` link maps 64 MiB so, in a thread of low priority for
            which nothing waits, where that is little memory; 0: none.
        inline: bytes of the largest payload of host tensors that a producer sends inside the
            message that offers it, at most 32,768 (default 16,384): its reader gets a copy of its
            own, sooner. Larger ones, and with 0 all, are sent from the link's memory.
        directory: where the shared-memory sockets lie; by default a directory of this user.
        allow_uids: of a link over shared memory, the users beside this one who may be at the other
            end: of a producer those who may connect, of a consumer those who may serve. Both need
            `directory`, one of mode 2770 that is there, of a group that all of them are in. A
            user namespace shows every user that it does not map as uid 65534.
        keys: of an encrypted link, the file with this side's secret key; without it, both ends on
            loopback use a key of their user.
        peers: of an encrypted link, who the other side may be: for a producer the directory with
            its readers' public keys, for a consumer the producer's public key file.
        insecure: use no keys over TCP, neither between machines nor on loopback; whoever can reach
            the address can then read, forge and abort payloads. At both ends.
        lanes: of a link over TCP (`zmq+tcp://`, `auto://`), TCP connections that each reader opens
            beside the one for messages, for bytes alone, 16 at most; the smaller number of both
            ends counts. By default (-1), of a link with keys one for each core, 8 at most, if the
            package `cryptography` is there (else `stats()` says so); without keys none, as with 0:
            bytes share the connection of the messages.
        trusted_network: allow UCX. Its ports authenticate nobody: whoever reaches one, on loopback
            every user of the machine, can write into this process's memory, read payloads, and end
            the process.
        ucx_tls: the transports that UCX may use, as in UCX_TLS: "rc,tcp".
        ucx_devices: the network devices that UCX may use, as in UCX_NET_DEVICES: "eth0". Only
            loopback if empty; name them for a link to other machines.
        tcp: of `auto://`, the `host:port` for readers that share no memory with the producer.
        device: the CUDA device, such as "cuda:0", in whose memory this end's payloads are to lie:
            those of `put` are copied there, those of `get` are tensors there. Memory for the whole
            `quota` is allocated at once. It takes a `ucx://` link with a CUDA transport in
            `ucx_tls`; elsewhere they lie in the host's, and `stats()` says why.
        require: what the path of the bytes must be, one or several of "shm" (memory that both ends
            map), "encrypted" (or on one kernel), "rdma" and "gpu". A link that would take another
            path is refused when it opens, on both sides, and when it reconnects.
    """

    quota: Annotated[int, Size(least=1)] = 4 << 30
    mode: Annotated[str, Choice("pooled", "sealed")] = "pooled"
    prefault: Annotated[int, Size()] | None = None
    inline: Annotated[int, Size(most=INLINE)] = DEFAULT_INLINE
    directory: Annotated[str, FilePath()] = ""
    allow_uids: Annotated[tuple[int, ...], Uids()] = ()
    keys: Annotated[str, FilePath()] = ""
    peers: Annotated[str, FilePath()] = ""
    insecure: bool = False
    lanes: Annotated[int, Integer(least=-1, most=16)] = -1
    trusted_network: bool = False
    ucx_tls: str = "tcp"
    ucx_devices: str = ""
    tcp: str = ""
    device: Annotated[str, Device()] = ""
    require: Annotated[tuple[str, ...], Choices(*REQUIREMENTS)] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefault is not None and self.prefault > self.quota:
            raise SchemaError(
                f"prefault={self.prefault}: not within the quota {self.quota}; raise quota="
            )

    @property
    def prefault_nbytes(self) -> int:
        """Bytes to map ahead: payloads of `prefault` bytes, and what a slot has beside them."""
        return min(self.quota, self.prefault + _SLOT_OVERHEAD) if self.prefault else 0


def refuse_keys(url: str, options: Options) -> None:
    """Raise SchemaError if keys were given to a connector that does not encrypt."""
    if options.keys or options.peers:
        raise SchemaError(
            f"{url} never leaves this machine, and is not encrypted: leave keys= and peers= out"
        )


class Connector(ABC):
    """One end of a link, called `label` in errors; it belongs to the process that opened it.

    Attributes:
        device: the device whose memory its payloads lie in, such as "cuda:0"; "" for the host's.
        host_reason: why that is the host's although `Options.device` names a device, with the cure;
            "" if the connector always uses the host's.
        tells_path: whether it keeps to `Options.require`, and `stats()` has the `path`.
        layouts: those of the payloads that went over this end.
        scheme: of the URL that it was opened with, once a `LinkEnd` has it; for observers.
    """

    tells_path = False
    device: str = ""
    scheme: str = ""
    host_reason: str = ""

    def __init__(self, label: str):
        self._label, self._process, self._closed = label, process.current, False
        process.close_in_children(self)
        self.layouts = LayoutCache()

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the state and the counters of this end, as JSON values."""

    @abstractmethod
    def close(self) -> None:
        """Refuse new calls, wake waiting ones, free what can be freed; idempotent."""

    def close_deferred(self) -> None:
        """Begin to close, and return before that is done; takes no lock: for finalizers.

        The cyclic collector runs a finalizer in any thread, whatever that thread has locked. A
        connector without a thread of its own that could close it closes at once.
        """
        self.close()

    def _begin_close(self) -> bool:
        """Refuse new calls; return whether `close` has more to do: once, and in no forked child."""
        is_first = not self._closed
        self._closed = True
        return is_first

    def _check_process(self) -> None:
        self._process.check(f"link {self._label}")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError(f"link {self._label} is closed")


class PutRequest(Protocol):
    """One payload that a producer reserves memory for."""

    key: str
    nbytes: int
    draft: int
    """Bytes of the header that `Producer.begin` is given; 0 if it is not called."""
    packed: bytes
    """All of a payload of at most `Producer.inline_limit` bytes, to travel inside its offers."""
    stream: Lease | None
    """The lease of an append stream, of which the payload is the next chunk."""


class KeptPayloads(Protocol):
    """The payloads that a producer keeps, for any number of readers."""

    def withdraw(self, key: str) -> bool:
        """End a payload; False if there is none. Its readers go on, and new ones wait."""

    def contains(self, keys: Sequence[str]) -> Sequence[bool]:
        """Return whether each key is kept; each that is counts as used."""

    def lend(self, key: str) -> Delivery | None:
        """Return a payload as a reader in this process has it; None if there is none.

        It is in use until the last view of its region is freed, and a reject fails it for all.
        """

    def fail_missing(self, key: str, reason: str) -> None:
        """Fail the gets that wait for a key, unless it has a payload; later ones may wait again."""


class Producer(Connector):
    """The end of a link that sends payloads. A batch is the primitive, one payload a batch of one.

    The bytes of a payload lie in its lease's region, unless they are packed or the caller's own.

    Attributes:
        inline_limit: bytes of the largest payload that may be packed; 0: none.
    """

    inline_limit = 0

    @property
    def bound_url(self) -> tuple[str, str]:
        """The address as in the URL, and the bound one with the port that was assigned."""
        return "", ""

    def give_way(self) -> None:
        """Let the connector's thread answer readers, if one has sent a message; blocks for that.

        For long calls, which keep that thread from the interpreter's lock.
        """

    def has_waiting_reader(self, key: str) -> bool:
        """Return whether a reader waits for `key` that takes bytes while they are being written."""
        return False

    @abstractmethod
    def reserve(
        self, requests: Sequence[PutRequest], *, deadline: Deadline, leases: list[Lease]
    ) -> None:
        """Append the lease of each payload to `leases`; after an error the caller releases those.

        Memory may be waited for, and mapped, until the `deadline`. A packed payload waits for none
        as long as the quota has room. The chunk of an append stream waits for readers to release
        the oldest of the stream's window.

        Raises:
            DuplicateKeyError: a live payload has one of the keys.
            CapacityError: the payloads do not fit before the deadline, or ever.
            TransferTimeout: it passed while the memory was being mapped.
        """

    @abstractmethod
    def lend(self, lease: Lease) -> Region:
        """Return the leased memory, which is not reused before the last view of it is freed."""

    def direct_refusal(self, device: str) -> str:
        """Return why payloads cannot be sent directly from tensors on `device`; "" if they can."""
        return "readers look into the link's own memory, so put without direct=True, which copies"

    @abstractmethod
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
        """Offer a payload before it is written, to readers that take its layers.

        `draft` is its header without digests, as long as `reserve` was told.

        With `tensors` they are sent from the caller's memory, and only the header lies in `lease`:
        for each the byte at which it begins in the payload of `nbytes`, and its memory. `publish`
        then returns when every reader was sent all of them: they may be modified again, and the
        payload cannot be delivered again.

        With a `window` it is an append stream, for readers that take its chunks, which are reserved
        with this lease as their `stream`. At most `window` chunks are kept that a reader has not
        released. The lease is published when the stream has ended.
        """

    @abstractmethod
    def announce(self, lease: Lease, first: int, digests: tuple[bytes, ...]) -> None:
        """Announce that the tensors with these digests are written, from number `first` on.

        Raises:
            TransferFailed: the transfer was ended meanwhile.
        """

    @abstractmethod
    def receipt(self, lease: Lease, ledger: Ledger) -> Receipt:
        """Return the receipt of a payload that is not published yet."""

    @abstractmethod
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
        """Commit payloads and spend their leases; readers that wait are woken before this returns.

        All of them are committed, or, on an error, none; an interrupt may leave some. They expire
        after `ttl` seconds. With `readers` None they are kept, for any number of readers, until
        `kept.withdraw`, or until a `reserve` that finds no memory evicts one that nobody uses, the
        least recently used first. A payload of the caller's tensors waits for its readers until
        `deadline` (`time.monotonic`). `extra` is the metadata at the end of the first, a stream.

        Raises:
            DuplicateKeyError: a live payload has the key of one that was packed.
            TransferTimeout: readers still needed the caller's tensors at `deadline`.
            TransferFailed: a key was aborted meanwhile.
        """

    @abstractmethod
    def abort(self, lease: Lease, reason: str, *, deferred: bool = False) -> None:
        """Fail the transfer of this lease instead of publishing it; later ones of its key go on.

        With `deferred` it returns before that is done and takes no lock: for finalizers.
        """

    @property
    def kept(self) -> KeptPayloads:
        """Access to the kept payloads: those published with `readers` None.

        KVLinkError if the connector keeps none; its `publish` refuses them, too.
        """
        raise KVLinkError(f"link {self._label} keeps no payloads: put them for a number of readers")

    @abstractmethod
    def fail(self, key: str, reason: str, *, aborted: bool = False) -> None:
        """Fail or abort a key, which need not exist: gets of it, also later ones, will raise."""


class InlineTarget(Protocol):
    """Memory for one payload that comes inside its offer, if it is what its reader expects."""

    is_covered: bool
    """Whether the payload has a digest for every byte of its tensors; after `open`."""

    def open(self) -> None:
        """Make the memory; called once, before the reader blocks, and not at all if it does not."""

    def fill(self, payload: memoryview, *, verify: bool) -> Region | None:
        """Copy the payload to it, and return it; None if it is another one, or was not opened.

        With `verify` also None if a digest does not fit.
        """

    def discard(self) -> None:
        """Forget the payload that `fill` has copied: the get was not answered with it."""


class PendingGet(ABC):
    """A payload that was requested; `future` is done when `wait` would not block."""

    future: Future[Any]
    connection: object = None
    """The source that `receive_until` receives from; None if it does nothing."""
    inline_target: InlineTarget | None = None
    """Memory that `wait` fills where payloads come inside their offers; else it is not used."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'done' if self.is_done else 'waits'}>"

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not block."""
        return self.future.done()

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Call this once when `is_done` has become true, at once or later, in any thread.

        What it is called with means nothing.
        """
        self.future.add_done_callback(callback)

    def receive_until(self, event: LazyEvent, deadline: float) -> None:  # noqa: B027 (optional)
        """Receive messages in the calling thread until `event` is set, where that is possible.

        It returns at the `deadline` (`time.monotonic`) at the latest, and may return at once.
        """

    @abstractmethod
    def wait(self, *, timeout: float) -> Delivery:
        """Block until it arrives; `timeout` seconds at most, from this call on.

        Raises:
            TransferTimeout: it did not arrive in time; tells how far it was.
            TransferFailed: the producer failed or aborted it, or it expired.
            PeerLostError: the producer died, or closed the link.
        """

    def request_chunk(self, number: int) -> PendingGet:
        """Request a chunk of the stream that this get has received, written or not.

        It ends with `StreamEnded` if there is no such chunk. Does not block.
        """
        raise NotImplementedError

    @abstractmethod
    def cancel(self) -> None:
        """Withdraw the request; if the payload arrived meanwhile, another reader may have it.

        Does nothing to a get that was cancelled before, or whose `wait` has ended.
        """


class Consumer(Connector):
    """The end of a link that receives payloads."""

    @property
    def is_connected(self) -> bool:
        """Whether `begin` returns at once; False if it may have to reconnect first."""
        return False

    @abstractmethod
    def begin(
        self, requests: Sequence[GetRequest], *, timeout: float, verify: bool = True
    ) -> list[PendingGet]:
        """Request payloads, in one message where the connector can, and do not wait for them.

        The delivery of an append stream has a draft header and a progress; `request_chunk` requests
        its chunks. A connector without such streams calls `refuse_streams`.

        With `verify`, a connector that copies the bytes through a socket or a network compares each
        with its digest before it delivers it; see `Delivery.is_verified`.

        Raises:
            PeerLostError: the producer was lost and did not return within `timeout` seconds.
            KVLinkError: the connector has no append streams, and one is requested.
        """

    def refuse_streams(self, requests: Sequence[GetRequest]) -> None:
        """Raise KVLinkError if an append stream is requested; for a connector that has none."""
        if any(request.chunk is not None for request in requests):
            text = f"link {self._label} has no append streams: its connector lacks them"
            raise KVLinkError(text)

    def contains(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        """Return for each key whether a get of it would have its payload at once; blocks for that.

        One message for up to `MAX_KEYS` keys.

        Raises:
            TransferTimeout: the answer did not come in time.
            PeerLostError: the producer is gone, and did not come back in time.
            KVLinkError: the connector cannot ask.
        """
        raise KVLinkError(f"link {self._label} cannot ask for keys: its connector lacks that")

    @abstractmethod
    def abort(self, key: str, reason: str) -> None:
        """End this key for both sides; waiting calls of this side raise TransferFailed."""

    def inspect(self, after: int, prefix: str, *, timeout: float) -> Inspected:
        """Return a page of the payloads that the producer keeps; blocks for the answer.

        They have an epoch above `after`, and a key that begins with `prefix`.

        Raises:
            ConnectorError: this process has not the producer's owner's rights.
            VersionError: the producer is of a version that cannot be inspected.
            TransferTimeout: it did not answer within `timeout` seconds.
            PeerLostError: it is gone.
            UnavailableError: the connector cannot ask.
        """
        self._check_open()
        raise UnavailableError(
            f"link {self._label} cannot be inspected by its connector; its producer has stats()"
        )

    def can_retry(self, pending: PendingGet, *, timeout: float) -> bool:
        """Return whether only the connection of a get broke, so that it can be requested again.

        Reconnects if need be, for `timeout` seconds at most. False if the producer is another one
        than that of the get: it does not have the payload.
        """
        return False


@dataclasses.dataclass(frozen=True)
class Backend:
    """The entry points of a connector module.

    Args:
        serve: `(address, options)` to a producer; `address` is the URL without its scheme.
        connect: `(address, options, timeout)` to a consumer; waits for the producer to appear.
        unavailable: returns why the connector cannot run here, with the cure, or None if it can.
    """

    serve: Callable[[str, Options], Producer]
    connect: Callable[[str, Options, float], Consumer]
    unavailable: Callable[[], str | None] = lambda: None
