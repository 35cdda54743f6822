"""Checks of kept payloads: any number of readers, withdrawn or evicted, over every connector."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from omni_kvlink.errors import (
    CapacityError,
    DuplicateKeyError,
    MissingError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.kept import CacheIdentity
from omni_kvlink.testing.caches import MIB, Recipe, fingerprint, layers_of, make_cache, sized
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    hold,
    receive,
    request,
    until,
    until_requested,
)

if TYPE_CHECKING:
    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import KVProducer

SIX = [f"k{number}" for number in range(6)]
"""Keys of payloads of a MiB, of which seven fit into the rig's quota."""


def put_six(producer: KVProducer) -> list[Receipt]:
    """Keep a payload of a MiB for each key of `SIX`."""
    return [
        producer.put(sized(key, MIB, seed=number).make(), readers=None)
        for number, key in enumerate(SIX)
    ]


def kept_keys(producer: KVProducer, rig: Rig) -> list[str]:
    """The keys of `SIX` that are there; asking changes no order, since it asks in that order."""
    found = rig.connect_here().contains(SIX, timeout=60)
    assert len(found) == len(SIX)
    return [key for key, is_here in zip(SIX, found, strict=True) if is_here]


def withdraw_all(producer: KVProducer, keys: list[str]) -> None:
    """Withdraw kept payloads."""
    assert all(map(producer.withdraw, keys))


def check_kept_for_any_number_of_readers(rig: Rig) -> None:
    """Each kind of payload is got again and again, by several, also while another has it."""
    producer, readers = rig.serve(), [rig.connect(), rig.connect()]
    recipes = [Recipe("a", bundle=True), Recipe("b", tensors=True), sized("c", MIB), Recipe("d", 1)]
    payloads = [recipe.make() for recipe in recipes]
    receipts = [producer.put(payloads[0], readers=None)]
    receipts += producer.put_many(payloads[1:], readers=None)
    expected = list(map(fingerprint, payloads))
    with rig.connect_here().get("c", timeout=60) as held:
        for _ in range(2):
            for reader in readers:
                assert reader.call("get_many", keys=[*"abcd"], timeout=60, wait=False) == expected
        assert fingerprint(held) == expected[2]
    del held
    assert producer.stats()["transfers"]["kept"] == len(payloads)
    assert not any(receipt.done for receipt in receipts)
    expect(TransferTimeout, receipts[0].wait, timeout=0.0, mentions=("kept for any reader",))
    withdraw_all(producer, [*"abcd"])
    for receipt in receipts:
        receipt.wait(timeout=60)
        assert receipt.state == "withdrawn"


def check_withdrawn(rig: Rig) -> None:
    """A withdrawn payload stays with its reader; others miss it, or wait for the next of its key.

    No other payload can be withdrawn.
    """
    producer, reader, other = rig.serve(), rig.connect(), rig.connect()
    data = sized("w", MIB).make()
    receipt = producer.put(data, readers=None)
    digest = hold(reader, "w")
    assert producer.withdraw("w")
    assert not producer.withdraw("w")
    assert receipt.state == "withdrawn"
    receipt.wait(timeout=60)
    why = ("'w'", "missing", "its producer withdrew it")
    expect(MissingError, other.call, "get", key="w", timeout=60, wait=False, mentions=why)
    expect(MissingError, other.call, "get_many", keys=["w"], timeout=60, wait=False)
    following = Recipe("w", seed=9).make()
    waiting = request(other, producer, "w", requests=2)  # the other lease is that of `hold`
    counted = producer.put(following)
    assert waiting.result(60) == fingerprint(following)
    counted.wait(timeout=60)
    declared = producer.put(Recipe("w", seed=2).make())
    assert not producer.withdraw("w")
    assert other.call("contains", keys=["w", "x"], timeout=60) == [True, False]
    producer.abort("w")
    expect(TransferFailed, declared.wait, timeout=60)
    assert reader.peer.call("hash_held", key="w") == digest


