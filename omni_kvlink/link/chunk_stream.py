"""`ChunkStream`: the receiving end of an append stream, chunk by chunk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from omni_kvlink.connectors.protocol.get_table import StreamEnded
from omni_kvlink.connectors.protocol.messages import INLINE
from omni_kvlink.errors import ClosedError, TransferTimeout, WireError, format_seconds
from omni_kvlink.link.read_block import ReadBlock, ReceivedPayload
from omni_kvlink.payload.append_stream import (
    PLAIN_CHUNK,
    StreamPosition,
    open_plain_chunk,
    read_end,
    read_head,
)
from omni_kvlink.payload.expected import ExpectedPayload
from omni_kvlink.payload.manifest import header_bytes
from omni_kvlink.payload.tensor_data import TensorTransferData, filled
from omni_kvlink.system.waits import Answer, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.copier import Copier
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.bundle import Payload
    from omni_kvlink.payload.layout_cache import LayoutCache

AHEAD = 4
"""Chunks that a reader has requested: each is on its way as soon as it is appended."""


C = TypeVar("C", bound=ReceivedPayload)


class ChunkStream(ReadBlock, Generic[C]):
    """An append stream, from `KVConsumer.read_stream`; iterate over its chunks.

    A chunk counts as read when the next one, or the end, is asked for, or when it is released; the
    stream at its end, or when `release` says so. One that is left before, by an exception, `break`,
    the end of its `with` block or its last reference, goes on with another reader, at the first
    chunk that was not read. For one thread at a time.

    Attributes:
        request_id: of the stream.
        metadata: what `open_stream` was given.
        dim: the dimension in which the tensors grow.
        count: the number of chunks of the whole stream once it has ended; None before.
    """

    def __init__(
        self,
        head: PendingGet,
        delivery: Delivery,
        open_chunk: Callable[
            [Delivery, StreamPosition, Callable[[C, StreamPosition], None], ExpectedPayload | None],
            C,
        ],
        copier: Copier,
        layouts: LayoutCache,
        *,
        start: int,
        timeout: float,
    ):
        self.request_id, self.timeout = delivery.key, timeout
        self.count: int | None = None
        self._head, self._delivery = head, delivery
        self._open_chunk, self._copier, self._layouts = open_chunk, copier, layouts
        self._position = StreamPosition(start, None) if start else StreamPosition()
        self._requested: dict[int, PendingGet] = {}
        self._last: C | None = None
        self._are_read = True  # all chunks before the last one
        try:
            region = self._region()
            manifest = delivery.open_manifest(region, layouts)
            self.dim, self.metadata, self._spec = read_head(manifest, region)
        except BaseException as error:
            delivery.end_after(error)
            raise

    @property
    def position(self) -> int:
        """The number of the chunk that is received next."""
        return self._position.number

    def __iter__(self) -> Iterator[C]:
        """The chunks in their order, up to the end; waits up to the stream's timeout for each."""
        while (chunk := self.receive()) is not None:
            yield chunk

    def receive(self, *, timeout: float | None = None) -> C | None:
        """Wait for the next chunk; None at the end, when order and completeness are proved.

        The chunk before is released as read; tensors of it that are kept elsewhere keep its memory,
        and its place in the producer's window. `timeout` (seconds) is that of the stream if None.

        Raises:
            TransferTimeout: it was not appended in time; call again to go on waiting.
            TransferFailed: the producer failed the stream, or it was aborted.
            PeerLostError: the producer died, or closed the link.
            IntegrityError: a chunk is missing or not the one that was appended.
            ClosedError: the stream was released.
        """
        limit = self.timeout if timeout is None else check_timeout(timeout)
        if self.count is not None:
            self._end()  # an interrupt may have come before
            return None
        if self._last is not None or len(self._requested) < AHEAD:
            self._delivery.coalesce(self._release_and_request)
        delivery, pending = None, self._requested.pop(self.position)
        layout = None if pending.is_done else self._layouts.repeated(INLINE)
        expected: ExpectedPayload | None = None
        if layout is not None and layout.names == PLAIN_CHUNK:
            expected = ExpectedPayload(layout, self.request_id, open_plain_chunk)
        pending.inline_target = expected
        with contextlib.suppress(StreamEnded):
            delivery = pending.wait(timeout=limit)
        if delivery is None:
            self._finish(limit)
            return None
        return self._open_chunk(delivery, self._position, self._accept, expected)

    def concatenate(self) -> TensorTransferData:
        """Receive the chunks that are left, and return their tensors joined along `dim`, as copies.

        Its `save` writes a .safetensors file of them.
        """
        parts = [_copies(self._spec), *(_copies(chunk._data) for chunk in self)]
        joined = [torch.cat(column, self.dim) for column in zip(*parts, strict=True)]
        return TensorTransferData(self.request_id, filled(self._spec.tree, joined), self.metadata)

    def release(self) -> None:
        """Release the stream as read: this reader needs none of the chunks that are left."""
        self._delivery.coalesce(self._release_all)
        self._delivery.release()

    def release_unread(self) -> None:
        """Let another reader go on with the first chunk that was not released as read.

        That is the one in hand; `release` that chunk before if it was used.
        """
        self._delivery.coalesce(self._drop_all)
        self._delivery.release_unread()

    def __enter__(self) -> ChunkStream[C]:
        return self

    @property
    def _is_taken(self) -> bool:
        """Whether the end was reached, and no chunk was given back."""
        return self.count is not None and self._are_read

    # For event loops: `receive(timeout=0.0)` does not block once this future is done, and then,
    # if it ended with `StreamEnded`, the other.

    def when_next(self) -> Future[Any]:
        """Release the last chunk, and request the next ones; a future that ends with the first."""
        return self.request_next().future

    def request_next(self) -> PendingGet:
        """Do the same as `when_next`, and return the get that `receive` waits for."""
        self._delivery.coalesce(self._release_and_request)
        return self._requested[self.position]

    def _release_and_request(self) -> None:
        """Release the last chunk, and request the next ones."""
        self._release_chunk()
        self._region()
        for number in range(self.position, self.position + AHEAD):
            if number not in self._requested:
                self._requested[number] = self._head.request_chunk(number)

    def when_whole(self) -> Future[Any]:
        """A future that ends when the end of the stream is here, or with the error."""
        return self._whole().future()

    def _whole(self) -> Answer[None]:
        if self._delivery.progress is not None:
            return self._delivery.progress.whole
        answer: Answer[None] = Answer()
        answer.set_result(None)
        return answer

    def _finish(self, timeout: float) -> None:
        """Check that nothing is missing, and release the stream."""
        whole = self._whole()
        if not whole.wait(timeout):
            raise TransferTimeout(
                f"stream {self.request_id!r}: its end did not come "
                f"within {format_seconds(timeout)}",
                key=self.request_id,
                waited=timeout,
                phase="all chunks were received",
            )
        whole.result()
        region = self._region()
        try:
            manifest = self._layouts.decode(header_bytes(region), region.nbytes)
            if manifest.has_digests:
                self._copier.verify(manifest, region)
            count = read_end(manifest, region, self._position)
        except WireError as error:
            self._delivery.reject(str(error))
            raise
        self.count = count
        self._end()

    def _end(self) -> None:
        """Release the stream at its end."""
        (self.release if self._is_taken else self.release_unread)()

    def _accept(self, chunk: C, following: StreamPosition) -> None:
        """Go on behind a chunk: at once, so that an interrupt comes before or after it."""
        self._last, self._position = chunk, following

    def _region(self) -> Region:
        self._delivery.check_process()
        region = self._delivery.region
        if region is None:
            raise ClosedError(f"stream {self.request_id!r} was released")
        return region

    def _release_chunk(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.release()  # its reader may have given it back before
            self._are_read = self._are_read and last._delivery.is_read

    def _release_all(self) -> None:
        self._release_chunk()
        self._cancel_requests()

    def _drop_all(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.release_unread()
        self._cancel_requests()

    def _cancel_requests(self) -> None:
        requested, self._requested = self._requested, {}
        for pending in requested.values():
            pending.cancel()

    def __repr__(self) -> str:
        return f"<ChunkStream {self.request_id!r}, next chunk {self.position}>"


def _copies(data: Payload) -> list[torch.Tensor]:
    """Copies of the tensors, which are plain ones: they were received."""
    return [view.clone() for view in data.tensors() if isinstance(view, torch.Tensor)]
