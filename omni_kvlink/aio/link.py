"""`AsyncKVLink`: a `KVLink` for asyncio; a waiting `get` holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from types import TracebackType
from typing import Any

from omni_kvlink.aio.put_stream import AsyncPutStream
from omni_kvlink.aio.received_stream import AsyncReceivedStream
from omni_kvlink.connectors.base import MAX_RETRIES, Delivery, PendingGet, Receipt
from omni_kvlink.errors import PeerLostError, TransferTimeout
from omni_kvlink.link import KVLink, Payload, Received, Verify, check_verify
from omni_kvlink.payload.manifest import Manifest


class AsyncKVLink:
    """The same verbs as `KVLink`, awaited. `link` is the synchronous one beneath."""

    def __init__(self, link: KVLink):
        self.link = link

    @classmethod
    async def serve(cls, url: str, **options: Any) -> AsyncKVLink:
        return cls(await asyncio.to_thread(KVLink.serve, url, **options))

    @classmethod
    async def connect(cls, url: str, *, timeout: float, **options: Any) -> AsyncKVLink:
        return cls(await asyncio.to_thread(KVLink.connect, url, timeout=timeout, **options))

    async def put(self, data: Payload, **how: Any) -> Receipt:
        """`KVLink.put` in a thread: the copy would stop the event loop."""
        return await asyncio.to_thread(self.link.put, data, **how)

    async def get(self, request_id: str, *, timeout: float, verify: Verify = "auto") -> Received:
        """`KVLink.get`; cancelling the task withdraws the request.

        Raises:
            The errors of `KVLink.get`.
        """
        check_verify(verify)
        started = time.perf_counter()
        delivery = await self._delivered(request_id, timeout)
        received = self.link.open_delivery(delivery, started=started, verify="auto")
        if verify == "full":
            await _Verifying(received).done()
        return received

    async def stream_get(self, request_id: str, *, timeout: float) -> AsyncReceivedStream:
        """`KVLink.stream_get`; cancelling the task withdraws the request.

        Raises:
            The errors of `KVLink.stream_get`.
        """
        started = time.perf_counter()
        delivery = await self._delivered(request_id, timeout, streamed=True)
        return AsyncReceivedStream(
            self.link.open_stream(delivery, started=started, timeout=timeout)
        )

    def stream_put(self, plan: Payload | Manifest, **how: Any) -> AsyncPutStream:
        """`KVLink.stream_put`, to be used with `async with`."""
        return AsyncPutStream(partial(self.link.stream_put, plan, **how))

    async def _delivered(
        self, request_id: str, timeout: float, *, streamed: bool = False
    ) -> Delivery:
        """As `Consumer.receive`: if only a connection breaks, ask again."""
        deadline, retries = time.monotonic() + timeout, 0
        while True:
            left = deadline - time.monotonic()
            want = await self._asked(_Asking(self.link, request_id, left, streamed=streamed), left)
            try:
                return want.wait(timeout=0.0)  # answered, or out of time: returns or raises at once
            except PeerLostError:
                left = deadline - time.monotonic()
                again = partial(self.link.is_back, want, timeout=left)
                retries += 1
                if retries > MAX_RETRIES or not await asyncio.to_thread(again):
                    raise

    async def _asked(self, asking: _Asking, timeout: float) -> PendingGet:
        """A want that is answered, or out of time."""
        try:
            await self._answered(asking, timeout)
        except BaseException:
            asking.withdraw()
            raise
        return asking.take()

    async def _answered(self, asking: _Asking, timeout: float) -> None:
        """Return when the answer is there or the time is over. Only a reconnection needs a thread.

        With `asyncio.wait`, because `wait_for` may swallow a cancellation.
        """
        deadline = time.monotonic() + timeout
        asked = asyncio.get_running_loop().run_in_executor(None, asking)
        try:
            await asyncio.wait([asked], timeout=timeout)
        finally:
            asked.cancel()
        if asked.cancelled():
            raise TransferTimeout(
                f"{self.link.url}: no connection after {timeout:g} s",
                waited=timeout,
                phase="connecting",
            )
        answer = asyncio.wrap_future(asked.result().future)
        try:
            await asyncio.wait([answer], timeout=max(0.0, deadline - time.monotonic()))
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieved here, raised by `PendingGet.wait`

    async def wait(self, receipt: Receipt, *, timeout: float) -> None:
        """`Receipt.wait` in a thread."""
        await asyncio.to_thread(receipt.wait, timeout=timeout)

    def fail(self, request_id: str, reason: str) -> None:
        self.link.fail(request_id, reason)

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        self.link.abort(request_id, reason)

    def stats(self) -> dict[str, Any]:
        return self.link.stats()

    async def close(self) -> None:
        await asyncio.to_thread(self.link.close)

    async def __aenter__(self) -> AsyncKVLink:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()


class _Asking:
    """`begin_get`, to be called in a thread; what comes of it after `withdraw` is taken back."""

    def __init__(self, link: KVLink, request_id: str, timeout: float, *, streamed: bool = False):
        self._begin = partial(link.begin_get, request_id, streamed=streamed)
        self._deadline = time.monotonic() + timeout
        self._withdrawn = False
        self._wants: deque[PendingGet] = deque()

    def __call__(self) -> PendingGet:
        left = self._deadline - time.monotonic()
        want = self._begin(timeout=max(0.0, left))
        self._wants.append(want)
        if self._withdrawn:
            self.withdraw()
        return want

    def take(self) -> PendingGet:
        return self._wants.pop()

    def withdraw(self) -> None:
        """Whoever pops the want, this thread or the other, cancels it: once."""
        self._withdrawn = True
        with contextlib.suppress(IndexError):
            self._wants.pop().cancel()


class _Verifying:
    """`Received.verify`, in a thread; a payload that nobody waits for any more goes back unread."""

    def __init__(self, received: Received):
        self._received = received
        self._began = self._ended = self._withdrawn = False

    async def done(self) -> None:
        try:
            await asyncio.to_thread(self)
        except asyncio.CancelledError:
            self._withdrawn = True
            if self._ended or not self._began:
                self._received.give_back()
            raise
        except BaseException:
            self._received.release()
            raise

    def __call__(self) -> None:
        self._began = True
        try:
            if not self._withdrawn:
                self._received.verify()
        finally:
            self._ended = True
            if self._withdrawn:  # not before: its memory could be reused while it is hashed
                self._received.give_back()
