"""A get over the control channel, and the transfer that brings its payload into this process.

One long file: the get, the transfer and what the get keeps of it contend for one state.
"""

from __future__ import annotations

import enum
import threading
import time
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink.connectors.control.kept_bytes import KeptBytes, TransferIdentity
from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.protocol.fetch_plan import FetchPlan
from omni_kvlink.connectors.protocol.messages import Chunk, Committed, Layer, shorten
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.consumer import Session, SessionGet
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, VersionError, WireError
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.digests import mismatch, verified
from omni_kvlink.payload.format import ALIGN, MAX_HEADER, MAX_TENSORS
from omni_kvlink.payload.manifest import header_bytes
from omni_kvlink.system.waits import MAX_TIMEOUT, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omni_kvlink.connectors.control.receive_pool import SessionResources
    from omni_kvlink.connectors.protocol.fetch_plan import ArrivingChunk
    from omni_kvlink.connectors.protocol.get_table import GetLease, GetRequest
    from omni_kvlink.connectors.protocol.messages import Offer, Outcome
    from omni_kvlink.memory.block import Block
    from omni_kvlink.payload.layout_cache import LayoutCache
    from omni_kvlink.payload.manifest import Manifest, TensorSpec

_WHOLE, _TENSOR = "whole", "tensor"
Label: TypeAlias = "str | Layer"


class RemoteGet(SessionGet):
    """A pending get; it is done when the payload has arrived, or with the error.

    If `delivery` is set, the thread that waits has received a small payload itself. Else the loop
    fetches the payload: `inbound`, which outlives the get, until the payload is released.

    `kept` is what had come when the connection of this get broke, or that of an earlier one of its
    key, of which it was found in the mapping `kept` of the consumer.
    """

    session: FetchingSession
    delivery: Delivery | None = None
    inbound: InboundTransfer | None = None

    def __init__(
        self,
        session: FetchingSession,
        kept: Mapping[str, KeptBytes],
        get_id: int,
        request: GetRequest,
        drop: Callable[[Any], None],
        **options: bool,
    ):
        self.is_resumable = not request.streamed and request.chunk is None
        self.kept = kept.get(request.key) if self.is_resumable else None
        super().__init__(session, get_id, request, drop, **options)

    def wait(self, *, timeout: float) -> Delivery:
        """Block until the payload has arrived; see `PendingGet`."""
        deadline = time.monotonic() + check_timeout(timeout)
        if not self._process.is_current:
            self._process.check(f"the get of {self.key!r}")
        if timeout and not self.answer.is_set():
            self.session.receive(self, deadline)
        if self.delivery is not None:
            delivery, self.delivery = self.delivery, None
            return delivery
        try:
            if not self.done.wait(max(0.0, deadline - time.monotonic())):
                if self._withdraw():
                    raise self.timeout_error()
                self.done.wait(MAX_TIMEOUT)  # it is being set
            self.done.result()
        except KVLinkError as error:
            self.settle()
            if not isinstance(error, PeerLostError):
                self.drop_kept()
            self.report(self.session.get_table.scheme, error)
            raise
        except BaseException:
            self.cancel()
            raise
        assert self.inbound is not None
        delivery = self.inbound.deliver()
        self.settle()
        return delivery

    def cancel(self) -> None:
        """Stop waiting; a payload that has arrived is released unread. See `PendingGet`."""
        self.delivery = None
        self.drop_kept()
        if self.is_settled:
            return
        if not self._withdraw():
            self.done.wait(MAX_TIMEOUT)  # it is being set
            if self.done.error is None and self.inbound is not None:
                self.inbound.lease.release("unread", "")
        self.settle()

    def drop_kept(self) -> None:
        """Free what came over a connection that broke; the payload is not requested again."""
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.release()

    def _withdraw(self) -> bool:
        """End the get, unless its payload has arrived or its error has come."""
        if self.session.get_table.cancel(self):
            return True
        self.answer.wait(MAX_TIMEOUT)  # it is being set
        if self.answer.error is not None:
            return False
        if self.inbound is None:  # an interrupt ended the call of `receive`
            self.session.get_table.drop(self)
            return True
        self.phase = self.inbound.phase
        return self.inbound.cancel()

    def open(
        self, payload: memoryview, layouts: LayoutCache
    ) -> tuple[Region, Manifest | None, bool] | None:
        """Return memory with the payload, its manifest if decoded, and whether all was compared.

        None if it is not as committed.
        """
        is_compared, target = self.verify, self.inline_target
        if target is not None:
            region = target.fill(payload, verify=is_compared)
            if region is not None:
                return region, None, is_compared and target.is_covered
        region = Region.copy_of(payload)
        if not is_compared:
            return region, None, False
        manifest = verified(payload, region, layouts)
        return None if manifest is None else (region, manifest, manifest.is_covered)


