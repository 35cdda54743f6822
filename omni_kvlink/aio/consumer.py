"""`AsyncKVConsumer`: a `KVConsumer` for asyncio; a waiting `get` holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni_kvlink.aio.end import AsyncLinkEnd, in_thread, run_in_thread
from omni_kvlink.connectors.protocol.get_table import StreamEnded
from omni_kvlink.errors import PeerLostError, TransferTimeout, format_seconds
from omni_kvlink.link import (
    BackgroundGet,
    ChunkStream,
    KVConsumer,
    Payload,
    Received,
    ReceivedBatch,
    ReceivedChunk,
    ReceivedLayer,
    ReceivedStream,
    Verify,
    begin,
    begin_chunks,
    begin_get,
    check_timeout,
    check_verify,
    get_requests,
    open_chunks,
    open_delivery,
    open_stream,
    verify_first,
)
from omni_kvlink.link.copy_into import CopyInto

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from typing_extensions import Self

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery
    from omni_kvlink.link.copy_into import Into
    from omni_kvlink.link.read_block import ReadBlock
    from omni_kvlink.payload.schema import KVMetadata


S = TypeVar("S", bound=ReceivedStream | ChunkStream[ReceivedChunk])


class AsyncKVConsumer(AsyncLinkEnd[KVConsumer]):
    """The methods of `KVConsumer`, awaited; `link` is the synchronous consumer below."""

    contains = in_thread("link", KVConsumer.contains)

    async def get(
        self,
        request_id: str,
        *,
        timeout: float,
        verify: Verify = "auto",
        into: Into | None = None,
        wait: bool = True,
    ) -> Received:
        """`KVConsumer.get`; cancelling the task cancels the request.

        With `into`, layers are copied in a thread; after a cancellation one may still be copied.
        """
        check_verify(verify)
        started = time.perf_counter()
        if into is not None:
            return await self._get_into(request_id, into, timeout, verify, wait)
        get = self._get(request_id, partial(begin_get, verify=verify, wait=wait), timeout)
        return await self._opened(await self._receive(get), started, verify)

    async def get_many(
        self,
        request_ids: Sequence[str],
        *,
        timeout: float,
        verify: Verify = "auto",
        wait: bool = True,
    ) -> ReceivedBatch[Received]:
        """`KVConsumer.get_many`; cancelling the task cancels all requests."""
        check_verify(verify)
        started, limit = time.perf_counter(), check_timeout(timeout)
        requests = get_requests(request_ids, wait=wait)
        begin_again = partial(begin_get, verify=verify, wait=wait)
        gets = [self._get(request.key, begin_again, limit) for request in requests]

        def begin_all(timeout: float) -> None:
            requested = begin(self.link, requests, timeout=timeout, verify=verify)
            for get, pending in zip(gets, requested, strict=True):
                get.adopt(self.link, pending)

        received: list[Received] = []
        try:
            await self._begin(begin_all, limit)
            for get in gets:
                delivery = await self._take(get)
                received.append(await self._opened(delivery, started, verify))
        except BaseException:
            for payload in received:
                payload.release_unread()
            for get in gets:
                get.cancel()
            raise
        return ReceivedBatch(received)

    async def stream_get(self, request_id: str, *, timeout: float) -> AsyncReceivedStream:
        """`KVConsumer.stream_get`; cancelling the task cancels the request."""
        started = time.perf_counter()
        get = self._get(request_id, partial(begin_get, streamed=True), timeout)
        delivery = await self._receive(get)
        stream = open_stream(self.link, delivery, started=started, timeout=timeout)
        return AsyncReceivedStream(stream)

    async def read_stream(
        self, request_id: str, *, timeout: float, start: int = 0, verify: Verify = "auto"
    ) -> AsyncChunkStream:
        """`KVConsumer.read_stream`; cancelling the task cancels the request."""
        limit = check_timeout(timeout)
        get = self._get(request_id, partial(begin_chunks, start=start, verify=verify), limit)
        delivery, head = await self._receive(get), get.pending
        stream = open_chunks(self.link, head, delivery, start=start, timeout=limit, verify=verify)
        return AsyncChunkStream(stream)

    async def _get_into(
        self, request_id: str, into: Into, timeout: float, verify: Verify, wait: bool
    ) -> Received:
        begin = partial(begin_get, streamed=True, verify=verify, wait=wait)
        get = self._get(request_id, begin, timeout)
        while True:
            started, delivery = time.perf_counter(), await self._receive(get)
            stream = open_stream(self.link, delivery, started=started, timeout=0.0)
            try:
                return await self._copied(stream, into, get, verify)
            except PeerLostError:
                if not await run_in_thread(get.can_retry):
                    raise

    async def _copied(
        self, stream: ReceivedStream, into: Into, get: BackgroundGet, verify: Verify
    ) -> Received:
        """Copy the payload of a stream into the caller's tensors; after an error it is unread."""
        work: _InThread | None = None
        try:
            copies, reader = CopyInto(stream, into, verify=verify), AsyncReceivedStream(stream)
            for targets in copies.layers if copies.is_by_layer else ():
                branch, limit = targets.branch, get.seconds_left()
                layer = await reader.wait_for_layer(targets.layer, branch=branch, timeout=limit)
                work = _InThread(partial(copies.copy_layer, targets, layer), stream)
                await work.run()
            payload = await reader.wait(timeout=get.seconds_left())
            if not copies.is_by_layer:
                work = _InThread(copies.copy_all, stream)
                await work.run()
        except BaseException:
            if work is None or not work.is_running:  # else the thread releases it
                stream.release_unread()
            raise
        return Received.of_stream(stream, payload, self.link._copier, self.link._layouts)

    async def _opened(self, delivery: Delivery, started: float, verify: Verify) -> Received:
        received = open_delivery(self.link, delivery, started=started)
        if verify == "full":
            await _InThread(partial(verify_first, received), received).run()
        return received

    def _get(
        self, request_id: str, begin: Callable[..., PendingGet], timeout: float
    ) -> BackgroundGet:
        return BackgroundGet(request_id, lambda timeout: self.link, begin, timeout)

    async def _receive(self, get: BackgroundGet) -> Delivery:
        """Begin a get, and return its payload."""
        try:
            await self._begin(get.begin, get.seconds_left())
            return await self._take(get)
        except BaseException:
            get.cancel()
            raise

    async def _take(self, get: BackgroundGet) -> Delivery:
        """Wait for the payload of a get; if only the connection broke, request it again."""
        while True:
            await _wait_for(get.pending.future, get.seconds_left())
            try:
                return get.take()
            except PeerLostError:
                if not await run_in_thread(get.can_retry):
                    raise
            await self._begin(get.begin, get.seconds_left())

    async def _begin(self, begin: Callable[[float], None], timeout: float) -> None:
        """Call a function that requests; in a thread, if the link has to reconnect first."""
        if self.link.is_connected:
            with contextlib.suppress(PeerLostError):  # the connection ends at this moment
                begin(0.0)
                return
        task = asyncio.ensure_future(run_in_thread(partial(begin, timeout)))
        try:
            await asyncio.wait([task], timeout=timeout)
        finally:
            task.cancel()
        if not task.done():  # the cancel takes effect only once the loop runs
            raise TransferTimeout(
                f"{self.link.url}: no connection after {format_seconds(timeout)}",
                waited=timeout,
                phase="connecting",
            )
        try:
            task.result()
        finally:
            del task  # the error's traceback has this frame


