"""A link's two ends for coroutine tests, and what they wait for."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_kvlink.aio import AsyncKVConsumer, AsyncKVLink, AsyncKVProducer
from omni_kvlink.copier import TorchCopier
from omni_kvlink.testing.caches import Recipe

_numbers = itertools.count()
THREE = Recipe("s", layers=3)
Ends = tuple[AsyncKVProducer, AsyncKVConsumer]
Test = Callable[[AsyncKVProducer, AsyncKVConsumer], Awaitable[None]]


@pytest.fixture(params=["inproc", "shm"])
def run(request: pytest.FixtureRequest, sockets: str) -> Callable[[Test], None]:
    """Run a coroutine function with both ends of a link."""

    @asynccontextmanager
    async def ends() -> AsyncIterator[Ends]:
        url = f"{request.param}://aio-{next(_numbers)}"
        options: dict[str, Any] = {"directory": sockets, "quota": 8 << 20}
        async with (
            await AsyncKVLink.serve(url, **options) as producer,
            await AsyncKVLink.connect(url, timeout=60, **options) as consumer,
        ):
            yield producer, consumer

    def run(test: Test) -> None:
        async def whole() -> None:
            async with ends() as (producer, consumer):
                await test(producer, consumer)

        asyncio.run(whole())

    return run


async def waiting(producer: AsyncKVProducer, number: int) -> None:
    """Wait until `number` gets wait at the producer."""
    deadline = time.monotonic() + 60
    while producer.stats()["transfers"]["waiting"] != number:
        assert time.monotonic() < deadline, producer.stats()
        await asyncio.sleep(0.002)


async def freed(producer: AsyncKVProducer) -> None:
    """Wait until no byte of the producer's memory is used."""
    deadline = time.monotonic() + 60
    while producer.stats()["memory"]["used"]:
        assert time.monotonic() < deadline, producer.stats()
        await asyncio.sleep(0.002)


class BlockingCopier(TorchCopier):
    """Copies and hashes only while `open` is set."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def _pass(self) -> None:
        self.entered.set()
        assert self.open.wait(60), "not opened: the event loop was blocked"

    def gather(self, *args: Any, **options: Any) -> list[str]:
        self._pass()
        return super().gather(*args, **options)

    def verify(self, *args: Any) -> None:
        self._pass()
        super().verify(*args)


async def entered(copier: BlockingCopier) -> None:
    deadline = time.monotonic() + 60
    while not copier.entered.is_set():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
