"""Checks of `put_many` and `get_many`: all or none, in order, over every connector."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    DuplicateKeyError,
    IntegrityError,
    PeerLostError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.memory_checks import TamperingCopier, do_nothing, flip_bit, sized
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import (
    Rig,
    expect,
    receive,
    until,
    until_disconnected,
    until_requested,
    wait_all,
)

if TYPE_CHECKING:
    from omni_kvlink.link import KVProducer, Payload
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

MIB = 1 << 20
RECIPES = (
    Recipe("a", seed=1),
    Recipe("b", seed=2, bundle=True),
    Recipe("c", seed=3, tensors=True),
    Recipe("d", seed=4, layers=4, tokens=1000),
    Recipe("e", seed=5, tokens=0),
)
KEYS = [recipe.key for recipe in RECIPES]
HALVES = slice(2), slice(2, None)


def make_all() -> list[Payload]:
    """The payloads of `RECIPES`."""
    return [recipe.make() for recipe in RECIPES]


def is_unused(producer: KVProducer) -> bool:
    """Whether there is no payload, and no memory in use."""
    stats = producer.stats()
    return not stats["transfers"]["live"] and not stats["memory"]["used"]


def check_many_are_received_in_order(rig: Rig) -> None:
    """Several payloads of every kind, put and got together; each releases its own memory."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    payloads = make_all()
    expected = list(map(fingerprint, payloads))
    receipts = producer.put_many(payloads, readers=2)
    assert [receipt.key for receipt in receipts] == KEYS
    assert [receipt.ledger.copies for receipt in receipts] == [1, 1, 1, 1, 0]
    assert reader.call("get_many", keys=KEYS, timeout=60) == expected
    batch = consumer.get_many(tuple(reversed(KEYS)), timeout=60, verify="full")
    assert len(batch) == len(KEYS)
    assert [received.data.request_id for received in batch[:2]] == ["e", "d"]
    with batch as data:
        assert list(map(fingerprint, reversed(data))) == expected
        batch[1].release()
        receipts[3].wait(timeout=60)
        assert not receipts[0].done
    del data, batch
    wait_all(receipts)
    assert producer.put_many([]) == []
    assert not consumer.get_many([], timeout=60)


def check_many_are_requested_ahead(rig: Rig) -> None:
    """Requested while another batch is read; waited for once; others receive what was cancelled."""
    producer, consumer = rig.serve(), rig.connect_here()
    expected = list(map(fingerprint, make_all()))
    first, second = (consumer.begin_get_many(KEYS[half], timeout=60) for half in HALVES)
    until_requested(producer, len(KEYS))
    assert not first.is_done
    receipts = producer.put_many(make_all())
    until(lambda: first.is_done and second.is_done, "all are here")
    with first.wait(timeout=0.0) as data, second.wait(timeout=0.0) as second_data:
        assert list(map(fingerprint, [*data, *second_data])) == expected
    del data, second_data
    wait_all(receipts)
    expect(ClosedError, first.wait, timeout=60, mentions=("request it again",))
    pending, cancelled = (consumer.begin_get_many([*KEYS, "missing"], timeout=60) for _ in range(2))
    until_requested(producer, 2 * len(KEYS) + 2)
    expect(TransferTimeout, pending.wait, timeout=0.1, mentions=("'a'", "delivered"))
    cancelled.cancel()
    cancelled.cancel()
    expect(ClosedError, cancelled.wait, timeout=0.0)
    until_requested(producer, 0)
    receipts = producer.put_many(make_all())
    arrived = consumer.begin_get_many(KEYS, timeout=60)
    until(lambda: arrived.is_done, "all are here")
    expect(SchemaError, arrived.wait, timeout=-1.0)
    arrived.cancel()
    with consumer.get_many(KEYS, timeout=60) as data:
        assert list(map(fingerprint, data)) == expected
    del data
    wait_all(receipts)


