"""A payload that is sent while it is being made, without stopping the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from omni_kvlink.connectors.base import Receipt
from omni_kvlink.link import PutStream
from omni_kvlink.payload.views import TensorView


class AsyncPutStream:
    """`async with link.stream_put(plan) as out: await out.write_layer(0, key, value)`.

    Copies run in threads. A cancelled task leaves no copy behind that could still write: the
    stream's end waits for it, in a thread too.

    Attributes:
        out: the synchronous stream beneath; there since the block was entered.
    """

    out: PutStream

    def __init__(self, begin: Callable[[], PutStream]):
        self._begin = begin

    async def write_layer(
        self, layer: int, key: TensorView, value: TensorView | None = None, *, branch: str = ""
    ) -> None:
        """`PutStream.write_layer` in a thread."""
        await asyncio.to_thread(self.out.write_layer, layer, key, value, branch=branch)

    async def commit(self) -> Receipt:
        """`PutStream.commit` in a thread; the block's end calls it."""
        return await asyncio.shield(asyncio.to_thread(self.out.commit))

    async def __aenter__(self) -> AsyncPutStream:
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin))
        try:
            self.out = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_end)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.out.__exit__, kind, error, tb))


def _end(beginning: asyncio.Task[PutStream]) -> None:
    """Who wanted it was cancelled before it had it."""
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().fail("its writer was cancelled")
