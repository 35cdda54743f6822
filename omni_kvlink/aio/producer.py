"""`AsyncKVProducer`: a `KVProducer` for asyncio; copies run in threads."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from omni_kvlink.connectors.protocol.transfer_table import Receipt
    from omni_kvlink.link import Allocation, KVProducer, Payload, PutStream
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView


class AsyncKVProducer:
    """The methods of `KVProducer`, awaited.

    Attributes:
        link: the synchronous producer below.
    """

    def __init__(self, link: KVProducer):
        self.link = link

    async def put(
        self,
        data: Payload,
        *,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
        digests: bool | None = None,
        background: bool = False,
        direct: bool = False,
    ) -> Receipt:
        """`KVProducer.put` in a thread: its copy would stop the event loop."""
        return await asyncio.to_thread(
            self.link.put,
            data,
            readers=readers,
            ttl=ttl,
            timeout=timeout,
            digests=digests,
            background=background,
            direct=direct,
        )

    async def allocate(self, plan: Payload, *, timeout: float = 10.0) -> Allocation:
        """`KVProducer.allocate` in a thread, which waits for memory."""
        return await asyncio.to_thread(self.link.allocate, plan, timeout=timeout)

    def stream_put(
        self,
        plan: Payload | Manifest,
        *,
        readers: int = 1,
        ttl: float = 60.0,
        timeout: float = 10.0,
    ) -> AsyncPutStream:
        """`KVProducer.stream_put`, to be used with `async with`."""
        return AsyncPutStream(
            partial(self.link.stream_put, plan, readers=readers, ttl=ttl, timeout=timeout)
        )

    async def wait(self, receipt: Receipt, *, timeout: float) -> None:
        """`Receipt.wait` in a thread."""
        await asyncio.to_thread(receipt.wait, timeout=timeout)

    def fail(self, request_id: str, reason: str) -> None:
        """`KVProducer.fail`; does not block."""
        self.link.fail(request_id, reason)

    def abort(self, request_id: str, reason: str = "aborted") -> None:
        """`KVProducer.abort`; does not block."""
        self.link.abort(request_id, reason)

    def stats(self) -> dict[str, Any]:
        """`KVProducer.stats`."""
        return self.link.stats()

    async def close(self) -> None:
        """`KVProducer.close` in a thread."""
        await asyncio.to_thread(self.link.close)

    async def __aenter__(self) -> AsyncKVProducer:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class AsyncPutStream:
    """`async with producer.stream_put(plan) as out: await out.write_layer(0, key, value)`.

    Copies run in threads. After a cancellation no copy writes any more: the end of the block waits
    for them, in a thread, too.

    Attributes:
        out: the synchronous stream below; set when the block is entered.
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
        """`PutStream.commit` in a thread; the end of the block calls it."""
        return await asyncio.shield(asyncio.to_thread(self.out.commit))

    async def __aenter__(self) -> AsyncPutStream:
        beginning = asyncio.ensure_future(asyncio.to_thread(self._begin))
        try:
            self.out = await asyncio.shield(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(_fail)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.out.__exit__, kind, error, tb))


def _fail(beginning: asyncio.Task[PutStream]) -> None:
    """Fail a stream whose task was cancelled before it got it."""
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().fail("its writer was cancelled")
