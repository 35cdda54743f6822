"""One payload on its way into this process: its memory, what came of it, who may have it when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from omni_kvlink.connectors.base import Delivery
from omni_kvlink.connectors.protocol.fetch_plan import CHUNK, FetchPlan
from omni_kvlink.connectors.protocol.messages import Chunk, Committed, Layer, Offer, Outcome, short
from omni_kvlink.connectors.protocol.progress import Progress
from omni_kvlink.connectors.runtime import fault_points
from omni_kvlink.connectors.runtime.receive_pool import ReceivePool, fill
from omni_kvlink.errors import ClosedError, KVLinkError, PeerLostError, WireError
from omni_kvlink.memory.arena import Block
from omni_kvlink.memory.region import Region
from omni_kvlink.payload.header import ALIGN, MAX_HEADER, MAX_TENSORS
from omni_kvlink.payload.manifest import Manifest

_HEAD, _WHOLE, _TENSOR = "head", "whole", "tensor"
Label: TypeAlias = "str | Layer"


class InboundTransfer:
    """A payload that was offered, and is brought here; the loop's, but for `withdraw`, `deliver`.

    Attributes:
        there: ends when a reader may have it (whole; of a stream, its header), or with the error.
        fetch: what was asked for and what came.

    Args:
        streamed: whether the reader takes its layers as they come.
        store: whose memory it is brought to.
        release: tells the producer, and brings the memory back; callable anywhere, never blocks.
        fetching: told when it is known what to ask for.
        gift: what its reader needs first, if it came with the offer.
        chunk: the most to ask for at a time.
    """

    def __init__(
        self,
        key: str,
        offer: Offer,
        receive_pool: ReceivePool,
        release: Callable[[Outcome, str], None],
        fetching: Callable[[InboundTransfer], None],
        *,
        streamed: bool,
        inline_bytes: bytes = b"",
        chunk: int = CHUNK,
    ):
        self.key, self.offer, self.streamed = key, offer, streamed
        self.fetch: FetchPlan[Label] = FetchPlan(offer.location.nbytes + offer.draft, chunk)
        self.progress = Progress() if streamed else None
        self.there: Future[None] = Future()
        self.there.set_running_or_notify_cancel()
        self._receive_pool, self._release, self._fetching = receive_pool, release, fetching
        self._inline_bytes = inline_bytes
        self._block: Block | None = None
        self._sink: Region | None = None
        self._header = b""
        self._manifest: Manifest | None = None
        self._early: list[Layer | Committed] = []
        self._uncommitted: list[Layer] = []
        self._lock = threading.Lock()
        self._decided = False

    # For whoever waits

    @property
    def phase(self) -> str:
        if self._sink is None:
            return "announced; it waits for room in this reader's memory: raise quota=, or let go"
        return f"announced; {self.fetch.nbytes_come} of {self.fetch.nbytes} bytes have come"

    def withdraw(self) -> bool:
        """Nobody wants it any more; False if it is decided already."""
        if self._decide():
            self._release("unread", "")
            return True
        return False

    def give_back(self) -> None:
        """It is there, but nobody takes it."""
        self._release("unread", "")

    def deliver(self) -> Delivery:
        """It is there: hand it over, once."""
        fault_points.point("get.mapped")
        assert self._block is not None
        region = self._receive_pool.region(self._block).slice(0, self.offer.location.nbytes)
        region.readonly = True
        header, progress = self._header, self.progress
        return Delivery(self.key, region, self._release, draft=header, progress=progress, copies=1)

    # In the loop's thread

    def placed(self, block: Block) -> None:
        """There is room: ask for what a reader needs first."""
        self._block = block
        self._sink = self._receive_pool.region(block)
        nbytes, draft = self.offer.location.nbytes, self.offer.draft
        if draft:
            self.fetch.request(nbytes, nbytes + draft, _HEAD)
        elif self.streamed:
            self.fetch.request(0, min(nbytes, 8 + MAX_HEADER + ALIGN), _HEAD)
        else:
            self.fetch.request(0, nbytes, _WHOLE)
        if self._inline_bytes:
            self.fetch.ask(len(self._inline_bytes))  # as if: it came already
            inline_bytes, self._inline_bytes = self._inline_bytes, b""
            start, _ = self.offer.first
            self.take(Chunk(self.offer.get_id, self.offer.epoch, start), memoryview(inline_bytes))
        else:
            self._fetching(self)

    def turned_away(self, error: KVLinkError) -> None:
        if self.fail(error):
            self._release("unread", "")

    def take(self, chunk: Chunk, payload: memoryview) -> None:
        """Bytes of it came.

        Raises:
            WireError: not those that were asked for.
        """
        if chunk.epoch != self.offer.epoch or self._sink is None:
            raise WireError(f"bytes of epoch {chunk.epoch} of {self.key!r} came, nobody asked")
        nbytes = payload.nbytes
        self.fetch.check(chunk.start, nbytes)
        fill(self._sink.slice(chunk.start, nbytes), payload)
        self.landed(chunk.start, nbytes)

    def lend(self, start: int, stop: int) -> Region:
        """Memory for bytes that are written there by somebody else, who then says `landed`."""
        assert self._block is not None
        return self._receive_pool.lend(self._block, start, stop - start)

    def landed(self, start: int, nbytes: int) -> None:
        """Bytes of it are in their place.

        Raises:
            WireError: the producer announced what there is not.
        """
        fault_points.point("fetch.chunk")
        self.fetch.came(start, nbytes)
        self._go_on()

    def handle(self, message: Layer | Committed) -> None:
        """The producer of a stream has written more."""
        if self._manifest is None:
            self._early.append(message)
            if len(self._early) > MAX_TENSORS:
                raise WireError(f"more layers of {self.key!r} were announced than any payload has")
        elif isinstance(message, Committed):
            self.fetch.request(0, self.offer.location.nbytes, _WHOLE)
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
                    self.fetch.request(data + spec.start, data + spec.stop, _TENSOR)
            else:
                self.fetch.request(data + tensors[0].start, data + tensors[-1].stop, message)
        self._go_on()

    def fail(self, error: KVLinkError) -> bool:
        """It will not come; who waits for it, or for a layer, raises. False if it came before."""
        if self.progress is not None:
            self.progress.end(error)
        if not self._decide():
            return False
        if isinstance(error, (PeerLostError, ClosedError)):
            error = type(error)(f"{error}; {self.key!r} was awaited: {self.phase}")
        self.there.set_exception(error)
        return True

    def let_go(self) -> None:
        """No view of it is left, or nobody wanted any: the memory goes back."""
        self._decide()
        self._receive_pool.forget(self)
        self._sink = None
        block, self._block = self._block, None
        if block is not None:
            self._receive_pool.give(block)

    # Inside

    def _decide(self) -> bool:
        with self._lock:
            was, self._decided = self._decided, True
        return not was

    def _go_on(self) -> None:
        for label in self.fetch.finished():
            if label == _HEAD:
                self._open_header()
            elif isinstance(label, Layer):
                if self.progress is not None:
                    self.progress.announce(label.first, label.digests)
            elif label == _WHOLE:
                self._complete()
        self._fetching(self)

    def _open_header(self) -> None:
        """A stream's reader may have it now; of a payload that is whole, the layers follow.

        Who wants it whole waits on, while its layers come.
        """
        nbytes, draft = self.offer.location.nbytes, self.offer.draft
        assert self._sink is not None
        header = self._sink.view(*self.offer.first)
        try:
            self._manifest = manifest = Manifest.decode(header, nbytes)
        except WireError as error:
            self._reject(error)
            return
        self._header = bytes(header[: manifest.header_nbytes])
        news, self._early = self._early, []
        if not draft:
            layers = manifest.layers()
            news = [Layer(0, numbers.start, _digests(manifest, numbers)) for *_, numbers in layers]
            news.append(Committed(0))
        if self.streamed and self._decide():
            self.there.set_result(None)
        for message in news:
            self.handle(message)

    def _complete(self) -> None:
        """Of a direct payload nothing counts before: its bytes may change until it is committed."""
        if self.progress is not None:
            for layer in self._uncommitted:
                self.progress.announce(layer.first, layer.digests)
            self.progress.commit()
        elif self._decide():
            self.there.set_result(None)

    def _reject(self, error: WireError) -> None:
        self.fail(error)
        self._release("rejected", short(str(error)))


def _digests(manifest: Manifest, numbers: range) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(manifest.tensors[number].digest) for number in numbers)