def check_evicted(rig: Rig) -> None:
    """A put that finds no memory evicts what was used least recently, and nothing that is used."""
    producer, reader = rig.serve(quota=7 * MIB + MIB // 2), rig.connect()
    receipts = put_six(producer)
    hold(reader, "k0")
    producer.put(sized("m0", MIB).make(), readers=None)
    assert kept_keys(producer, rig) == SIX
    for key in ("k1", "k3", "k5", "k2", "m0"):
        assert reader.call("contains", keys=[key], timeout=60) == [True]
    producer.put(sized("m1", MIB).make(), readers=None)
    assert [receipt.state for receipt in receipts if receipt.done] == ["evicted"]
    assert kept_keys(producer, rig) == ["k0", "k1", "k2", "k3", "k5"]
    expect(TransferFailed, receipts[4].wait, timeout=60, mentions=("evicted", "raise quota="))
    why = ("'k4'", "evicted because memory was wanted")
    expect(MissingError, reader.call, "get", key="k4", timeout=60, wait=False, mentions=why)
    again = sized("k4", MIB, seed=4).make()
    producer.put(again, readers=None)  # `kept_keys` has asked for all others since
    assert reader.call("contains", keys=["m0", "m1"], timeout=60) == [False, True]
    assert kept_keys(producer, rig) == SIX
    assert producer.stats()["transfers"]["evicted"] == 2
    withdraw_all(producer, ["m1", *SIX])


def check_a_put_waits_for_readers_of_kept(rig: Rig) -> None:
    """A put that finds all kept payloads in use waits, and takes the memory of one released.

    One that never fits evicts nothing, and neither does one that has room.
    """
    producer, consumer = rig.serve(quota=7 * MIB + MIB // 2), rig.connect_here()
    put_six(producer)
    held = consumer.get_many(SIX, timeout=60)
    two = sized("two", 2 * MIB).make()
    expect(CapacityError, partial(producer.put, two, timeout=0.0), mentions=("requested",))
    expect(CapacityError, partial(producer.put, sized("huge", 9 * MIB).make()), mentions=("never",))
    assert producer.stats()["transfers"]["evicted"] == 0
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(producer.put, two, readers=None, timeout=60)
        until(lambda: producer.stats()["memory"]["waiting"] == 1, "the put waits")
        held[3].release()
        held[2].release()
        put.result(60)
    held.release()
    kept = kept_keys(producer, rig)
    assert set(kept) >= {"k0", "k1", "k4", "k5"}
    withdraw_all(producer, [*kept, "two"])


def check_kept_keys_are_taken(rig: Rig) -> None:
    """A kept payload is not overwritten, and what cannot be kept is refused."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("d").make()
    producer.put(data, readers=None, ttl=3600.0)
    again = partial(producer.put, Recipe("d", seed=1).make())
    expect(DuplicateKeyError, again, mentions=("'d'", "kept; withdraw it"))
    expect(
        SchemaError, partial(producer.put, data, readers=None, direct=True), mentions=("direct",)
    )
    expect(SchemaError, producer.open_stream, "s", {}, readers=None, mentions=("readers",))
    assert reader.call("get", key="d", timeout=60) == fingerprint(data)
    withdraw_all(producer, ["d"])
    deliver(producer, reader, Recipe("d", seed=2).make())


def check_a_ttl_ends_kept_payloads(rig: Rig) -> None:
    """With a `ttl` a kept payload expires, whether it was read or not."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("e").make(), readers=None, ttl=1e-3)
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("expired",))
    expect(TransferFailed, reader.call, "get", key="e", timeout=60, mentions=("expired",))
    assert producer.stats()["transfers"]["kept"] == 0


def check_kept_while_it_is_written(rig: Rig) -> None:
    """A stream of layers is kept, too: for readers of its layers, and for those that come later."""
    producer, reader, consumer = rig.serve(), rig.connect(), rig.connect_here()
    data = make_cache(Recipe("s", layers=3))
    layers = list(layers_of(data).values())
    first_reader = rig.connect_here()
    expect(MissingError, first_reader.get, "s", timeout=60, wait=False)
    for call, key in ((first_reader.get, "s"), (first_reader.get_many, ["s"])):
        expect(SchemaError, call, key, timeout=60, wait="false", mentions=("wait='false'",))
    with producer.stream_put(data, readers=None) as out:
        out.write_layer(0, *layers[0])
        assert not producer.withdraw("s")
        assert first_reader.contains(["s"], timeout=60) == [False]
        with ThreadPoolExecutor(1) as pool:
            get = pool.submit(reader.call, "get", key="s", timeout=60)
            until_requested(producer, 1)
            for layer in (1, 2):
                out.write_layer(layer, *layers[layer])
            receipt = out.commit()
            assert get.result(60) == fingerprint(data)
    with consumer.get("s", timeout=60, wait=False) as received:
        assert fingerprint(received) == fingerprint(data)
    del received
    assert receipt.state in ("committed", "leased")
    withdraw_all(producer, ["s"])


def check_contains(rig: Rig) -> None:
    """`contains` answers for many keys, long ones too, in order; a miss of an identity is told."""
    producer, reader = rig.serve(), rig.connect()
    identity, other = CacheIdentity("weights", dtype="bfloat16"), CacheIdentity("weights")
    keys = [identity.key(f"{'ü' * 300 if number % 3 else ''}{number}") for number in range(700)]
    for key in keys[::7]:
        producer.put(Recipe(key, tokens=1, layers=1).make(), readers=None)
    expected = [number % 7 == 0 for number in range(700)]
    assert reader.call("contains", keys=keys, timeout=60) == expected
    assert reader.call("contains", keys=[], timeout=60) == []
    counted = producer.stats()["transfers"]["other_identity"]
    assert reader.call("contains", keys=[other.key("0")], timeout=60) == [False]
    why = ("another identity",)
    get = partial(reader.call, "get", timeout=60, wait=False)
    expect(MissingError, partial(get, key=other.key("0")), mentions=why)
    assert producer.stats()["transfers"]["other_identity"] == counted + 2
    withdraw_all(producer, keys[::7])
    expect(MissingError, partial(get, key=keys[0]), mentions=("withdrew",))
    assert producer.stats()["transfers"]["other_identity"] == counted + 2


def check_small_kept_payloads_are_evicted(rig: Rig) -> None:
    """Payloads that travel in their offers are kept and evicted as large ones are."""
    producer, reader = rig.serve(quota=MIB, prefault=0), rig.connect()
    for number in range(400):
        producer.put(sized(f"s{number}", 8192, seed=number).make(), readers=None)
    found = reader.call("contains", keys=[f"s{number}" for number in range(400)], timeout=60)
    assert found == [False] * (400 - sum(found)) + [True] * sum(found)
    assert sum(found) > 50
    last = sized("s399", 8192, seed=399).make()
    assert reader.call("get", key="s399", timeout=60, wait=False) == fingerprint(last)
    deliver(producer, reader, sized("all", MIB // 2).make())
    receive(reader, producer.put(sized("x", 100).make()), sized("x", 100).make())
    for number in range(400):
        producer.withdraw(f"s{number}")
