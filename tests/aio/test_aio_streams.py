"""`AsyncKVLink`'s streams: layers are awaited without a thread; a cancelled wait takes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import ClosedError, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from support.link.aio_ends import THREE, BlockingCopier, Test, entered, freed, waiting
from support.link.ends import use_copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer, AsyncPutStream

pytestmark = pytest.mark.usefixtures("leaves_nothing")


async def write(out: AsyncPutStream, *layers: int) -> None:
    views = layers_of(THREE.make())
    for layer in layers:
        await out.write_layer(layer, *views["kv", layer])


def test_stream_round_trip(run: Callable[[Test], None]) -> None:
    """Each layer is there before the next one is written."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        data = Recipe("s", bundle=True, layers=3).make()
        async with producer.stream_put(data) as out:
            stream = await consumer.stream_get("s", timeout=60)
            layers = layers_of(data)
            assert len(stream) == len(layers)
            seen = stream.__aiter__()
            for (branch, layer), views in layers.items():
                coming = asyncio.ensure_future(seen.__anext__())
                await asyncio.sleep(0)
                assert not coming.done()
                await out.write_layer(layer, *views, branch=branch)
                found = await coming
                assert (found.branch, found.index) == (branch, layer)
                assert hash_tensors(found.tensors) == hash_tensors(views)
                del found, coming
        assert fingerprint(await stream.wait()) == fingerprint(data)
        stream.release()
        await producer.wait(await out.commit(), timeout=60)

    run(test)


