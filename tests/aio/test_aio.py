"""`AsyncKVLink`: no call blocks a thread, and a cancelled get loses no payload."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import ClosedError, KVLink, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.aio import AsyncKVConsumer, AsyncKVLink
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.rig import until
from support.link.aio_ends import THREE, Test, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink.aio import AsyncKVProducer

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_round_trip(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        data = Recipe("k", bundle=True).make()
        receipt = await producer.put(data)
        with await consumer.get("k", timeout=60, verify="full") as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        await producer.wait(receipt, timeout=60)
        assert receipt.state == "released"

    run(test)


def test_waiting_gets_hold_no_threads(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        gets = [asyncio.ensure_future(consumer.get(f"k{n}", timeout=60)) for n in range(100)]
        await waiting(producer, 100)
        assert threading.active_count() < 20
        for n in reversed(range(100)):
            await producer.put(Recipe(f"k{n}", seed=n).make())
        for n, get in enumerate(gets):
            with await get as found:
                assert fingerprint(found) == fingerprint(Recipe(f"k{n}", seed=n).make())
            del found

    run(test)


def test_the_event_loop_goes_on(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=60))
        await waiting(producer, 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not get.done()
        consumer.abort("k")
        with pytest.raises(TransferFailed):
            await get

    run(test)


def test_timeout(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match="not announced"):
            await consumer.get("k", timeout=0.2)
        assert time.monotonic() - started > 0.19
        await waiting(producer, 0)

    run(test)


def test_cancelled_get_is_withdrawn(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=60))
        await waiting(producer, 1)
        get.cancel()
        with pytest.raises(asyncio.CancelledError):
            await get
        await waiting(producer, 0)
        receipt = await producer.put(Recipe("k").make())
        assert receipt.state == "committed"
        (await consumer.get("k", timeout=60)).release()
        await producer.wait(receipt, timeout=60)

    run(test)


def test_cancelled_at_any_moment_loses_nothing(run: Callable[[Test], None]) -> None:
    """Cancelled while requesting, waiting or receiving, it keeps no memory."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        for turn in range(60):
            key = f"k{turn}"
            get = asyncio.ensure_future(consumer.get(key, timeout=60))
            for _ in range(turn % 6):
                await asyncio.sleep(0)
            if turn % 3 == 0:
                await asyncio.sleep(0.0002 * (turn % 10))
            put = asyncio.ensure_future(producer.put(Recipe(key).make()))
            for _ in range(turn % 7):
                await asyncio.sleep(0.0002)
            get.cancel()
            receipt = await put
            try:
                (await get).release()
            except asyncio.CancelledError:
                (await consumer.get(key, timeout=60)).release()
            await producer.wait(receipt, timeout=60)
        await waiting(producer, 0)
        assert producer.stats()["memory"]["used"] == 0

    run(test)


def test_wait_for_gives_up_cleanly(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consumer.get("k", timeout=60), 0.1)
        await waiting(producer, 0)

    run(test)


def test_failures_arrive(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        first = asyncio.ensure_future(consumer.get("a", timeout=60))
        second = asyncio.ensure_future(consumer.get("b", timeout=60))
        third = asyncio.ensure_future(consumer.get("c", timeout=60))
        await waiting(producer, 3)
        producer.fail("a", "out of luck")
        with pytest.raises(TransferFailed, match="out of luck"):
            await first
        consumer.abort("b", "no need")
        with pytest.raises(TransferFailed, match="no need"):
            await second
        await producer.close()
        with pytest.raises(PeerLostError):
            await third

    run(test)


def test_close_wakes_a_get(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=60))
        await waiting(producer, 1)
        await consumer.close()
        with pytest.raises(ClosedError):
            await get

    run(test)


