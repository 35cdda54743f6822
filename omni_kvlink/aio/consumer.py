"""`AsyncKVConsumer`: a `KVConsumer` for asyncio; a waiting `get` holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.aio.end import AsyncLinkEnd, run_in_thread
from omni_kvlink.errors import PeerLostError, TransferTimeout
from omni_kvlink.link import (
    GetAttempts,
    KVConsumer,
    Payload,
    Received,
    ReceivedLayer,
    ReceivedStream,
    Verify,
    begin_get,
    can_retry,
    check_timeout,
    check_verify,
    open_delivery,
    open_stream,
    verify_first,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Future

    from omni_kvlink.connectors.base import PendingGet
    from omni_kvlink.connectors.protocol.get_table import Delivery


class AsyncKVConsumer(AsyncLinkEnd[KVConsumer]):
    """The methods of `KVConsumer`, awaited; `link` is the synchronous consumer below."""

    async def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
        """`KVConsumer.get`; cancelling the task cancels the request."""
        check_verify(verify)
        started = time.perf_counter()
        delivery = await self._receive(request_id, timeout, streamed=False, verify=verify)
        received = open_delivery(self.link, delivery, started=started)
        if verify == "full":
            await _Verification(received).run()
        return received

    async def stream_get(self, request_id: str, *, timeout: float) -> AsyncReceivedStream:
        """`KVConsumer.stream_get`; cancelling the task cancels the request."""
        started = time.perf_counter()
        delivery = await self._receive(request_id, timeout, streamed=True)
        stream = open_stream(self.link, delivery, started=started, timeout=timeout)
        return AsyncReceivedStream(stream)

    async def _receive(
        self, request_id: str, timeout: float, *, streamed: bool, verify: Verify = "auto"
    ) -> Delivery:
        attempts = GetAttempts(check_timeout(timeout))
        while True:
            left = attempts.seconds_left()
            request = _AsyncGet(self.link, request_id, left, streamed=streamed, verify=verify)
            pending = await self._answered(request)
            try:
                return pending.wait(timeout=0.0)  # answered or out of time: does not block
            except PeerLostError:
                retry = partial(can_retry, self.link, pending, timeout=attempts.seconds_left())
                if not attempts.may_retry() or not await run_in_thread(retry):
                    raise

    async def _answered(self, request: _AsyncGet) -> PendingGet:
        """The pending get, once its answer is there or the time is over.

        `wait_for` may swallow a cancellation, `asyncio.wait` not. A reconnection needs a thread.
        """
        try:
            pending = await self._begun(request)
            answer = asyncio.wrap_future(pending.future)
            try:
                await asyncio.wait([answer], timeout=request.seconds_left())
            finally:
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()  # retrieved here, raised by `PendingGet.wait`
        except BaseException:
            request.cancel()
            raise
        return request.take()

    async def _begun(self, request: _AsyncGet) -> PendingGet:
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
                f"{self.link.url}: no connection after {request.timeout:g} s",
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
        """Release the payload; a task that waits for a layer of it raises ClosedError."""
        self.stream.release()

    def __enter__(self) -> AsyncReceivedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

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


class _AsyncGet:
    """Runs `begin_get`, in any thread; after `cancel`, a get that was begun is cancelled."""

    def __init__(
        self,
        consumer: KVConsumer,
        request_id: str,
        timeout: float,
        *,
        streamed: bool,
        verify: Verify,
    ):
        self._begin = partial(begin_get, consumer, request_id, streamed=streamed, verify=verify)
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._cancelled = False
        self._pending: deque[PendingGet] = deque()

    def __call__(self, timeout: float | None = None) -> PendingGet:
        pending = self._begin(timeout=self.seconds_left() if timeout is None else timeout)
        self._pending.append(pending)
        if self._cancelled:
            self.cancel()
        return pending

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def take(self) -> PendingGet:
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
            self._received.release()
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