def test_stream_of_a_plain_put(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        waiting_task = asyncio.ensure_future(consumer.stream_get("s", timeout=60))
        await waiting(producer, 1)
        receipt = await producer.put(THREE.make())
        with await waiting_task as stream:
            assert [layer.index async for layer in stream] == [0, 1, 2]
            assert fingerprint(await stream.wait(timeout=0)) == fingerprint(THREE.make())
        await producer.wait(receipt, timeout=60)

    run(test)


def test_waiting_for_layers_holds_no_threads(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=60) as stream:
                waits = [asyncio.ensure_future(stream.wait_for_layer(n % 3)) for n in range(90)]
                waits.append(asyncio.ensure_future(stream.wait()))  # type: ignore[arg-type]
                await asyncio.sleep(0)
                before = threading.active_count()
                assert before < 20
                await write(out, 2, 1, 0)
                await out.finish({"first token": 17})
                for wait in waits:
                    await wait
                assert stream.extra == {"first token": 17}
                assert getattr(stream.metadata["kv"], "num_layers", 0) == 3
                del waits, wait

    run(test)


def test_cancelled_wait_takes_nothing(run: Callable[[Test], None]) -> None:
    """The stream goes on, and nothing of the wait is left."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=60) as stream:
                for call in (stream.wait_for_layer(0), stream.wait()):
                    wait = asyncio.ensure_future(call)
                    for _ in range(3):
                        await asyncio.sleep(0)
                    wait.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await wait
                assert stream.stream.delivery.progress is not None
                # A wait that is left over costs memory, and shows nowhere.
                assert not stream.stream.delivery.progress._waiting
                await write(out, 0, 1, 2)
                assert [layer.index async for layer in stream] == [0, 1, 2]
        await producer.wait(await out.commit(), timeout=60)

    run(test)


def test_layer_timeout(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=60) as stream:
                stream.stream.timeout = 0.2  # after the announcement
                for timeout in (None, 0.1, 0.0):
                    started = time.monotonic()
                    with pytest.raises(TransferTimeout, match="layer 1 of branch 'kv'"):
                        await stream.wait_for_layer(1, timeout=timeout)
                    expected = 0.2 if timeout is None else timeout
                    assert time.monotonic() - started > expected - 0.01
                with pytest.raises(TransferTimeout, match="commit"):
                    await stream.wait(timeout=0.0)
                await write(out, 1)
                assert (await stream.wait_for_layer(1, timeout=60)).index == 1
                await write(out, 0, 2)

    run(test)


def test_cancelled_stream_get_is_withdrawn(run: Callable[[Test], None]) -> None:
    """Also when the offer has just come: another reader has the stream, and all of it."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        for turn in range(20):
            waiting_task = asyncio.ensure_future(consumer.stream_get("s", timeout=60))
            if turn % 2:
                await waiting(producer, 1)
            async with producer.stream_put(THREE.make()) as out:
                await write(out, 0)
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                waiting_task.cancel()
                try:
                    stream = await waiting_task
                except asyncio.CancelledError:
                    stream = await consumer.stream_get("s", timeout=60)
                with stream:
                    await stream.wait_for_layer(0, timeout=60)
                    stream.release()  # the other layers are not needed
                await write(out, 1, 2)
            await producer.wait(await out.commit(), timeout=60)
        await waiting(producer, 0)

    run(test)


def test_a_failing_writer(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        out = await producer.stream_put(THREE.make()).__aenter__()
        stream = await consumer.stream_get("s", timeout=60)
        await write(out, 0)
        layer = asyncio.ensure_future(stream.wait_for_layer(1))
        whole = asyncio.ensure_future(stream.wait())
        await out.__aexit__(ZeroDivisionError, ZeroDivisionError("by"), None)
        for future in (layer, whole):
            with pytest.raises(TransferFailed, match=r"layer 1 of branch 'kv'.*ZeroDivision"):
                await future
        stream.release()

    run(test)


def test_close_ends_a_stream(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        out = await producer.stream_put(THREE.make()).__aenter__()
        stream = await consumer.stream_get("s", timeout=60)
        layer = asyncio.ensure_future(stream.wait_for_layer(1))
        await asyncio.sleep(0)
        await producer.close()
        with pytest.raises(PeerLostError, match="layer 1"):
            await layer
        stream.release()
        with pytest.raises(ClosedError):
            await write(out, 0)
        await out.__aexit__(ClosedError, ClosedError("closed"), None)


def test_release_wakes_who_waits(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        async with producer.stream_put(THREE.make()) as out:
            stream = await consumer.stream_get("s", timeout=60)
            layer = asyncio.ensure_future(stream.wait_for_layer(1))
            await asyncio.sleep(0)
            stream.release()
            with pytest.raises(ClosedError, match="layer 1"):
                await layer
            with pytest.raises(ClosedError):
                await stream.wait()
            await write(out, 0, 1, 2)
        await producer.wait(await out.commit(), timeout=60)

    run(test)


def test_a_cancelled_writer_leaves_no_copy_behind(run: Callable[[Test], None]) -> None:
    """Its memory is not given back while a thread still copies to it."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        copier = use_copier(BlockingCopier(), producer.link)

        async def send() -> None:
            async with producer.stream_put(THREE.make()) as out:
                await write(out, 0)

        sending = asyncio.ensure_future(send())
        await entered(copier)
        sending.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert producer.stats()["memory"]["used"] > 0
        copier.open.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await freed(producer)
        with pytest.raises(TransferFailed, match="Cancelled"):
            await consumer.get("s", timeout=60)

    run(test)


def test_a_writer_cancelled_before_it_began(run: Callable[[Test], None]) -> None:
    """It waits for memory; the call is cancelled before the memory is free."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        big = Recipe("big", layers=1, tokens=3 << 10, heads=1, dim=512)
        await producer.put(big.make())
        held = await consumer.get("big", timeout=60)
        plan = Recipe("s", layers=1, tokens=3 << 10, heads=1, dim=512).make()
        out = producer.stream_put(plan, timeout=60)
        entering = asyncio.ensure_future(out.__aenter__())
        while producer.stats()["transfers"]["live"] != 2:  # noqa: ASYNC110 - polls a counter
            await asyncio.sleep(0.002)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        held.release()
        del held
        await freed(producer)
        with pytest.raises(TransferFailed, match="cancelled"):
            await consumer.get("s", timeout=60)

    run(test)
