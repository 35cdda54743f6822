"""One payload on its way into this process: its memory, and when it may be delivered."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.connectors.protocol.fetch_plan import FetchPlan
from omni_kvlink.connectors.protocol.get_table import Delivery, GetState, Progress
from omni_kvlink.connectors.protocol.messages import Chunk, Committed, Layer, shorten
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.receive_pool import ReceivePool, copy_into
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, WireError
from omni_kvlink.payload.manifest import ALIGN, MAX_HEADER, MAX_TENSORS, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.messages import Offer, Outcome
    from omni_kvlink.memory.arena import Block
    from omni_kvlink.memory.region import Region

_HEAD, _WHOLE, _TENSOR = "head", "whole", "tensor"
Label: TypeAlias = "str | Layer"


class InboundTransfer:
    """A payload that was offered and is being fetched.

    Methods are called in the loop's thread, except those under "For any thread". `release` tells
    the producer the outcome and leads to `close`; it is called in any thread and never blocks.
    `fetch_more` is called with this object whenever `plan` may have ranges to request. A stream's
    layers are delivered one by one, as they arrive (`progress`). `inline_bytes`: the first bytes
    that are needed, if they travelled with the offer. `ready` completes when the payload may be
    delivered (a stream: its header), or with the error.
    """

    def __init__(
        self,
        get_state: GetState,
        offer: Offer,
        receive_pool: ReceivePool,
        release: Callable[[Outcome, str], None],
        fetch_more: Callable[[InboundTransfer], None],
        inline_bytes: bytes,
        chunk: int,
    ):
        self.key, self.offer, self.streamed = get_state.key, offer, get_state.streamed
        self.plan: FetchPlan[Label] = FetchPlan(offer.location.nbytes + offer.draft, chunk)
        self.progress = Progress() if self.streamed else None
        assert get_state.ready is not None
        self.ready = get_state.ready
        self._receive_pool, self._release, self._fetch_more = receive_pool, release, fetch_more
        self._inline_bytes = inline_bytes
        self._block: Block | None = None
        self._region: Region | None = None
        self._header = b""
        self._manifest: Manifest | None = None
        self._early: list[Layer | Committed] = []
        self._uncommitted: list[Layer] = []
        self._lock = threading.Lock()
        self._decided = False

    # For any thread

    @property
    def phase(self) -> str:
        """How far the payload has come, for the message of a timeout."""
        if self._region is None:
            return "announced; it waits for memory of this consumer: raise quota=, or release"
        return f"announced; {self.plan.received_nbytes} of {self.plan.nbytes} bytes have come"

    def cancel(self) -> bool:
        """Release the payload unread; return False if it was delivered or failed before."""
        if self._decide():
            self.release_unread()
            return True
        return False

    def release_unread(self) -> None:
        """Return the payload to the producer, for another consumer."""
        self._release("unread", "")

    def deliver(self) -> Delivery:
        """Return the payload, once, after `ready` has completed."""
        if fault_points.enabled:
            fault_points.point("get.mapped")
        assert self._block is not None
        region = self._receive_pool.region(self._block).slice(0, self.offer.location.nbytes)
        region.readonly = True
        header, progress = self._header, self.progress
        return Delivery(self.key, region, self._release, draft=header, progress=progress, copies=1)

    # In the loop's thread

    def on_allocated(self, block: Block) -> None:
        """Request the bytes that are needed first, now that there is memory for them."""
        self._block = block
        self._region = self._receive_pool.region(block)
        nbytes, draft = self.offer.location.nbytes, self.offer.draft
        if draft:
            self.plan.request(nbytes, nbytes + draft, _HEAD)
        elif self.streamed:
            self.plan.request(0, min(nbytes, 8 + MAX_HEADER + ALIGN), _HEAD)
        else:
            self.plan.request(0, nbytes, _WHOLE)
        if self._inline_bytes:
            self.plan.next_range(len(self._inline_bytes))  # counts as requested
            inline_bytes, self._inline_bytes = self._inline_bytes, b""
            start, _ = self.offer.first
            chunk = Chunk(self.offer.get_id, self.offer.epoch, start)
            self.on_chunk(chunk, memoryview(inline_bytes))
        else:
            self._fetch_more(self)

    def on_allocation_failed(self, error: KVLinkError) -> None:
        """Fail, because there will be no memory for the payload."""
        if self.fail(error):
            self.release_unread()

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Copy bytes that arrived into the payload's memory; WireError if not requested."""
        if chunk.epoch != self.offer.epoch or self._region is None:
            raise WireError(f"unrequested bytes of epoch {chunk.epoch} of {self.key!r} arrived")
        nbytes = payload.nbytes
        self.plan.check(chunk.start, nbytes)
        copy_into(self._region.slice(chunk.start, nbytes), payload)
        self.on_received(chunk.start, nbytes)

    def borrow(self, start: int, stop: int) -> Region:
        """Return memory for a range that a transport writes itself; then call `on_received`."""
        assert self._block is not None
        return self._receive_pool.borrow(self._block, start, stop - start)

    def on_received(self, start: int, nbytes: int) -> None:
        """Record that bytes are in the payload's memory.

        Raises WireError if they were not requested, or too many layers were announced before.
        """
        if fault_points.enabled:
            fault_points.point("fetch.chunk")
        self.plan.on_received(start, nbytes)
        self._continue()

    def on_message(self, message: Layer | Committed) -> None:
        """Request the layers that the producer of a stream has written.

        Raises WireError if more layers were announced than a payload can have.
        """
        if self._manifest is None:
            self._early.append(message)
            if len(self._early) > MAX_TENSORS:
                raise WireError(f"more layers of {self.key!r} were announced than any payload has")
        elif isinstance(message, Committed):
            self.plan.request(0, self.offer.location.nbytes, _WHOLE)
        else:
            tensors = self._manifest.tensors[message.first :][: len(message.digests)]
            if len(tensors) != len(message.digests) or not tensors:
                self._reject(WireError(f"layers of {self.key!r} were announced that it has not"))
                return
            data = self._manifest.header_nbytes
            if self.offer.direct:
                self._uncommitted.append(message)
                if len(self._uncommitted) > MAX_TENSORS:
                    raise WireError(f"more layers of {self.key!r} were announced than it has")
                for spec in tensors:
                    self.plan.request(data + spec.start, data + spec.stop, _TENSOR)
            else:
                self.plan.request(data + tensors[0].start, data + tensors[-1].stop, message)
        self._continue()

    def fail(self, error: KVLinkError) -> bool:
        """Fail the pending get and the layers; return False if the payload was ready before."""
        if self.progress is not None:
            self.progress.fail(error)
        if not self._decide():
            return False
        if isinstance(error, (PeerLostError, ClosedError)):
            error = type(error)(f"{error}; {self.key!r} was awaited: {self.phase}")
        self.ready.set_exception(error)
        return True

    def close(self) -> None:
        """Free the payload's memory; no view of it is left."""
        self._decide()
        self._receive_pool.cancel(self)
        self._region = None
        block, self._block = self._block, None
        if block is not None:
            self._receive_pool.free(block)

    def _decide(self) -> bool:
        """Return True to the first caller: it decides whether the payload is delivered."""
        with self._lock:
            was, self._decided = self._decided, True
        return not was

    def _continue(self) -> None:
        """Handle the ranges that are complete, then request more."""
        for label in self.plan.pop_complete():
            if label == _HEAD:
                self._open_header()
            elif isinstance(label, Layer):
                if self.progress is not None:
                    self.progress.announce(label.first, label.digests)
            elif label == _WHOLE:
                self._complete()
        self._fetch_more(self)

    def _open_header(self) -> None:
        """Deliver a stream, and request its layers, now that the header is here.

        A get that wants the payload whole waits on while its layers arrive.
        """
        nbytes, draft = self.offer.location.nbytes, self.offer.draft
        assert self._region is not None
        header = self._region.view(*self.offer.first)
        try:
            self._manifest = manifest = Manifest.decode(header, nbytes)
        except WireError as error:
            self._reject(error)
            return
        self._header = bytes(header[: manifest.header_nbytes])
        messages, self._early = self._early, []
        if not draft:
            layers = manifest.layers()
            messages = [Layer(0, part.start, _digests(manifest, part)) for *_, part in layers]
            messages.append(Committed(0))
        if self.streamed and self._decide():
            self.ready.set_result(None)
        for message in messages:
            self.on_message(message)

    def _complete(self) -> None:
        """Deliver the payload, or complete its stream.

        The layers of a direct put are announced only now: their bytes may change until the commit.
        """
        if self.progress is not None:
            for layer in self._uncommitted:
                self.progress.announce(layer.first, layer.digests)
            self.progress.commit()
        elif self._decide():
            self.ready.set_result(None)

    def _reject(self, error: WireError) -> None:
        self.fail(error)
        self._release("rejected", shorten(str(error)))


def _digests(manifest: Manifest, numbers: range) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(manifest.tensors[number].digest) for number in numbers)
