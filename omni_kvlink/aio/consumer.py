"""`AsyncKVConsumer`: a `KVConsumer` for asyncio; a waiting `get` holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from omni_kvlink.aio.end import AsyncLinkEnd, run_in_thread
from omni_kvlink.connectors.protocol.get_table import StreamEnded
from omni_kvlink.errors import PeerLostError, TransferTimeout, format_seconds
from omni_kvlink.link import (
    ChunkStream,
    GetAttempts,
    KVConsumer,
    Payload,
    Received,
    ReceivedBatch,
    ReceivedChunk,
    ReceivedLayer,
    ReceivedStream,
    Verify,
    begin_chunks,
    begin_get,
    begin_gets,
    can_retry,
    check_timeout,
    check_verify,
    open_chunks,
    open_delivery,
    open_stream,
    verify_first,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Future

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.delivery import Delivery


class AsyncKVConsumer(AsyncLinkEnd[KVConsumer]):
    """The methods of `KVConsumer`, awaited; `link` is the synchronous consumer below."""

    async def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
        """`KVConsumer.get`; cancelling the task cancels the request."""
        check_verify(verify)
        started = time.perf_counter()
        begin = partial(begin_get, self.link, request_id, verify=verify)
        _, delivery = await self._receive(begin, timeout)
        return await self._opened(delivery, started, verify)

    async def get_many(
        self, request_ids: Sequence[str], *, timeout: float, verify: Verify = "auto"
    ) -> ReceivedBatch[Received]:
        """`KVConsumer.get_many`; cancelling the task cancels all requests."""
        check_verify(verify)
        started, attempts = time.perf_counter(), GetAttempts(check_timeout(timeout))
        gets = await self._begun_gets(request_ids, attempts.seconds_left(), verify)
        received: list[Received] = []
        try:
            for request_id, pending in zip(request_ids, gets, strict=True):
                await _wait_for(pending.future, attempts.seconds_left())
                delivery = await self._repeated(pending, request_id, attempts.again(), verify)
                received.append(await self._opened(delivery, started, verify))
        except BaseException:
            for one in received:
                one.release_unread()
            for pending in gets[len(received) :]:
                pending.cancel()
            raise
        return ReceivedBatch(received)

    async def stream_get(self, request_id: str, *, timeout: float) -> AsyncReceivedStream:
        """`KVConsumer.stream_get`; cancelling the task cancels the request."""
        started = time.perf_counter()
        begin = partial(begin_get, self.link, request_id, streamed=True)
        _, delivery = await self._receive(begin, timeout)
        stream = open_stream(self.link, delivery, started=started, timeout=timeout)
        return AsyncReceivedStream(stream)

    async def read_stream(
        self, request_id: str, *, timeout: float, start: int = 0, verify: Verify = "auto"
    ) -> AsyncChunkStream:
        """`KVConsumer.read_stream`; cancelling the task cancels the request."""
        limit = check_timeout(timeout)
        begin = partial(begin_chunks, self.link, request_id, start=start, verify=verify)
        head, delivery = await self._receive(begin, limit)
        stream = open_chunks(self.link, head, delivery, start=start, timeout=limit, verify=verify)
        return AsyncChunkStream(stream)

    async def _opened(self, delivery: Delivery, started: float, verify: Verify) -> Received:
        received = open_delivery(self.link, delivery, started=started)
        if verify == "full":
            await _Verification(received).run()
        return received

    async def _begun_gets(
        self, request_ids: Sequence[str], timeout: float, verify: Verify
    ) -> list[PendingGet]:
        def begin(timeout: float) -> _PendingGets:
            return _PendingGets(begin_gets(self.link, request_ids, timeout=timeout, verify=verify))

        request = _AsyncGet(begin, timeout)
        try:
            await self._begun(request)
        except BaseException:
            request.cancel()
            raise
        return request.take().gets

    async def _repeated(
        self, pending: PendingGet, request_id: str, attempts: GetAttempts, verify: Verify
    ) -> Delivery:
        """What a get received; if only the connection broke, what it receives when repeated."""
        try:
            return pending.wait(timeout=0.0)  # answered or out of time: does not block
        except PeerLostError:
            retry = partial(can_retry, self.link, pending, timeout=attempts.seconds_left())
            if not await run_in_thread(retry):
                raise
        begin = partial(begin_get, self.link, request_id, verify=verify)
        return (await self._receive(begin, attempts.seconds_left()))[1]

    async def _receive(
        self, begin: Callable[..., PendingGet], timeout: float
    ) -> tuple[PendingGet, Delivery]:
        """What `begin` requests; if only the connection broke, it is requested again."""
        attempts = GetAttempts(check_timeout(timeout))
        while True:
            pending = await self._answered(_AsyncGet(begin, attempts.seconds_left()))
            try:
                return pending, pending.wait(timeout=0.0)  # answered or out of time: no block
            except PeerLostError:
                retry = partial(can_retry, self.link, pending, timeout=attempts.seconds_left())
                if not attempts.may_retry() or not await run_in_thread(retry):
                    raise

    async def _answered(self, request: _AsyncGet[PendingGet]) -> PendingGet:
        """The pending get, once its answer is there or the time is over.

        `wait_for` may swallow a cancellation, `asyncio.wait` not. A reconnection needs a thread.
        """
        try:
            pending = await self._begun(request)
            await _wait_for(pending.future, request.seconds_left())
        except BaseException:
            request.cancel()
            raise
        return request.take()

    async def _begun(self, request: _AsyncGet[G]) -> G:
        """The pending get; in a thread, if the link has to reconnect first."""
        if self.link.is_connected:
            with contextlib.suppress(PeerLostError):  # the connection ends at this moment
                return request(timeout=0.0)
        begun = asyncio.ensure_future(run_in_thread(request))
        try:
            await asyncio.wait([begun], timeout=request.timeout)
        finally:
            begun.cancel()
        if not begun.done():
            raise TransferTimeout(
                f"{self.link.url}: no connection after {format_seconds(request.timeout)}",
                waited=request.timeout,
                phase="connecting",
            )
        return begun.result()


class AsyncReceivedStream:
    """A `ReceivedStream` whose layers are awaited.

    A context manager: `with await consumer.stream_get(…) as stream: async for layer in stream: …`.
    """

    def __init__(self, stream: ReceivedStream):
        self.stream = stream

    def __repr__(self) -> str:
        return f"<AsyncReceivedStream of {self.stream!r}>"

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

    def release(self) -> None:
        """`ReceivedStream.release`; a task that waits for a layer of it raises ClosedError."""
        self.stream.release()

    def release_unread(self) -> None:
        """`ReceivedStream.release_unread`; a task that waits for a layer raises ClosedError."""
        self.stream.release_unread()

    def __enter__(self) -> AsyncReceivedStream:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stream.__exit__(kind, error, traceback)

    async def _wait(self, future: Future[None], what: str, timeout: float | None) -> None:
        """Uses `asyncio.wait`, because `wait_for` may swallow a cancellation."""
        seconds = self.stream.timeout if timeout is None else check_timeout(timeout)
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait([answer], timeout=seconds)
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieved here, raised by `check`
            self.stream.cancel_wait(future)
        self.stream.check(future, what, seconds)


class AsyncChunkStream:
    """A `ChunkStream` whose chunks are awaited; `stream` is that one.

    `with await consumer.read_stream("r", timeout=5.0) as stream: async for chunk in stream: …`.
    """

    def __init__(self, stream: ChunkStream[ReceivedChunk]):
        self.stream = stream

    def __repr__(self) -> str:
        return f"<AsyncChunkStream of {self.stream!r}>"

    async def __aiter__(self) -> AsyncIterator[ReceivedChunk]:
        """The chunks in their order, up to the end; waits up to the stream's timeout for each."""
        while (chunk := await self.receive()) is not None:
            yield chunk

    async def receive(self, *, timeout: float | None = None) -> ReceivedChunk | None:
        """`ChunkStream.receive`; cancelling the task leaves the stream as it is."""
        limit = self.stream.timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + limit
        if self.stream.count is None:
            following = self.stream.when_next()
            await _wait_for(following, limit)
            if following.done() and isinstance(following.exception(), StreamEnded):
                await _wait_for(self.stream.when_whole(), max(0.0, deadline - time.monotonic()))
        return self.stream.receive(timeout=0.0)

    def release(self) -> None:
        """`ChunkStream.release`; a task that waits for a chunk raises ClosedError."""
        self.stream.release()

    def release_unread(self) -> None:
        """`ChunkStream.release_unread`; a task that waits for a chunk raises ClosedError."""
        self.stream.release_unread()

    def __enter__(self) -> AsyncChunkStream:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.stream.__exit__(kind, error, traceback)


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


