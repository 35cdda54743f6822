"""`AsyncKVLink`: opens the ends of a link for asyncio."""

from __future__ import annotations

from abc import ABC
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.aio.consumer import AsyncKVConsumer
from omni_kvlink.aio.end import run_in_thread
from omni_kvlink.aio.producer import AsyncKVProducer
from omni_kvlink.link import KVLink, LinkOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from omni_kvlink.copier import Copier


class AsyncKVLink(ABC):  # noqa: B024 - it only registers virtual subclasses
    """`KVLink` for asyncio: `serve` gives an `AsyncKVProducer`, `connect` an `AsyncKVConsumer`."""

    @staticmethod
    async def serve(
        url: str,
        *,
        copier: str | Copier = "auto",
        digests: bool = True,
        **options: Unpack[LinkOptions],
    ) -> AsyncKVProducer:
        """Open the producer's end; see `KVLink.serve`."""
        serve = partial(KVLink.serve, url, copier=copier, digests=digests, **options)
        return AsyncKVProducer(await run_in_thread(serve))

    @staticmethod
    async def connect(
        url: str, *, timeout: float, copier: str | Copier = "auto", **options: Unpack[LinkOptions]
    ) -> AsyncKVConsumer:
        """Open a consumer's end, in a thread that waits for the producer; see `KVLink.connect`."""
        connect = partial(KVLink.connect, url, timeout=timeout, copier=copier, **options)
        return AsyncKVConsumer(await run_in_thread(connect))


AsyncKVLink.register(AsyncKVProducer)
AsyncKVLink.register(AsyncKVConsumer)
