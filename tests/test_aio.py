"""`AsyncKVLink`: nothing waits in a thread, and a cancelled get takes nothing with it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_kvlink import ClosedError, IntegrityError, PeerLostError, TransferFailed, TransferTimeout
from omni_kvlink.aio import AsyncKVLink, AsyncPutStream
from omni_kvlink.aio.link import _Verifying
from omni_kvlink.copier import TorchCopier
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.scatter_checks import FlippingCopier

pytestmark = pytest.mark.usefixtures("leaves_nothing")
_numbers = itertools.count()
Ends = tuple[AsyncKVLink, AsyncKVLink]
Test = Callable[[AsyncKVLink, AsyncKVLink], Awaitable[None]]


@pytest.fixture(params=["inproc", "shm"])
def run(request: pytest.FixtureRequest, sockets: str) -> Callable[[Test], None]:
    """Run a coroutine function with both ends of a link."""

    @asynccontextmanager
    async def ends() -> AsyncIterator[Ends]:
        url = f"{request.param}://aio-{next(_numbers)}"
        options: dict[str, Any] = {"directory": sockets, "quota": 8 << 20}
        async with (
            await AsyncKVLink.serve(url, **options) as producer,
            await AsyncKVLink.connect(url, timeout=5, **options) as consumer,
        ):
            yield producer, consumer

    def run(test: Test) -> None:
        async def whole() -> None:
            async with ends() as (producer, consumer):
                await test(producer, consumer)

        asyncio.run(whole())

    return run


async def waiting(producer: AsyncKVLink, number: int) -> None:
    """Until so many gets wait at the producer."""
    deadline = time.monotonic() + 5
    while producer.stats()["transfers"]["waiting"] != number:
        assert time.monotonic() < deadline, producer.stats()
        await asyncio.sleep(0.002)


async def freed(producer: AsyncKVLink) -> None:
    """Until no byte of the producer's memory is taken."""
    deadline = time.monotonic() + 5
    while producer.stats()["memory"]["used"]:
        assert time.monotonic() < deadline, producer.stats()
        await asyncio.sleep(0.002)


def test_round_trip(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        data = Recipe("k", bundle=True).make()
        receipt = await producer.put(data)
        with await consumer.get("k", timeout=5, verify="full") as found:
            assert fingerprint(found) == fingerprint(data)
        del found
        await producer.wait(receipt, timeout=5)
        assert receipt.state == "released"

    run(test)


def test_waiting_gets_hold_no_threads(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        gets = [asyncio.ensure_future(consumer.get(f"k{n}", timeout=20)) for n in range(100)]
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
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=1))
        longest, last = 0.0, time.monotonic()
        while not get.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert longest < 0.5
        with pytest.raises(TransferTimeout):
            await get

    run(test)


def test_timeout(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match="never announced"):
            await consumer.get("k", timeout=0.2)
        assert 0.19 < time.monotonic() - started < 0.45
        await waiting(producer, 0)

    run(test)


def test_cancelled_get_is_withdrawn(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=20))
        await waiting(producer, 1)
        get.cancel()
        with pytest.raises(asyncio.CancelledError):
            await get
        await waiting(producer, 0)
        receipt = await producer.put(Recipe("k").make())
        assert receipt.state == "committed"
        (await consumer.get("k", timeout=5)).release()
        await producer.wait(receipt, timeout=5)

    run(test)


def test_cancelled_at_any_moment_loses_nothing(run: Callable[[Test], None]) -> None:
    """Whatever the cancellation meets (the asking, the waiting, the answer), nothing is kept."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        for turn in range(60):
            key = f"k{turn}"
            get = asyncio.ensure_future(consumer.get(key, timeout=20))
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
                (await consumer.get(key, timeout=5)).release()
            await producer.wait(receipt, timeout=5)
        await waiting(producer, 0)
        assert producer.stats()["memory"]["used"] == 0

    run(test)


def test_wait_for_gives_up_cleanly(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(consumer.get("k", timeout=20), 0.1)
        await waiting(producer, 0)

    run(test)


def test_failures_arrive(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        first = asyncio.ensure_future(consumer.get("a", timeout=20))
        second = asyncio.ensure_future(consumer.get("b", timeout=20))
        third = asyncio.ensure_future(consumer.get("c", timeout=20))
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
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        get = asyncio.ensure_future(consumer.get("k", timeout=20))
        await waiting(producer, 1)
        await consumer.close()
        with pytest.raises(ClosedError):
            await get

    run(test)


def test_deadlines_while_the_producer_is_gone(run: Callable[[Test], None]) -> None:
    """More gets than the pool has threads: each one's deadline holds all the same."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        await producer.close()
        while consumer.stats()["connected"]:
            await asyncio.sleep(0.002)
        started = time.monotonic()
        gets = [consumer.get(f"k{n}", timeout=0.4) for n in range(60)]
        for found in await asyncio.gather(*gets, return_exceptions=True):
            assert isinstance(found, (PeerLostError, TransferTimeout)), found
        assert time.monotonic() - started < 0.4 + 0.25

    run(test)


