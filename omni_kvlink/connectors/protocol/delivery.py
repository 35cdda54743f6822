"""A payload that arrived, and the lease which its views hold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from omni_kvlink.connectors.protocol.messages import Outcome, shorten
from omni_kvlink.errors import ClosedError, KVLinkError, SchemaError, TransferFailed, WireError
from omni_kvlink.memory.region import LOST, Finalizer, Region
from omni_kvlink.payload.layout_cache import KnownHeader
from omni_kvlink.payload.manifest import header_bytes
from omni_kvlink.system import process

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.progress import Progress
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Manifest

T = TypeVar("T")


class Coalesce(Protocol):
    """Calls a function, and sends the messages that it causes in as few as possible."""

    def __call__(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result."""


def send_separately(act: Callable[[], T]) -> T:
    """Call `act` and return its result; its messages are not coalesced."""
    return act()


class DeliveryLease(Protocol):
    """The lease of an offered payload, which its `Delivery` ends."""

    def path_name(self, *, is_copy: bool) -> str:
        """Return the path that it came by; `is_copy`: to memory of this process."""

    def release(self, outcome: Outcome, reason: str) -> None:
        """End it; called once, in any thread. It must neither block nor take a lock."""

    def reject(self, reason: str) -> None:
        """Tell the producer that the payload is bad, while views of it are in use; not to block."""

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act` and return its result; what it releases and requests may be sent in one."""


def is_fault_of_payload(error: BaseException) -> bool:
    """Whether the bytes of a payload that was being opened are the reason of `error`."""
    return isinstance(error, (WireError, SchemaError))


_UNREAD: tuple[Outcome, str] = ("unread", "")
_READ: tuple[Outcome, str] = ("read", "")


class LeasedSpan(Finalizer):
    """Ends a lease, once, when the last view of a payload is freed, or before.

    At exit it does nothing: the end of the connection releases the payload.
    """

    __slots__ = ("lease", "outcome")

    lease: DeliveryLease
    outcome: tuple[Outcome, str]

    @classmethod
    def attach(cls, region: Region, lease: DeliveryLease) -> LeasedSpan:
        """Return a new one, unread, which lives as long as the lease."""
        span = cls(region.span, cls.run)
        span.lease, span.outcome = lease, _UNREAD
        span.begin(region.span)
        return span

    def end(self) -> None:
        """End the lease."""
        self.lease.release(*self.outcome)


class Delivery:
    """A payload that arrived. Its lease ends when the last view of its region is freed.

    The outcome is "unread", also if it is only dropped, until its reader says that it was read, by
    `release` or `mark_read`. Of `release`, `release_unread` and `reject`, the first call decides.

    Attributes:
        key: of the payload.
        region: its bytes; None once it was released.
        draft: of a payload that is still being written: its header without digests.
        progress: of a payload that is still being written; None if it is complete.
        manifest: its header, if the connector has decoded it.
        copies: times its bytes were copied in this process.
        head: if the region is a copy of the payload in memory of this process: what it was copied
            from, the header at least, until it was opened.
        is_verified: whether every byte was, or is before its layer is announced, compared with its
            digest on arrival.

    `extra` is the metadata at the end of a stream that was offered after it.
    """

    def __init__(
        self,
        key: str,
        region: Region,
        lease: DeliveryLease,
        *,
        draft: bytes = b"",
        progress: Progress | None = None,
        manifest: Manifest | None = None,
        copies: int = 0,
        is_verified: bool = False,
        head: memoryview | None = None,
        extra: bytes = b"",
    ):
        self.head, self._extra = head, extra
        self.key, self.copies, self.is_verified = key, copies, is_verified
        self.draft, self.progress, self.manifest = draft, progress, manifest
        self.region: Region | None = region
        self._process = process.current
        self._span = LeasedSpan.attach(region, lease)

    def __repr__(self) -> str:
        return f"<Delivery of {self.key!r}{', released' if self.region is None else ''}>"

    @property
    def scheme(self) -> str:
        """The scheme of the connection that it came over, for observers; "" if it has none."""
        return getattr(self._span.lease, "scheme", "")

    @property
    def path(self) -> str:
        """The path that its bytes have come by, as `Ledger.path` says it."""
        return self._span.lease.path_name(is_copy=self.copies > 0)

    @property
    def extra(self) -> bytes:
        """The metadata at the end of a stream, as it was sent; b"" before the end, and if none."""
        return self._extra if self.progress is None else self.progress.extra

    def check_process(self) -> None:
        """Raise ClosedError in a forked child: the memory may be reused without its knowledge."""
        self._process.check(f"payload {self.key!r}")

    @property
    def is_read(self) -> bool:
        """Whether the payload counts as read when its lease ends, or has ended."""
        return self._span.outcome is _READ

    def mark_read(self) -> None:
        """Count it as read from now on, if it is dropped: its reader has taken it to its end."""
        if self.region is not None and self._span.outcome is _UNREAD:
            self._span.outcome = _READ

    def open_region(self) -> Region:
        """Return `region`; ClosedError if it was released, or belongs to a parent process."""
        if not self._process.is_current:
            self.check_process()
        region = self.region
        if region is None:
            raise ClosedError(f"payload {self.key!r} was released; use it inside its `with` block")
        if region.is_lost:
            raise ClosedError(f"payload {self.key!r}: {LOST}; get it in this process")
        return region

    def open_manifest(self, region: Region, layouts: LayoutCache) -> Manifest:
        """Return the manifest of what was requested; WireError if it is another payload's."""
        header = self.open_header(region, layouts)
        return header.manifest() if isinstance(header, KnownHeader) else header

    def open_header(self, region: Region, layouts: LayoutCache) -> Manifest | KnownHeader:
        """Return the header of what was requested; WireError if it is another payload's."""
        header: Manifest | KnownHeader | None = self.manifest
        if header is None:
            head, self.head = self.head, None
            text = self.draft or head or header_bytes(region)
            header = layouts.read_header(text, region.nbytes)
        if header.request_id != self.key:
            raise WireError(f"requested {self.key!r}, the payload says it is {header.request_id!r}")
        return header

    def reject(self, reason: str, *, at_once: bool = False) -> None:
        """Release a payload that is not what was committed; the producer learns it at once.

        Views that were handed out stay valid: the lease ends with the last of them. With `at_once`
        it ends now, because nobody has a view that will be used.
        """
        is_first = self._span.outcome[0] != "rejected"
        self._span.outcome = "rejected", shorten(reason)
        self._drop_region(
            TransferFailed(f"payload {self.key!r} was rejected here: {reason}", key=self.key)
        )
        if at_once:
            self._span.run()
        elif is_first and self._span.is_alive and self._process.is_current:
            self._span.lease.reject(shorten(reason))

    def release(self) -> None:
        """Drop the region, as read; the lease ends when the last view of it is freed, too."""
        if self.region is None:
            return
        if self._span.outcome is _UNREAD:
            self._span.outcome = _READ
        self._give_back()

    def release_unread(self) -> None:
        """Do what `release` does, and let another reader have the payload, unless it is bad."""
        if self.region is not None:
            self._mark_unread()
            self._give_back()

    def drop_unread(self) -> None:
        """Do what `release_unread` does with a complete payload, without a lock: for finalizers."""
        self._mark_unread()
        self._drop()

    def _mark_unread(self) -> None:
        if self._span.outcome is _READ:
            self._span.outcome = _UNREAD

    def end_after(self, error: BaseException) -> None:
        """End the lease now: nobody has a view that will be used, because `error` was raised.

        The payload is rejected if `is_fault_of_payload(error)`. After any other error, such as that
        of a signal handler or of missing memory, another reader may have it.
        """
        if is_fault_of_payload(error):
            self.reject(str(error) or repr(error), at_once=True)
        else:
            self.release_unread()
            self._span.run()  # the error's traceback may keep a view

    def coalesce(self, act: Callable[[], T]) -> T:
        """Call `act`; what it releases and requests is sent in one message, if possible."""
        return self._span.lease.coalesce(act)

    def _give_back(self) -> None:
        drop = self._drop
        if self.progress is not None:
            error = ClosedError(f"payload {self.key!r} was given back")
            drop = partial(self._drop_region, error)
        self._span.lease.coalesce(drop)

    def _drop(self) -> None:
        self.region = None

    def _drop_region(self, error: KVLinkError) -> None:
        self.region = None
        if self.progress is not None and self._process.is_current:  # it takes a lock
            self.progress.fail(error)
