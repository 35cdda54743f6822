"""Checks of the links of `omni_kvlink.aio`, which carry what those of threads do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.append_stream_checks import CHUNKS, LENGTHS, numbered
from omni_kvlink.testing.batch_checks import EXPECTED, KEYS, make_all
from omni_kvlink.testing.caches import MIXED, NESTED, fingerprint, hash_tensors, identify
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import Rig, until_requested

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer
    from omni_kvlink.link import Payload, Received

    Transfer = Callable[[AsyncKVProducer, AsyncKVConsumer], Awaitable[None]]


def check_tensors_by_asyncio(rig: Rig) -> None:
    """Put and received one by one."""

    async def transfer(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        for data in (NESTED.make(), MIXED.make()):
            receipt = await producer.put(data)
            received = await consumer.get("t", timeout=60, verify="full")
            assert fingerprint(received.data) == fingerprint(data)
            received.release()
            await producer.wait(receipt, timeout=60)

    _run(rig, transfer)


def check_get_into_by_asyncio(rig: Rig) -> None:
    """Copied into the caller's tensors; a task that is cancelled gives the payload back."""

    async def transfer(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        for data in (NESTED.make(), MIXED.make()):
            missing = asyncio.ensure_future(_get_into(consumer, data))
            await asyncio.to_thread(until_requested, producer.link, 1)
            missing.cancel()
            await asyncio.wait([missing])
            assert missing.cancelled()
            getting = asyncio.ensure_future(_get_into(consumer, data))
            await asyncio.to_thread(until_requested, producer.link, 1)
            receipt = await producer.put(data)
            received, copied = await getting
            assert hash_tensors(copied) == hash_tensors(data.tensors())
            assert fingerprint(received.data) == fingerprint(data)
            received.release()
            del received, getting
            await producer.wait(receipt, timeout=60)

    _run(rig, transfer)


async def _get_into(
    consumer: AsyncKVConsumer, data: Payload
) -> tuple[Received, list[torch.Tensor]]:
    targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
    return await consumer.get(data.request_id, timeout=PATIENCE, into=targets), targets


def check_many_by_asyncio(rig: Rig) -> None:
    """Put and received together; a task that is cancelled gives all back."""

    async def transfer(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        missing = asyncio.ensure_future(consumer.get_many([*KEYS, "missing"], timeout=PATIENCE))
        receipts = await producer.put_many(make_all())
        await asyncio.to_thread(until_requested, producer.link, len(KEYS) + 1)
        missing.cancel()
        await asyncio.wait([missing])
        assert missing.cancelled()
        with await consumer.get_many(KEYS, timeout=60, verify="full") as data:
            assert list(map(fingerprint, data)) == EXPECTED
        del data
        for receipt in receipts:
            await producer.wait(receipt, timeout=60)

    _run(rig, transfer)


def check_chunks_by_asyncio(rig: Rig) -> None:
    """An append stream, opened and read."""

    async def transfer(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        reading = asyncio.ensure_future(read(consumer))
        async with producer.open_stream("g", CHUNKS[0], window=2) as out:
            for tensors in CHUNKS[:-1]:
                await out.append(tensors, timeout=60)
            await out.append_requests({"r": LENGTHS[-1]}, CHUNKS[-1], timeout=60)
        assert await reading == numbered(CHUNKS)
        await producer.wait(await out.commit(), timeout=60)

    async def read(consumer: AsyncKVConsumer) -> list[tuple[int, str]]:
        with await consumer.read_stream("g", timeout=60) as stream:
            return [identify(received) async for received in stream]

    _run(rig, transfer)


def _run(rig: Rig, transfer: Transfer) -> None:
    """Run a transfer between a producer and a consumer of an event loop of their own."""

    async def run() -> None:
        async with (
            await AsyncKVLink.serve(rig.url, **rig.options) as producer,
            await AsyncKVLink.connect(rig.url, timeout=60, **rig.options) as consumer,
        ):
            await transfer(producer, consumer)

    asyncio.run(run())
