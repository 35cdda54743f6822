"""`AsyncKVLink.get(verify="full")`: hashing stops neither the event loop nor a cancellation."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from omni_kvlink import IntegrityError, TransferFailed
from omni_kvlink.aio import consumer as aio_consumer
from omni_kvlink.aio.consumer import _InThread
from omni_kvlink.aio.end import run_in_thread
from omni_kvlink.link import verify_first
from omni_kvlink.testing.caches import fingerprint
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit
from support.link.aio_ends import THREE, BlockingCopier, Test, entered, freed
from support.link.ends import use_copier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_hashing_does_not_stop_the_event_loop(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        copier = use_copier(BlockingCopier(), consumer.link)
        receipt = await producer.put(THREE.make())
        getting = asyncio.ensure_future(consumer.get("s", timeout=60, verify="full"))
        await entered(copier)
        copier.open.set()
        with await getting as found:
            assert fingerprint(found) == fingerprint(THREE.make())
        del found, getting
        await producer.wait(receipt, timeout=60)

    run(test)


def test_cancelled_while_hashing(run: Callable[[Test], None]) -> None:
    """The payload goes to another reader, when the hashing is over."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        copier = use_copier(BlockingCopier(), consumer.link)
        receipt = await producer.put(THREE.make())
        getting = asyncio.ensure_future(consumer.get("s", timeout=60, verify="full"))
        await entered(copier)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert receipt.state == "leased"
        copier.open.set()
        (await consumer.get("s", timeout=60)).release()
        await producer.wait(receipt, timeout=60)
        assert producer.stats()["transfers"]["redelivered"] == 1

    run(test)


def test_hashing_finds_a_flipped_bit(run: Callable[[Test], None]) -> None:
    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        copier = use_copier(TamperingCopier(), producer.link)
        copier.tamper = partial(flip_bit, "kv.2.value", -1)
        receipt = await producer.put(THREE.make())
        with pytest.raises(IntegrityError, match="layer 2, V"):
            await consumer.get("s", timeout=60, verify="full")
        with pytest.raises(TransferFailed, match="rejected"):
            await producer.wait(receipt, timeout=60)
        await freed(producer)

    run(test)


def test_cancelled_before_the_hashing_began(
    run: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payload goes back at once, and is not hashed when its thread runs at last."""

    async def test(producer: AsyncKVProducer, consumer: AsyncKVConsumer) -> None:
        receipt = await producer.put(THREE.make())
        received = await consumer.get("s", timeout=60)
        busy = threading.Event()

        def late(call: Callable[[], object]) -> Awaitable[object]:
            return run_in_thread(lambda: (busy.wait(60), call()))

        monkeypatch.setattr(aio_consumer, "run_in_thread", late)
        verifying = asyncio.ensure_future(
            _InThread(partial(verify_first, received), received).run()
        )
        for _ in range(3):
            await asyncio.sleep(0)
        verifying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await verifying
        while producer.stats()["transfers"]["redelivered"] != 1:  # noqa: ASYNC110 - polls a counter
            await asyncio.sleep(0.002)
        busy.set()
        (await consumer.get("s", timeout=60)).release()
        await producer.wait(receipt, timeout=60)
        assert "verify" not in received.ledger.seconds

    run(test)