class FetchingSession(Session):
    """A session that brings payloads here, in its loop or in a thread that waits for one."""

    @abstractmethod
    def receive(self, get: RemoteGet, deadline: float) -> None:
        """Block until `get.delivery` is there or the get has ended, to the `deadline` at most.

        It may return earlier, and leave the get to the loop.
        """


class InboundState(enum.Enum):
    """The state of an `InboundTransfer`."""

    PENDING = "pending"
    READY = "ready"
    ENDED = "ended"


class InboundTransfer:
    """A payload that was offered and is being fetched.

    ```text
            ┌── all of it has come; of a stream, its header ──► READY ──┐
    PENDING ┤                                                   released│
            └── cancelled, failed, rejected ──────────────────► ENDED ◄─┘
    ```
    The loop, and the thread that cancels, contend for the step from PENDING: who takes it completes
    the get, with the error if there is one. What a stream still receives in READY (`progress`), and
    that a payload was rejected (`_error_text`), are beside the state.

    Methods are called in the loop's thread, except those under "For any thread". The end of `lease`
    tells the producer the outcome and leads to `close`. `fetch_more` is called with this object
    whenever `plan` may have ranges to request, of `chunk` bytes at most. A stream's layers are
    delivered one by one, as they arrive (`progress`). `inline_bytes`: the first bytes that are
    needed, if they travelled with the offer.

    With the get's `verify`, bytes are compared with their digests as they arrive, before anything
    is delivered that depends on them. A wrong MiB of a tensor, or a wrong header, is fetched once
    more; if it is wrong again, the payload is rejected. The consumer's counters count both.
    """

    def __init__(
        self,
        resources: SessionResources,
        get: RemoteGet,
        offer: Offer,
        lease: GetLease,
        fetch_more: Callable[[InboundTransfer], None],
        inline_bytes: bytes,
        chunk: int,
    ):
        self.key, self.offer, self.streamed = get.key, offer, get.streamed
        self.verify, self.state = get.verify, InboundState.PENDING
        self.plan: FetchPlan[Label] = FetchPlan(offer.location.nbytes + offer.draft, chunk)
        self.progress = Progress() if self.streamed else None
        self.ready = get.done
        self._receive_pool, self._layouts, self._counters = resources[4:7]
        self._fetch_more, self.lease, self._inline_bytes = fetch_more, lease, inline_bytes
        self._get = weakref.ref(get)  # which owns this transfer
        self.kept: KeptBytes | None = None  # to go on with; at the end, what its get keeps
        self._block: Block | None = None
        self._region: Region | None = None
        self._manifest: Manifest | None = None
        self._waiting_messages: list[Layer | Committed] = []
        self._extra = self.offer.extra  # or that of its `Committed`
        self._uncommitted: list[Layer] = []
        self._lock = threading.Lock()
        self._is_committed = False
        self._error_text = ""  # why the payload was rejected
        self._announced: dict[int, bytes] = {}
        self._bad_headers = set[int]()
        head = min(offer.location.nbytes, 8 + MAX_HEADER + ALIGN)
        self._header_range = offer.first if offer.draft else (0, head)

    # For any thread

    @property
    def phase(self) -> str:
        """The step that the payload has reached, for the message of a timeout."""
        if self._region is None:
            return "announced; it waits for memory of this consumer: raise quota=, or release"
        return f"announced; {self.plan.received_nbytes} of {self.plan.nbytes} bytes have come"

    def cancel(self) -> bool:
        """Release the payload unread; return False if it was delivered or failed before."""
        is_first = self._decide(InboundState.ENDED)
        if is_first:
            self.lease.release("unread", "")
        return is_first

    def deliver(self) -> Delivery:
        """Return the payload, once, after `ready` has completed."""
        fault_points.point("get.mapped")
        assert self._block is not None
        region = self._receive_pool.region(self._block).slice(0, self.offer.location.nbytes)
        region.readonly = True
        manifest = self._manifest
        is_verified = self.verify and manifest is not None and manifest.is_covered
        self._counters["verified" if is_verified else "unverified"] += 1
        return Delivery(
            self.key,
            region,
            self.lease,
            progress=self.progress,
            manifest=manifest,
            copies=1,
            is_verified=is_verified,
            extra=self._extra,
        )

    # In the loop's thread

    def resume(self, kept: KeptBytes, incarnation: str) -> None:
        """Go on with what was kept if it is of this very transfer; else free it."""
        is_here = self._inline_bytes and not self.offer.draft
        if kept.identity == self._identity(incarnation) and not is_here:
            self.kept = kept
        else:
            kept.release()

    def on_allocated(self, block: Block) -> None:
        """Request the bytes that are needed first, now that there is memory for them."""
        self._block = block
        self._region = self._receive_pool.region(block)
        kept, self.kept = self.kept, None
        if kept is not None and kept.taken is block:  # else it was freed meanwhile
            parts = kept.parts
            self.plan.adopt(parts)
            again = kept.requested_nbytes - self.plan.received_nbytes
            self._counters.update(
                resumed=1, kept_nbytes=self.plan.received_nbytes, again_nbytes=again
            )
        if self._take_whole():
            return
        if self.streamed or self.offer.draft:
            self.plan.fetch(*self._header_range)
        else:
            self.plan.request(0, self.offer.location.nbytes, _WHOLE)
        if self._inline_bytes:
            self.plan.next_range(len(self._inline_bytes))  # counts as requested
            inline_bytes, self._inline_bytes = self._inline_bytes, b""
            self.on_received(self.offer.first[0], memoryview(inline_bytes))
        else:
            self._continue()

    def _take_whole(self) -> bool:
        """Take a payload that came inside its offer, all at once; False if it must be fetched.

        Also of a wrong one: what is wrong with it is found, and fetched again, part by part.
        """
        inline_bytes, region, offer = self._inline_bytes, self._region, self.offer
        assert region is not None
        if not inline_bytes or self.streamed or offer.draft or region.device != "cpu":
            return False
        part = region.slice(0, offer.location.nbytes)
        part.write(0, inline_bytes)
        manifest = verified(inline_bytes, part, self._layouts) if self.verify else None
        if self.verify and manifest is None:
            return False
        fault_points.point("fetch.chunk")
        self._inline_bytes, self._manifest = b"", manifest
        self._set_ready()
        return True

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Copy bytes that arrived into the payload's memory; WireError if not requested."""
        if chunk.epoch != self.offer.epoch or self._region is None:
            raise WireError(f"unrequested bytes of epoch {chunk.epoch} of {self.key!r} arrived")
        self.on_received(chunk.start, payload)

    def borrow(self, start: int, stop: int) -> Region:
        """Return memory for a range that a transport writes itself; then call `on_received`."""
        assert self._block is not None
        return self._receive_pool.borrow(self._block, start, stop - start)

    def on_received(self, start: int, payload: memoryview | int) -> None:
        """Copy bytes to the payload's memory, or take those that a transport has written there.

        Fetches those again that are not as committed. Raises WireError if they were not requested,
        or too many layers were announced before.
        """
        assert self._region is not None
        wrong = self.plan.receive(self._region, start, payload)
        fault_points.point("fetch.chunk")
        self._repair(wrong)
        if self._manifest is None and not self._error_text and self.plan.has(*self._header_range):
            self._open_header()
        self._continue()

    def on_message(self, message: Layer | Committed) -> None:
        """Request the layers that the producer of a stream has written.

        Raises WireError if the producer must not send the message now: too many layers, one of
        them twice, or one after the commit. What was delivered depends on the earlier messages.
        """
        if not self.offer.draft:
            raise WireError(f"{self.key!r} was committed before it was offered, and has no layers")
        if self._error_text:
            return
        if self._manifest is None:
            self._waiting_messages.append(message)
            if len(self._waiting_messages) > MAX_TENSORS:
                raise WireError(f"more layers of {self.key!r} were announced than any payload has")
        else:
            self._on_progress(message)
            self._continue()

    def fail(
        self,
        error: KVLinkError,
        outcome: Outcome = "unread",
        reason: str = "",
        *,
        lost: str | None = None,
    ) -> bool:
        """Fail the layers, and the get with its lease; return False if it was ready before.

        `lost` is the incarnation of the producer if only the connection to it broke: what has come
        is kept.
        """
        if self.progress is not None:
            self.progress.fail(error)
        if not self._decide(InboundState.ENDED):
            return False
        if lost is not None:
            self._keep(lost)
        if isinstance(error, (PeerLostError, ClosedError)):
            error = type(error)(f"{error}; {self.key!r} was awaited: {self.phase}")
        self.ready.set_error(error)
        self.lease.release(outcome, reason)
        return True

    def close(self) -> None:
        """Free the payload's memory; no view of it is left."""
        with self._lock:
            self.state = InboundState.ENDED
        self._receive_pool.cancel(self)
        self._region = None
        block, self._block = self._block, None
        if block is not None:
            self._receive_pool.free(block)

    def _identity(self, incarnation: str) -> TransferIdentity:
        offer = self.offer
        return TransferIdentity(incarnation, self.key, offer.epoch, offer.location.nbytes)

    def _keep(self, incarnation: str) -> None:
        """Give what has come to the get, which may be requested again.

        Nothing of a direct put, whose tensors are its caller's again.
        """
        get, block, manifest = self._get(), self._block, self._manifest
        if get is None or block is None or not get.is_resumable:
            return
        if self.offer.direct or self._error_text or not self.plan.received_nbytes:
            return
        if manifest is None and (self.offer.draft or not self.plan.has(0, 8)):
            return
        pool, self._block = self._receive_pool, None
        length = int.from_bytes(pool.region(block).read(0, 8), "little")
        start = 8 + length if manifest is None else manifest.header_nbytes
        kept = KeptBytes(self._identity(incarnation), self.plan, start, block, pool.post_free)
        pool.kept[self.key] = get.kept = self.kept = kept

    def _decide(self, state: InboundState) -> bool:
        """Reach READY or ENDED; return True to the first caller, which completes `ready`."""
        with self._lock:
            is_first = self.state is InboundState.PENDING
            if is_first:
                self.state = state
        return is_first

    def _set_ready(self) -> None:
        if self._decide(InboundState.READY):
            self.ready.set_result(None)

    def _on_progress(self, message: Layer | Committed) -> None:
        """Fetch what was announced; the header is here."""
        assert self._manifest is not None
        if self._is_committed:
            raise WireError(f"a layer or a commit of {self.key!r} came after its commit")
        if isinstance(message, Committed):
            self._is_committed, self._extra = True, message.extra
            self.plan.request(0, self.offer.location.nbytes, _WHOLE)
            return
        tensors = self._manifest.tensors[message.first :][: len(message.digests)]
        if len(tensors) != len(message.digests) or not tensors:
            self._reject(WireError(f"layers of {self.key!r} were announced that it has not"))
            return
        data = self._manifest.header_nbytes
        for number, (spec, digest) in enumerate(
            zip(tensors, message.digests, strict=True), message.first
        ):
            if number in self._announced:
                raise WireError(f"{spec.where()} of {self.key!r} was announced twice")
            if 2 * len(digest) != len(spec.digest):
                text = f"{spec.where()}: a digest of another length was announced"
                self._reject(WireError(text))
                return
            self._announced[number] = digest
            self._expect(spec, digest)
        if self.offer.direct and self.offer.draft:
            self._uncommitted.append(message)
            for spec in tensors:
                self.plan.request(data + spec.start, data + spec.stop, _TENSOR)
        else:
            self.plan.request(data + tensors[0].start, data + tensors[-1].stop, message)

    def _expect(self, spec: TensorSpec, digest: bytes) -> None:
        """Check a tensor's bytes from now on, and those that are here."""
        assert self._manifest is not None
        assert self._region is not None
        if self.verify:
            data = self._manifest.header_nbytes
            self._repair(self.plan.expect(self._region, spec, digest, data))

    def _repair(self, wrong: Sequence[ArrivingChunk]) -> None:
        """Fetch chunks that are not as committed once more; then reject the payload."""
        for chunk in wrong:
            if self._error_text:
                return
            # The tensors of a direct put are its caller's again as soon as they were sent.
            if chunk.is_again or self.offer.direct:
                self._reject(mismatch(chunk.spec, chunk.number))
            else:
                chunk.is_again = True
                self._counters["refetched"] += 1
                self.plan.fetch_again(chunk.start, chunk.stop)

    def _continue(self) -> None:
        """Handle the ranges that are complete, then request more."""
        for label in self.plan.pop_complete():
            if isinstance(label, Layer):
                if self.progress is not None:
                    self.progress.announce(label.first, label.digests)
            elif label == _WHOLE:
                self._complete()
        self._fetch_more(self)

    def _open_header(self) -> None:
        """Deliver a stream, and request its layers, now that the header is here.

        A get that wants the payload whole waits on while its layers arrive. Its own header has the
        digests, unless it is still being written.
        """
        if not self.streamed and not self.offer.draft and not self.verify:
            return
        manifest = self._decode(*self._header_range)
        if manifest is None:
            return
        self._manifest = manifest
        messages, self._waiting_messages = self._waiting_messages, []
        digests = [] if self.offer.draft else [bytes.fromhex(t.digest) for t in manifest.tensors]
        if digests and self.streamed:
            for *_, part in manifest.layers():
                messages.append(Layer(0, part.start, tuple(digests[part.start : part.stop])))
        elif digests:
            for spec, digest in zip(manifest.tensors, digests, strict=True):
                self._expect(spec, digest)
        if self.streamed:
            if not self.offer.draft:
                messages.append(Committed(0, self._extra))
            self._set_ready()
        for message in messages:
            if not self._error_text:
                self._on_progress(message)

    def _decode(self, start: int, stop: int) -> Manifest | None:
        """Decode the header at `start`, which `stop` may exceed; fetch a wrong one once more."""
        assert self._region is not None
        try:
            header = header_bytes(self._region, start, stop)
            return self._layouts.decode(header, self.offer.location.nbytes)
        except VersionError as error:
            self._reject(error)
        except WireError as error:
            if start in self._bad_headers or not self.verify:
                self._reject(error)
            else:
                self._bad_headers.add(start)
                self._counters["refetched"] += 1
                self.plan.fetch_again(start, stop)
        return None

    def _complete(self) -> None:
        """Deliver the payload, or complete its stream.

        The layers of a direct put are announced only now: their bytes may change until the commit.
        """
        if self.progress is not None:
            for layer in self._uncommitted:
                self.progress.announce(layer.first, layer.digests)
            self.progress.commit(self._extra)
        elif self._is_as_announced():
            self._set_ready()

    def _is_as_announced(self) -> bool:
        """Compare the header of a payload that was taken while it was written with its layers.

        If a part of the payload is fetched again, `_complete` is called once more.
        """
        draft, nbytes = self._manifest, self.offer.location.nbytes
        if draft is None or not self.offer.draft or not self.verify:
            return True
        final = self._decode(0, draft.header_nbytes)
        layouts = [
            (each.header_nbytes, [(spec.name, spec.start, spec.stop) for spec in each.tensors])
            for each in (draft, final or draft)
        ]
        if layouts[0] != layouts[1]:
            self._reject(WireError(f"the header of {self.key!r} is not the one announced"))
        elif final is not None:
            for number, spec in enumerate(final.tensors):
                digest = bytes.fromhex(spec.digest)
                if number not in self._announced:
                    self._announced[number] = digest
                    self._expect(spec, digest)
                elif digest != self._announced[number]:
                    self._reject(mismatch(spec, 0))
        if self._error_text:
            return False
        if not self.plan.has(0, nbytes):
            self.plan.request(0, nbytes, _WHOLE)
            return False
        self._manifest = final
        return True

    def _reject(self, error: WireError) -> None:
        """Fail, and fetch no more; what was delivered stays in its memory until it is released."""
        self._error_text = shorten(str(error) or repr(error))
        self._counters["rejected"] += 1
        self.plan.cancel()
        if not self.fail(error, "rejected", self._error_text):
            self.lease.reject(self._error_text)