class _AsyncReader(Generic[S]):
    """Base of the streams that arrive for asyncio; `stream` is the synchronous one below."""

    def __init__(self, stream: S):
        self.stream = stream

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.stream!r}>"

    def release(self) -> None:
        """`release` of the stream below; a task that waits for a part of it raises ClosedError."""
        self.stream.release()

    def release_unread(self) -> None:
        """`release_unread` of the stream below; a task that waits for a part raises ClosedError."""
        self.stream.release_unread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stream.__exit__(kind, error, traceback)


class AsyncReceivedStream(_AsyncReader[ReceivedStream]):
    """A `ReceivedStream` whose layers are awaited.

    A context manager: `with await consumer.stream_get(…) as stream: async for layer in stream: …`.
    """

    @property
    def metadata(self) -> Mapping[str, KVMetadata | Mapping[str, Any]]:
        """`ReceivedStream.metadata`."""
        return self.stream.metadata

    @property
    def extra(self) -> Mapping[str, Any]:
        """`ReceivedStream.extra`."""
        return self.stream.extra

    def __len__(self) -> int:
        """Layers of all branches together."""
        return len(self.stream)

    async def __aiter__(self) -> AsyncIterator[ReceivedLayer]:
        """The layers in the order of the wire; waits up to the stream's timeout for each."""
        for branch, layer in self.stream.names():
            yield await self.wait_for_layer(layer, branch=branch)

    async def wait_for_layer(
        self, layer: int, *, branch: str = "", timeout: float | None = None
    ) -> ReceivedLayer:
        """`ReceivedStream.wait_for_layer`; cancelling the task leaves the stream as it is.

        To copy a large layer out without stopping the event loop:
        `await asyncio.to_thread(layer.scatter, key, value)`. For tensors of a GPU use
        `layer.begin_scatter`: the other thread's current stream is not this one's.
        """
        key = self.stream.find(layer, branch)
        await self._wait(self.stream.when(key), self.stream.name(key), timeout)
        return self.stream.open_layer(key)

    async def wait(self, *, timeout: float | None = None) -> Payload:
        """`ReceivedStream.wait`."""
        await self._wait(self.stream.whole(), self.stream.WHOLE, timeout)
        return self.stream.wait(timeout=0.0)

    async def _wait(self, future: Future[None], name: str, timeout: float | None) -> None:
        seconds = self.stream.timeout if timeout is None else check_timeout(timeout)
        try:
            await _wait_for(future, seconds)
        finally:
            self.stream.cancel_wait(future)
        self.stream.check(future, name, seconds)