def check_many_for_readers_that_wait(rig: Rig) -> None:
    """Requested before they are put, together or one by one; and put one by one."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    expected = list(map(fingerprint, make_all()))
    for is_batched in (True, False):
        waiting = reader.submit("get_many", keys=KEYS, timeout=PATIENCE, verify="off")
        until_requested(producer, len(KEYS))
        payloads = make_all()
        receipts = producer.put_many(payloads) if is_batched else list(map(producer.put, payloads))
        assert waiting.result(PATIENCE) == expected
        wait_all(receipts)
    receipts = producer.put_many(make_all())
    for receipt, payload in zip(receipts, make_all(), strict=True):
        receive(consumer, receipt, payload)


def check_more_than_one_message_holds(rig: Rig) -> None:
    """Hundreds of payloads, with long request ids, in one call."""
    producer, reader = rig.serve(quota=32 * MIB), rig.connect()
    recipes = [Recipe(f"{number} {'é' * 400}", seed=number, tokens=1) for number in range(600)]
    keys, payloads = [recipe.key for recipe in recipes], [recipe.make() for recipe in recipes]
    waiting = reader.submit("get_many", keys=keys, timeout=PATIENCE)
    receipts = producer.put_many(payloads, timeout=60)
    assert waiting.result(PATIENCE) == list(map(fingerprint, payloads))
    wait_all(receipts)


def check_many_or_none(rig: Rig) -> None:
    """A payload that cannot be put leaves none of the others behind, and their keys free."""
    producer, reader = rig.serve(quota=4 * MIB), rig.connect()
    first = producer.put(Recipe("c").make())
    expect(DuplicateKeyError, producer.put_many, make_all(), mentions=("'c'",))
    assert reader.call("get", key="c", timeout=60) == fingerprint(Recipe("c").make())
    first.wait(timeout=60)
    twice = [Recipe("a").make(), Recipe("a").make()]
    expect(DuplicateKeyError, producer.put_many, twice, mentions=("same request id",))
    large = [*make_all(), sized("large", 5 * MIB).make()]
    error = expect(CapacityError, producer.put_many, large, timeout=PATIENCE, mentions=("6 pay",))
    assert error.requested > 5 * MIB >= error.free
    expect(SchemaError, producer.put_many, make_all(), readers=0)
    expect(SchemaError, producer.put_many, make_all(), ttl=0.0)
    expect(SchemaError, producer.put_many, make_all(), timeout=-1.0)
    assert is_unused(producer), producer.stats()
    receipts = producer.put_many(make_all())
    assert reader.call("get_many", keys=KEYS, timeout=60) == list(map(fingerprint, make_all()))
    wait_all(receipts)


def fail() -> None:
    """Fail, as a copy may."""
    raise RuntimeError("a copy failed")


def check_an_abort_among_many(rig: Rig) -> None:
    """An abort, or an error, while one is copied: none is published, and readers learn of it."""
    copier = TamperingCopier()
    producer, reader = rig.serve(copier=copier), rig.connect()
    act = partial(producer.abort, "b", "no longer needed")
    copier.tamper = lambda manifest, _: act() if manifest.request_id == "d" else None
    waiting = reader.submit("get_many", keys=["b", "a"], timeout=PATIENCE)
    until_requested(producer, 2)
    expect(TransferFailed, producer.put_many, make_all(), mentions=("'b'", "no longer needed"))
    expect(TransferFailed, waiting.result, PATIENCE, mentions=("no longer needed",))
    until(lambda: is_unused(producer), "nothing is left")
    act = partial(fail)
    expect(RuntimeError, producer.put_many, make_all(), mentions=("a copy failed",))
    assert is_unused(producer), producer.stats()
    copier.tamper = do_nothing
    receipts = producer.put_many(make_all())
    assert reader.call("get_many", keys=KEYS, timeout=60) == list(map(fingerprint, make_all()))
    wait_all(receipts)


def check_one_that_cannot_be_had(rig: Rig) -> None:
    """`get_many` raises the error of that one; the others go to the next reader."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    receipts = producer.put_many(make_all())
    keys = [*KEYS, "missing"]
    expect(
        TransferTimeout,
        consumer.get_many,
        keys,
        timeout=0.3,
        mentions=("'missing'", "not announced"),
    )
    producer.fail("missing", "it was not computed")
    expect(TransferFailed, consumer.get_many, keys, timeout=60, mentions=("it was not computed",))
    expect(SchemaError, consumer.get_many, "abc", timeout=60, mentions=("list of request ids",))
    expect(SchemaError, consumer.get_many, KEYS, timeout=60, verify="maybe")
    until_requested(producer, 0)
    assert reader.call("get_many", keys=KEYS, timeout=60) == list(map(fingerprint, make_all()))
    wait_all(receipts)


