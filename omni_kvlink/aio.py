"""`AsyncKVLink`: a `KVLink` for asyncio; a waiting `get` holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any

from .connectors.base import Receipt
from .link import KVLink, Payload, Received, Verify


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
        started = time.perf_counter()
        want = await asyncio.to_thread(self.link.begin_get, request_id, timeout=timeout)
        left = timeout - (time.perf_counter() - started)
        loop, answered = asyncio.get_running_loop(), asyncio.Event()
        want.future.add_done_callback(lambda _: loop.call_soon_threadsafe(answered.set))
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(answered.wait(), max(0.0, left))
        except asyncio.CancelledError:
            want.cancel()
            raise
        # Answered, or out of time: this returns or raises at once.
        delivery = want.wait(timeout=0.0)
        return self.link.open_delivery(delivery, started=started, verify=verify)

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