class _PendingGets:
    """Several gets, which are cancelled together."""

    def __init__(self, gets: list[PendingGet]):
        self.gets = gets

    def cancel(self) -> None:
        """Cancel each."""
        for pending in self.gets:
            pending.cancel()


G = TypeVar("G", "PendingGet", _PendingGets)


class _AsyncGet(Generic[G]):
    """Runs `begin_get` or the like, in any thread; after `cancel`, what was begun is cancelled."""

    def __init__(self, begin: Callable[..., G], timeout: float):
        self._begin: Callable[..., G] = begin
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._cancelled = False
        self._pending: deque[G] = deque()

    def __call__(self, timeout: float | None = None) -> G:
        pending = self._begin(timeout=self.seconds_left() if timeout is None else timeout)
        self._pending.append(pending)
        if self._cancelled:
            self.cancel()
        return pending

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def take(self) -> G:
        return self._pending.pop()

    def cancel(self) -> None:
        """Cancel the get once, in the thread that pops it, this or the other one."""
        self._cancelled = True
        with contextlib.suppress(IndexError):
            self._pending.pop().cancel()


class _Verification:
    """`verify_first` in a thread; after a cancellation the payload is released unread."""

    def __init__(self, received: Received):
        self._received = received
        self._began = self._ended = self._cancelled = False

    async def run(self) -> None:
        try:
            await run_in_thread(self)
        except asyncio.CancelledError:
            self._cancelled = True
            if self._ended or not self._began:
                self._received.release_unread()
            raise
        except BaseException:
            self._received.release_unread()
            raise

    def __call__(self) -> None:
        self._began = True
        try:
            if not self._cancelled:
                verify_first(self._received)
        finally:
            self._ended = True
            if self._cancelled:  # not before: its memory could be reused while it is hashed
                self._received.release_unread()