class AsyncChunkStream(_AsyncReader[ChunkStream[ReceivedChunk]]):
    """A `ChunkStream` whose chunks are awaited.

    `with await consumer.read_stream("r", timeout=5.0) as stream: async for chunk in stream: …`.
    """

    async def __aiter__(self) -> AsyncIterator[ReceivedChunk]:
        """The chunks in their order, up to the end; waits up to the stream's timeout for each."""
        while (chunk := await self.receive()) is not None:
            yield chunk

    async def receive(self, *, timeout: float | None = None) -> ReceivedChunk | None:
        """`ChunkStream.receive`; cancelling the task leaves the stream as it is."""
        limit = self.stream.timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + limit
        if self.stream.count is None:
            next_chunk = self.stream.when_next()
            await _wait_for(next_chunk, limit)
            if next_chunk.done() and isinstance(next_chunk.exception(), StreamEnded):
                await _wait_for(self.stream.when_whole(), max(0.0, deadline - time.monotonic()))
        return self.stream.receive(timeout=0.0)


async def _wait_for(future: Future[Any], timeout: float) -> None:
    """Wait until a future is done; raises nothing of its own.

    Uses `asyncio.wait`, because `wait_for` may swallow a cancellation.
    """
    answer = asyncio.wrap_future(future)
    try:
        await asyncio.wait([answer], timeout=timeout)
    finally:
        if not answer.cancel() and not answer.cancelled():
            answer.exception()  # retrieved here, raised by the get or the stream


class _InThread:
    """Work on a payload's memory in a thread; after a cancellation the payload is released unread.

    Not before the work has ended: the memory could be reused meanwhile.
    """

    def __init__(self, work: Callable[[], None], payload: ReadBlock):
        self._work, self._payload = work, payload
        # Each side writes one and then reads the other: at least one of them releases.
        self.is_running = self._is_cancelled = False

    async def run(self) -> None:
        try:
            await run_in_thread(self)
        except BaseException:
            self._is_cancelled = True
            if not self.is_running:
                self._payload.release_unread()
            raise

    def __call__(self) -> None:
        self.is_running = True
        try:
            if not self._is_cancelled:
                self._work()
        finally:
            self.is_running = False
            if self._is_cancelled:
                self._payload.release_unread()
