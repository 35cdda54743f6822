"""One payload on its way into this process: its memory, and when it may be delivered."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from omni_kvlink.connectors.protocol.delivery import Delivery
from omni_kvlink.connectors.protocol.fetch_plan import FetchPlan
from omni_kvlink.connectors.protocol.messages import Chunk, Committed, Layer, shorten
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.receive_pool import ReceivePool, Span, copy_into, crcs_of
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, VersionError, WireError
from omni_kvlink.payload.digests import ArrivingDigests, mismatch, verify
from omni_kvlink.payload.format import ALIGN, MAX_HEADER, MAX_TENSORS
from omni_kvlink.payload.manifest import header_bytes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from omni_kvlink.connectors.protocol.delivery import DeliveryLease
    from omni_kvlink.connectors.protocol.get_table import GetState
    from omni_kvlink.connectors.protocol.messages import Offer
    from omni_kvlink.memory.arena import Block
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.digests import Piece
    from omni_kvlink.payload.manifest import LayoutCache, Manifest, TensorSpec

_WHOLE, _TENSOR = "whole", "tensor"
Label: TypeAlias = "str | Layer"


class InboundTransfer:
    """A payload that was offered and is being fetched.

    Methods are called in the loop's thread, except those under "For any thread". The end of `lease`
    tells the producer the outcome and leads to `close`. `fetch_more` is called with this object
    whenever `plan` may have ranges to request. A stream's layers are delivered one by one, as they
    arrive (`progress`). `inline_bytes`: the first bytes that are needed, if they travelled with the
    offer. `ready` completes when the payload may be delivered (a stream: its header), or with the
    error.

    With the get's `verify`, bytes are compared with their digests as they arrive, before anything
    is delivered that depends on them. A wrong MiB of a tensor, or a wrong header, is fetched once
    more; if it is wrong again, the payload is rejected. `counters` counts both.
    """

    def __init__(
        self,
        get_state: GetState,
        offer: Offer,
        receive_pool: ReceivePool,
        lease: DeliveryLease,
        fetch_more: Callable[[InboundTransfer], None],
        inline_bytes: bytes,
        chunk: int,
        counters: Counter[str],
        layouts: LayoutCache,
    ):
        self.key, self.offer, self.streamed = get_state.key, offer, get_state.streamed
        self.verify, self._counters = get_state.verify, counters
        self.plan: FetchPlan[Label] = FetchPlan(offer.location.nbytes + offer.draft, chunk)
        self.progress = Progress() if self.streamed else None
        assert get_state.ready is not None
        self.ready = get_state.ready
        self._receive_pool, self._fetch_more = receive_pool, fetch_more
        self._lease, self._layouts = lease, layouts
        self._inline_bytes = inline_bytes
        self._block: Block | None = None
        self._region: Region | None = None
        self._manifest: Manifest | None = None
        self._waiting_messages: list[Layer | Committed] = []
        self._uncommitted: list[Layer] = []
        self._lock = threading.Lock()
        self._decided = False
        self._is_committed = False
        self._error_text = ""  # why the payload was rejected
        self._announced: dict[int, bytes] = {}
        self._digests = ArrivingDigests()
        self._bad_headers = set[int]()
        nbytes, draft = offer.location.nbytes, offer.draft
        head = min(nbytes, 8 + MAX_HEADER + ALIGN)
        self._header_range = (nbytes, nbytes + draft) if draft else (0, head)

    # For any thread

    @property
    def phase(self) -> str:
        """The step that the payload has reached, for the message of a timeout."""
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
        self._lease.release("unread", "")

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
            self._lease,
            progress=self.progress,
            manifest=manifest,
            copies=1,
            is_verified=is_verified,
        )

    # In the loop's thread

    def on_allocated(self, block: Block) -> None:
        """Request the bytes that are needed first, now that there is memory for them."""
        self._block = block
        self._region = self._receive_pool.region(block)
        if self._take_whole():
            return
        if self.streamed or self.offer.draft:
            self.plan.fetch(*self._header_range)
        else:
            self.plan.request(0, self.offer.location.nbytes, _WHOLE)
        if self._inline_bytes:
            self.plan.next_range(len(self._inline_bytes))  # counts as requested
            inline_bytes, self._inline_bytes = self._inline_bytes, b""
            start, _ = self.offer.first
            chunk = Chunk(self.offer.get_id, self.offer.epoch, start)
            self.on_chunk(chunk, memoryview(inline_bytes))
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
        part, manifest = region.slice(0, offer.location.nbytes), None
        part.write(0, inline_bytes)
        if self.verify:
            try:
                manifest = self._layouts.decode(inline_bytes)
                verify(manifest, part)
            except (WireError, VersionError):
                return False
        fault_points.point("fetch.chunk")
        self._inline_bytes, self._manifest = b"", manifest
        if self._decide():
            self.ready.set_result(None)
        return True

    def on_allocation_failed(self, error: KVLinkError) -> None:
        """Fail, because there will be no memory for the payload."""
        if self.fail(error):
            self.release_unread()

    def on_chunk(self, chunk: Chunk, payload: memoryview) -> None:
        """Copy bytes that arrived into the payload's memory; WireError if not requested."""
        if chunk.epoch != self.offer.epoch or self._region is None:
            raise WireError(f"unrequested bytes of epoch {chunk.epoch} of {self.key!r} arrived")
        start, nbytes = chunk.start, payload.nbytes
        self.plan.check(start, nbytes)
        pieces = self._digests.split(start, start + nbytes)
        crcs = copy_into(self._region.slice(start, nbytes), payload, _spans(pieces, start))
        self._on_stored(start, nbytes, pieces, crcs)

    def borrow(self, start: int, stop: int) -> Region:
        """Return memory for a range that a transport writes itself; then call `on_received`."""
        assert self._block is not None
        return self._receive_pool.borrow(self._block, start, stop - start)

    def on_received(self, start: int, nbytes: int) -> None:
        """Check bytes that a transport has written to the payload's memory.

        Raises WireError if they were not requested, or too many layers were announced before.
        """
        self.plan.check(start, nbytes)
        pieces = self._digests.split(start, start + nbytes)
        self._on_stored(start, nbytes, pieces, self._crcs(pieces))

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

    def fail(self, error: KVLinkError) -> bool:
        """Fail the pending get and the layers; return False if the payload was ready before."""
        if self.progress is not None:
            self.progress.fail(error)
        if not self._decide():
            return False
        if isinstance(error, (PeerLostError, ClosedError)):
            error = type(error)(f"{error}; {self.key!r} was awaited: {self.phase}")
        self.ready.set_error(error)
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

    def _on_progress(self, message: Layer | Committed) -> None:
        """Fetch what was announced; the header is here."""
        assert self._manifest is not None
        if self._is_committed:
            raise WireError(f"a layer or a commit of {self.key!r} came after its commit")
        if isinstance(message, Committed):
            self._is_committed = True
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
        if not self.verify:
            return
        data = self._manifest.header_nbytes
        self._digests.expect(spec, digest, data)
        for start, stop in self.plan.parts(data + spec.start, data + spec.stop):
            pieces = self._digests.split(start, stop)
            self._compare(pieces, self._crcs(pieces))

    def _crcs(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the CRC-32C of the pieces that have a digest and are in the memory."""
        assert self._region is not None
        return crcs_of(self._region, _spans(pieces, 0))

    def _on_stored(
        self, start: int, nbytes: int, pieces: Sequence[Piece], crcs: Sequence[int]
    ) -> None:
        """Record bytes that are in the memory; fetch those again that are not as committed."""
        fault_points.point("fetch.chunk")
        self.plan.on_received(start, nbytes)
        self._compare(pieces, crcs)
        if self._manifest is None and not self._error_text and self.plan.has(*self._header_range):
            self._open_header()
        self._continue()

    def _compare(self, pieces: Sequence[Piece], crcs: Sequence[int]) -> None:
        """Compare pieces with their digests; a wrong chunk is fetched once more, then rejected."""
        checked = ((start, stop, chunk) for start, stop, chunk in pieces if chunk is not None)
        for (start, stop, chunk), crc in zip(checked, crcs, strict=True):
            if not chunk.is_wrong(start, stop, crc) or self._error_text:
                continue
            # The tensors of a direct put are its caller's again as soon as they were sent.
            if chunk.is_again or self.offer.direct:
                self._reject(mismatch(chunk.spec, chunk.number))
            else:
                chunk.is_again = True
                self._fetch_again(chunk.start, chunk.stop)

    def _fetch_again(self, start: int, stop: int) -> None:
        self._counters["refetched"] += 1
        self.plan.fetch_again(start, stop)

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
        start, stop = self._header_range
        manifest = self._decode(start, stop)
        if manifest is None:
            return
        self._manifest = manifest
        messages, self._waiting_messages = self._waiting_messages, []
        if not self.offer.draft and self.streamed:
            layers = manifest.layers()
            messages = [Layer(0, part.start, _digests(manifest, part)) for *_, part in layers]
            messages.append(Committed(0))
        elif not self.offer.draft:
            for spec in manifest.tensors:
                self._expect(spec, bytes.fromhex(spec.digest))
        if self.streamed and self._decide():
            self.ready.set_result(None)
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
                self._fetch_again(start, stop)
        return None

    def _complete(self) -> None:
        """Deliver the payload, or complete its stream.

        The layers of a direct put are announced only now: their bytes may change until the commit.
        """
        if self.progress is not None:
            for layer in self._uncommitted:
                self.progress.announce(layer.first, layer.digests)
            self.progress.commit()
        elif self._is_as_announced() and self._decide():
            self.ready.set_result(None)

    def _is_as_announced(self) -> bool:
        """Compare the header of a payload that was taken while it was written with its layers.

        If a part of the payload is fetched again, `_complete` is called once more.
        """
        draft, nbytes = self._manifest, self.offer.location.nbytes
        if draft is None or not self.offer.draft or not self.verify:
            return True
        final = self._decode(0, draft.header_nbytes)
        if final is not None and _layout(final) != _layout(draft):
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
        if self.fail(error):
            self._lease.release("rejected", self._error_text)
        else:
            self._lease.reject(self._error_text)


def _digests(manifest: Manifest, numbers: range) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(manifest.tensors[number].digest) for number in numbers)


def _layout(manifest: Manifest) -> tuple[int, list[tuple[str, int, int]]]:
    tensors = [(spec.name, spec.start, spec.stop) for spec in manifest.tensors]
    return manifest.header_nbytes, tensors


def _spans(pieces: Sequence[Piece], base: int) -> list[Span]:
    return [(start - base, stop - base, chunk is not None) for start, stop, chunk in pieces]