def test_many_readers_of_one_key(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        gets = [asyncio.ensure_future(consumer.get("k", timeout=20)) for _ in range(30)]
        await waiting(producer, 30)
        receipt = await producer.put(Recipe("k").make(), readers=30)
        for get in gets:
            (await get).release()
        await producer.wait(receipt, timeout=5)

    run(test)


# Streams


THREE = Recipe("s", layers=3)


async def write(out: AsyncPutStream, *layers: int) -> None:
    places = layers_of(THREE.make())
    for layer in layers:
        await out.write_layer(layer, *places["kv", layer])


def test_stream_round_trip(run: Callable[[Test], None]) -> None:
    """Each layer is there before the next one is written."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        data = Recipe("s", bundle=True, layers=3).make()
        async with producer.stream_put(data) as out:
            stream = await consumer.stream_get("s", timeout=5)
            layers = layers_of(data)
            assert len(stream) == len(layers)
            seen = stream.__aiter__()
            for (branch, layer), places in layers.items():
                coming = asyncio.ensure_future(seen.__anext__())
                await asyncio.sleep(0)
                assert not coming.done()
                await out.write_layer(layer, *places, branch=branch)
                found = await coming
                assert (found.branch, found.index) == (branch, layer)
                assert hash_tensors(found.tensors) == hash_tensors(places)
                del found, coming
        assert fingerprint(await stream.wait()) == fingerprint(data)
        stream.release()
        await producer.wait(await out.commit(), timeout=5)

    run(test)


def test_stream_of_a_plain_put(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        asking = asyncio.ensure_future(consumer.stream_get("s", timeout=20))
        await waiting(producer, 1)
        receipt = await producer.put(THREE.make())
        with await asking as stream:
            assert [layer.index async for layer in stream] == [0, 1, 2]
            assert fingerprint(await stream.wait(timeout=0)) == fingerprint(THREE.make())
        await producer.wait(receipt, timeout=5)

    run(test)


def test_waiting_for_layers_holds_no_threads(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=20) as stream:
                waits = [asyncio.ensure_future(stream.wait_for_layer(n % 3)) for n in range(90)]
                waits.append(asyncio.ensure_future(stream.wait()))  # type: ignore[arg-type]
                await asyncio.sleep(0)
                before = threading.active_count()
                assert before < 20
                await write(out, 2, 1, 0)
                await out.commit()
                for wait in waits:
                    await wait
                del waits, wait

    run(test)


def test_cancelled_wait_takes_nothing(run: Callable[[Test], None]) -> None:
    """The stream goes on, and nothing of the wait is left."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=20) as stream:
                for call in (stream.wait_for_layer(0), stream.wait()):
                    wait = asyncio.ensure_future(call)  # type: ignore[arg-type]
                    for _ in range(3):
                        await asyncio.sleep(0)
                    wait.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await wait
                assert stream.stream.delivery.progress is not None
                assert not stream.stream.delivery.progress._waiting
                await write(out, 0, 1, 2)
                assert [layer.index async for layer in stream] == [0, 1, 2]
        await producer.wait(await out.commit(), timeout=5)

    run(test)


def test_layer_timeout(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        async with producer.stream_put(THREE.make()) as out:
            with await consumer.stream_get("s", timeout=0.2) as stream:
                for timeout in (None, 0.1, 0.0):
                    started = time.monotonic()
                    with pytest.raises(TransferTimeout, match="layer 1 of branch 'kv'"):
                        await stream.wait_for_layer(1, timeout=timeout)
                    wanted = 0.2 if timeout is None else timeout
                    assert wanted - 0.01 < time.monotonic() - started < wanted + 0.25
                with pytest.raises(TransferTimeout, match="commit"):
                    await stream.wait(timeout=0.0)
                await write(out, 1)
                assert (await stream.wait_for_layer(1, timeout=5)).index == 1
                await write(out, 0, 2)

    run(test)


def test_cancelled_stream_get_is_withdrawn(run: Callable[[Test], None]) -> None:
    """Also when the offer has just come: another reader has the stream, and all of it."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        for turn in range(20):
            asking = asyncio.ensure_future(consumer.stream_get("s", timeout=20))
            if turn % 2:
                await waiting(producer, 1)
            async with producer.stream_put(THREE.make()) as out:
                await write(out, 0)
                for _ in range(turn % 5):
                    await asyncio.sleep(0)
                asking.cancel()
                try:
                    stream = await asking
                except asyncio.CancelledError:
                    stream = await consumer.stream_get("s", timeout=5)
                with stream:
                    await stream.wait_for_layer(0, timeout=5)
                await write(out, 1, 2)
            await producer.wait(await out.commit(), timeout=5)
        await waiting(producer, 0)

    run(test)


def test_a_failing_writer(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        out = await producer.stream_put(THREE.make()).__aenter__()
        stream = await consumer.stream_get("s", timeout=20)
        await write(out, 0)
        layer = asyncio.ensure_future(stream.wait_for_layer(1))
        whole = asyncio.ensure_future(stream.wait())
        assert not await out.__aexit__(ZeroDivisionError, ZeroDivisionError("by"), None)
        for future in (layer, whole):
            with pytest.raises(TransferFailed, match=r"layer 1 of branch 'kv'.*ZeroDivision"):
                await future
        stream.release()

    run(test)


def test_close_ends_a_stream(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        out = await producer.stream_put(THREE.make()).__aenter__()
        stream = await consumer.stream_get("s", timeout=20)
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
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        async with producer.stream_put(THREE.make()) as out:
            stream = await consumer.stream_get("s", timeout=20)
            layer = asyncio.ensure_future(stream.wait_for_layer(1))
            await asyncio.sleep(0)
            stream.release()
            with pytest.raises(ClosedError, match="layer 1"):
                await layer
            with pytest.raises(ClosedError):
                await stream.wait()
            await write(out, 0, 1, 2)
        await producer.wait(await out.commit(), timeout=5)

    run(test)


class Gate(TorchCopier):
    """Copies and hashes when it is let."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def _pass(self) -> None:
        self.entered.set()
        assert self.open.wait(10), "nobody opened: the event loop stood still"

    def gather(self, *args: Any) -> list[str]:
        self._pass()
        return super().gather(*args)

    def verify(self, *args: Any) -> None:
        self._pass()
        super().verify(*args)


async def entered(gate: Gate) -> None:
    deadline = time.monotonic() + 5
    while not gate.entered.is_set():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_a_cancelled_writer_leaves_no_copy_behind(run: Callable[[Test], None]) -> None:
    """Its memory is not given back while a thread still copies to it."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        gate = producer.link._copier = Gate()

        async def send() -> None:
            async with producer.stream_put(THREE.make()) as out:
                await write(out, 0)

        sending = asyncio.ensure_future(send())
        await entered(gate)
        sending.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert producer.stats()["memory"]["used"] > 0
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await freed(producer)
        with pytest.raises(TransferFailed, match="Cancelled"):
            await consumer.get("s", timeout=5)

    run(test)


def test_a_writer_cancelled_before_it_began(run: Callable[[Test], None]) -> None:
    """It waits for room; when it gets it, nobody wants it any more."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        big = Recipe("big", layers=1, tokens=3 << 10, heads=1, dim=512)
        await producer.put(big.make())
        held = await consumer.get("big", timeout=5)
        plan = Recipe("s", layers=1, tokens=3 << 10, heads=1, dim=512).make()
        out = producer.stream_put(plan, timeout=20)
        entering = asyncio.ensure_future(out.__aenter__())
        while producer.stats()["transfers"]["live"] != 2:
            await asyncio.sleep(0.002)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        held.release()
        del held
        await freed(producer)
        with pytest.raises(TransferFailed, match="cancelled"):
            await consumer.get("s", timeout=5)

    run(test)


# Full verification


def test_hashing_does_not_stop_the_event_loop(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        gate = consumer.link._copier = Gate()
        receipt = await producer.put(THREE.make())
        getting = asyncio.ensure_future(consumer.get("s", timeout=20, verify="full"))
        await entered(gate)
        gate.open.set()
        with await getting as found:
            assert fingerprint(found) == fingerprint(THREE.make())
        del found, getting
        await producer.wait(receipt, timeout=5)

    run(test)


def test_cancelled_while_hashing(run: Callable[[Test], None]) -> None:
    """The payload goes to another reader, when the hashing is over."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        gate = consumer.link._copier = Gate()
        receipt = await producer.put(THREE.make())
        getting = asyncio.ensure_future(consumer.get("s", timeout=20, verify="full"))
        await entered(gate)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert receipt.state == "leased"
        gate.open.set()
        (await consumer.get("s", timeout=5)).release()
        await producer.wait(receipt, timeout=5)
        assert producer.stats()["transfers"]["redelivered"] == 1

    run(test)


def test_hashing_finds_a_flipped_bit(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        spoiler = producer.link._copier = FlippingCopier()
        spoiler.flip = "kv.2.value"
        receipt = await producer.put(THREE.make())
        with pytest.raises(IntegrityError, match="layer 2, V"):
            await consumer.get("s", timeout=5, verify="full")
        with pytest.raises(TransferFailed, match="rejected"):
            await producer.wait(receipt, timeout=5)
        await freed(producer)

    run(test)


def test_cancelled_before_the_hashing_began(run: Callable[[Test], None]) -> None:
    """All threads are busy: the payload goes back at once, and is not hashed afterwards."""

    async def test(producer: AsyncKVLink, consumer: AsyncKVLink) -> None:
        receipt = await producer.put(THREE.make())
        received = await consumer.get("s", timeout=5)
        busy = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocked = asyncio.ensure_future(asyncio.to_thread(busy.wait, 10))
        verifying = asyncio.ensure_future(_Verifying(received).done())
        for _ in range(3):
            await asyncio.sleep(0)
        verifying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await verifying
        while producer.stats()["transfers"]["redelivered"] != 1:
            await asyncio.sleep(0.002)
        busy.set()
        assert await blocked
        (await consumer.get("s", timeout=5)).release()
        await producer.wait(receipt, timeout=5)
        assert "verify" not in received.ledger.seconds

    run(test)