def test_deadlines_while_the_producer_is_gone(run: Callable[[Test], None]) -> None:
    """The pool has no free thread: each get's deadline holds all the same."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        await producer.close()
        while consumer.stats()["connected"]:  # noqa: ASYNC110 - polls a counter
            await asyncio.sleep(0.002)
        with occupied_pool():
            gets = [consumer.get(f"k{n}", timeout=0.4) for n in range(20)]
            for found in await asyncio.gather(*gets, return_exceptions=True):
                assert isinstance(found, (PeerLostError, TransferTimeout)), found

    run(test)


def test_every_call_while_the_pool_is_occupied(run: Callable[[Test], None]) -> None:
    """No call needs a thread of the event loop's pool, which other code may fill."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        data: Any = THREE.make()
        with occupied_pool():
            waits = [
                producer.wait(await producer.put(Recipe(f"k{n}").make()), timeout=60)
                for n in range(20)
            ]
            waiting_receipts = [asyncio.ensure_future(wait) for wait in waits]
            threads = threading.active_count()
            await asyncio.sleep(0)
            assert threading.active_count() <= threads  # a receipt that waits holds none
            for n in range(20):
                (await consumer.get(f"k{n}", timeout=60, verify="full")).release()
            await asyncio.gather(*waiting_receipts)
            (await producer.allocate(data)).release()
            async with producer.stream_put(data) as out:
                getting = asyncio.ensure_future(consumer.stream_get("s", timeout=60))
                for layer in range(3):
                    await out.write_layer(
                        layer, *(part[layer] for part in data.layer_blocks.values())
                    )
            with await getting as stream:
                assert len([layer async for layer in stream]) == 3
            other = await AsyncKVLink.serve(f"inproc://{id(run)}")
            async with other, await AsyncKVLink.connect(other.link.url, timeout=60):
                pass
            await consumer.close()

    run(test)


def test_a_receipt_tells_event_loops(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        receipt = await producer.put(Recipe("k").make())
        with pytest.raises(TransferTimeout, match=r"still committed after 0\.01 s: 1 readers"):
            await producer.wait(receipt, timeout=0.01)
        assert not receipt._transfer.done_callbacks  # a wait that ended leaves nothing
        ended = [asyncio.ensure_future(producer.wait(receipt, timeout=60)) for _ in range(2)]
        await asyncio.sleep(0)
        ended[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended[0]
        (await consumer.get("k", timeout=60)).release()
        await ended[1]
        await producer.wait(receipt, timeout=60)  # it has ended: at once
        failed = await producer.put(Recipe("f").make())
        producer.fail("f", "out of luck")
        with pytest.raises(TransferFailed, match="out of luck"):
            await producer.wait(failed, timeout=60)

    run(test)


@contextlib.contextmanager
def occupied_pool() -> Iterator[None]:
    """Fill the event loop's pool with a call that lasts as long as the block."""
    free, pool = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    pool.submit(free.wait)
    try:
        yield
    finally:
        free.set()


def test_many_readers_of_one_key(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        gets = [asyncio.ensure_future(consumer.get("k", timeout=60)) for _ in range(30)]
        await waiting(producer, 30)
        receipt = await producer.put(Recipe("k").make(), readers=30)
        for get in gets:
            (await get).release()
        await producer.wait(receipt, timeout=60)

    run(test)


async def _lose(consumer: AsyncKVConsumer) -> None:
    for call in (consumer.get, consumer.stream_get, consumer.read_stream):
        with contextlib.suppress(PeerLostError, TransferTimeout):
            await call("k", timeout=0.3)


def _lose_the_producer(sockets: str) -> None:
    with KVLink.serve("shm://gone", directory=sockets) as producer:
        consumer = KVLink.connect("shm://gone", timeout=60, directory=sockets)
        producer.close()
    with consumer:
        until(lambda: not consumer.is_connected, "the producer is gone")
        asyncio.run(_lose(AsyncKVConsumer(consumer)))


def test_an_error_of_a_thread_keeps_nothing(sockets: str) -> None:
    """Servers switch the cyclic collector off: an error that is caught must be in no cycle."""
    _lose_the_producer(sockets)  # what a first use opens
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        _lose_the_producer(sockets)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, "every descriptor is closed")
    finally:
        gc.enable()
