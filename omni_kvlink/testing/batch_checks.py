"""Checks of `put_many` and `get_many`: all or none, in order, over every connector."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

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
from omni_kvlink.testing.caches import MIB, Recipe, fill, fingerprint, sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    expect,
    receive,
    until,
    until_disconnected,
    until_requested,
    wait_all,
)
from omni_kvlink.testing.tampering import TamperingCopier, do_nothing, flip_bit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVProducer, Payload
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

RECIPES = (
    Recipe("a", seed=1),
    Recipe("b", seed=2, bundle=True),
    Recipe("c", seed=3, tensors=True),
    Recipe("d", seed=4, layers=4, tokens=1000),
    Recipe("e", seed=5, tokens=0),
)
KEYS = [recipe.key for recipe in RECIPES]


def make_all() -> list[Payload]:
    """The payloads of `RECIPES`."""
    return [recipe.make() for recipe in RECIPES]


EXPECTED = list(map(fingerprint, make_all()))
"""Result of `get_many` of `KEYS` in the peer."""


def is_unused(producer: KVProducer) -> bool:
    """Whether there is no payload, and no memory in use."""
    stats = producer.stats()
    return not stats["transfers"]["live"] and not stats["memory"]["used"]


def receive_all(reader: RemoteLink, receipts: Iterable[Receipt]) -> None:
    """Let a reader get the payloads of `RECIPES`: they are delivered."""
    assert reader.call("get_many", keys=KEYS, timeout=60) == EXPECTED
    wait_all(receipts)


def check_many_are_received_in_order(rig: Rig) -> None:
    """Several payloads of every kind, put and got together; each releases its own memory."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    receipts = producer.put_many(make_all(), readers=2)
    assert [receipt.key for receipt in receipts] == KEYS
    assert [receipt.ledger.copies for receipt in receipts] == [1, 1, 1, 1, 0]
    assert reader.call("get_many", keys=KEYS, timeout=60) == EXPECTED
    batch = consumer.get_many(tuple(reversed(KEYS)), timeout=60, verify="full")
    assert len(batch) == len(KEYS)
    assert [received.data.request_id for received in batch[:2]] == ["e", "d"]
    with batch as data:
        assert list(map(fingerprint, reversed(data))) == EXPECTED
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
    first, second = (consumer.begin_get_many(keys, timeout=60) for keys in (KEYS[:2], KEYS[2:]))
    until_requested(producer, len(KEYS))
    assert not first.is_done
    receipts = producer.put_many(make_all())
    until(lambda: first.is_done and second.is_done, "all are here")
    with first.wait(timeout=0.0) as data, second.wait(timeout=0.0) as second_data:
        assert list(map(fingerprint, [*data, *second_data])) == EXPECTED
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
        assert list(map(fingerprint, data)) == EXPECTED
    del data
    wait_all(receipts)


def check_many_for_readers_that_wait(rig: Rig) -> None:
    """Requested before they are put, together or one by one; and put one by one."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    for is_batched in (True, False):
        waiting = reader.submit("get_many", keys=KEYS, timeout=PATIENCE, verify="off")
        until_requested(producer, len(KEYS))
        payloads = make_all()
        receipts = producer.put_many(payloads) if is_batched else list(map(producer.put, payloads))
        assert waiting.result(PATIENCE) == EXPECTED
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
    receive(reader, first, Recipe("c").make())
    twice = [Recipe("a").make(), Recipe("a").make()]
    expect(DuplicateKeyError, producer.put_many, twice, mentions=("same request id",))
    large = [*make_all(), sized("large", 5 * MIB).make()]
    error = expect(CapacityError, producer.put_many, large, timeout=PATIENCE, mentions=("6 pay",))
    assert error.requested > 5 * MIB >= error.free
    expect(SchemaError, producer.put_many, make_all(), readers=0)
    expect(SchemaError, producer.put_many, make_all(), ttl=0.0)
    expect(SchemaError, producer.put_many, make_all(), timeout=-1.0)
    assert is_unused(producer), producer.stats()
    receive_all(reader, producer.put_many(make_all()))


def check_an_abort_among_many(rig: Rig) -> None:
    """An abort, or an error, while one is copied: none is published, and readers learn of it."""
    copier = TamperingCopier()
    producer, reader = rig.serve(copier=copier), rig.connect()

    def abort_or_fail(manifest: Manifest, _: Region) -> None:
        if manifest.request_id == "d":
            if waiting.done():
                raise RuntimeError("a copy failed")
            producer.abort("b", "no longer needed")

    copier.tamper = abort_or_fail
    waiting = reader.submit("get_many", keys=["b", "a"], timeout=PATIENCE)
    until_requested(producer, 2)
    expect(TransferFailed, producer.put_many, make_all(), mentions=("'b'", "no longer needed"))
    expect(TransferFailed, waiting.result, PATIENCE, mentions=("no longer needed",))
    until(lambda: is_unused(producer), "nothing is left")
    expect(RuntimeError, producer.put_many, make_all(), mentions=("a copy failed",))
    assert is_unused(producer), producer.stats()
    copier.tamper = do_nothing
    receive_all(reader, producer.put_many(make_all()))


def check_one_that_cannot_be_had(rig: Rig) -> None:
    """`get_many` raises the error of that one; the others go to the next reader."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    receipts = producer.put_many(make_all())
    get = partial(consumer.get_many, [*KEYS, "missing"])
    expect(TransferTimeout, get, timeout=0.3, mentions=("'missing'", "not announced"))
    producer.fail("missing", "it was not computed")
    expect(TransferFailed, get, timeout=60, mentions=("it was not computed",))
    expect(SchemaError, consumer.get_many, "abc", timeout=60, mentions=("list of request ids",))
    expect(SchemaError, consumer.get_many, KEYS, timeout=60, verify="maybe")
    until_requested(producer, 0)
    receive_all(reader, receipts)


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
    halves = payloads[:3], payloads[3:]

    def receive_half(half: list[Payload]) -> None:
        keys = [payload.request_id for payload in half]
        digests = reader.call("get_many", keys=keys, timeout=60)
        assert digests == list(map(fingerprint, half))

    with ThreadPoolExecutor(2) as pool:
        putting = [pool.submit(producer.put_many, half, timeout=PATIENCE) for half in halves]
        until(lambda: any(future.done() for future in putting), "one of them has its memory")
        for half in halves if putting[0].done() else reversed(halves):
            receive_half(half)
        for future in putting:
            wait_all(future.result(PATIENCE))
    held = producer.put_many(halves[0])
    larger = [*halves[1], sized("z", 600 << 10).make()]
    error = expect(CapacityError, producer.put_many, larger, timeout=0.3)
    assert error.requested > 600 << 10
    receive_half(halves[0])
    wait_all(held)
    receipts = producer.put_many(larger, timeout=60)
    receive_half(larger)
    wait_all(receipts)


def check_allocated_memory_among_many(rig: Rig) -> None:
    """Tensors in memory that `allocate` gave are not copied."""
    producer, reader = rig.serve(), rig.connect()
    own = Recipe("own", tokens=50).make()
    allocation = producer.allocate(own)
    fill(allocation, own)
    payloads = [Recipe("a").make(), allocation.data, Recipe("b").make()]
    expected = [fingerprint(payload) for payload in payloads]
    receipts = producer.put_many(payloads)
    assert [receipt.ledger.copies for receipt in receipts] == [1, 0, 1]
    assert allocation.is_spent
    del payloads
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
