"""A payload that is received while it is being written, awaited layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future

from omni_kvlink.link import Payload, ReceivedLayer, ReceivedStream


class AsyncReceivedStream:
    """A `ReceivedStream` to be awaited; `stream` is the synchronous one beneath.

    A context manager: `with await link.stream_get(…) as stream: async for layer in stream: …`.
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
        """`ReceivedStream.wait_for_layer`; cancelling the task takes nothing from the stream.

        To copy a large layer out without stopping the event loop:
        `await asyncio.to_thread(layer.scatter, key, value)`.
        """
        key = self.stream.find(layer, branch)
        await self._wait(self.stream.when(key), self.stream.name(key), timeout)
        return self.stream.open_layer(key)

    async def wait(self, *, timeout: float | None = None) -> Payload:
        """`ReceivedStream.wait`."""
        await self._wait(self.stream.whole(), self.stream.WHOLE, timeout)
        return self.stream.wait(timeout=0.0)

    def release(self) -> None:
        """Let go of the payload; who waits for a layer of it raises ClosedError."""
        self.stream.release()

    def __enter__(self) -> AsyncReceivedStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    async def _wait(self, future: Future[None], what: str, timeout: float | None) -> None:
        """With `asyncio.wait`, because `wait_for` may swallow a cancellation."""
        seconds = self.stream.timeout if timeout is None else timeout
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait([answer], timeout=max(0.0, seconds))
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # retrieved here, raised by `check`
            self.stream.forget(future)
        self.stream.check(future, what, seconds)