def check_a_wrong_byte_among_many(rig: Rig) -> None:
    """The one with the wrong byte is rejected; the others go to the next reader."""
    copier = TamperingCopier()
    producer, consumer, reader = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    good, bad = Recipe("good").make(), Recipe("bad").make()

    def tamper(manifest: Manifest, region: Region) -> None:
        if manifest.request_id == "bad":
            flip_bit(manifest.tensors[0].name, 0, manifest, region)

    copier.tamper = tamper
    receipts = producer.put_many([good, bad])
    expect(IntegrityError, consumer.get_many, ["good", "bad"], timeout=60, verify="full")
    expect(TransferFailed, receipts[1].wait, timeout=60, mentions=("rejected",))
    assert reader.call("get_many", keys=["good"], timeout=60) == [fingerprint(good)]
    receipts[0].wait(timeout=60)


def check_many_wait_for_memory(rig: Rig) -> None:
    """Two calls that together need more than the quota finish both, one after the other."""
    producer, reader = rig.serve(quota=3 * MIB), rig.connect()
    recipes = [sized(f"{name}{n}", 600 << 10, seed=n) for name in "xy" for n in range(3)]
    payloads = [recipe.make() for recipe in recipes]
    keys = [recipe.key for recipe in recipes]
    with ThreadPoolExecutor(2) as pool:
        putting = [
            pool.submit(producer.put_many, payloads[part : part + 3], timeout=PATIENCE)
            for part in (0, 3)
        ]
        until(lambda: any(future.done() for future in putting), "one of them has its memory")
        first = 0 if putting[0].done() else 3
        for part in (first, 3 - first):
            digests = reader.call("get_many", keys=keys[part : part + 3], timeout=60)
            assert digests == list(map(fingerprint, payloads[part : part + 3]))
        for future in putting:
            wait_all(future.result(PATIENCE))
    held = producer.put_many(payloads[:3])
    last_payloads = [*payloads[3:], sized("z", 600 << 10).make()]
    error = expect(CapacityError, producer.put_many, last_payloads, timeout=0.3)
    assert error.requested > 600 << 10
    assert reader.call("get_many", keys=keys[:3], timeout=60)
    wait_all(held)
    last_receipts = producer.put_many(last_payloads, timeout=60)
    assert reader.call("get_many", keys=[*keys[3:], "z"], timeout=60)
    wait_all(last_receipts)


def check_allocated_memory_among_many(rig: Rig) -> None:
    """Tensors in memory that `allocate` gave are not copied."""
    producer, reader = rig.serve(), rig.connect()
    recipe = Recipe("own", tokens=50)
    allocation = producer.allocate(recipe.make())
    for tensor, value in zip(allocation.data.tensors(), recipe.make().tensors(), strict=True):
        tensor.copy_(value)  # type: ignore[union-attr, arg-type]
    payloads = [Recipe("a").make(), allocation.data, Recipe("b").make()]
    expected = [fingerprint(payload) for payload in payloads]
    receipts = producer.put_many(payloads)
    assert [receipt.ledger.copies for receipt in receipts] == [1, 0, 1]
    assert allocation.is_spent
    del payloads, tensor
    assert reader.call("get_many", keys=["a", "own", "b"], timeout=60) == expected
    wait_all(receipts)


def check_many_end_with_their_link(rig: Rig) -> None:
    """A producer that closes ends a `get_many` that waits; what it put is lost, and says so."""
    producer, reader = rig.serve(), rig.connect()
    waiting = reader.submit("get_many", keys=[*KEYS, "missing"], timeout=PATIENCE)
    until_requested(producer, len(KEYS) + 1)
    receipts = producer.put_many(make_all())
    producer.close()
    expect(PeerLostError, waiting.result, PATIENCE)
    until_disconnected(reader)
    for receipt in receipts:
        expect(TransferFailed, receipt.wait, timeout=60)


def check_many_by_asyncio(rig: Rig) -> None:
    """By the links of `omni_kvlink.aio`; a task that is cancelled gives all back."""
    expected = list(map(fingerprint, make_all()))

    async def transfer() -> None:
        async with (
            await AsyncKVLink.serve(rig.url, **rig.options) as producer,
            await AsyncKVLink.connect(rig.url, timeout=60, **rig.options) as consumer,
        ):
            missing = asyncio.ensure_future(consumer.get_many([*KEYS, "missing"], timeout=PATIENCE))
            receipts = await producer.put_many(make_all())
            await asyncio.to_thread(until_requested, producer.link, len(KEYS) + 1)
            missing.cancel()
            await asyncio.wait([missing])
            assert missing.cancelled()
            with await consumer.get_many(KEYS, timeout=60, verify="full") as data:
                assert list(map(fingerprint, data)) == expected
            del data
            for receipt in receipts:
                await producer.wait(receipt, timeout=60)

    asyncio.run(transfer())
