"""Checks of the link's memory: when it is free, how much there is, what is in it and copied out."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from omni_kvlink.errors import (
    CapacityError,
    IntegrityError,
    TransferFailed,
)
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import (
    MIB,
    MIXED,
    NESTED,
    TENSORS,
    Recipe,
    fingerprint,
    hash_tensors,
    sized,
)
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    hold,
    receive,
    until,
    until_freed,
    wait_all,
)
from omni_kvlink.testing.tampering import TamperingCopier, flip_bit, swap_tensors, swap_tokens

ODD = Recipe("s", layers=3, tokens=11, heads=3, dim=8)


def check_release_frees(rig: Rig) -> None:
    """After a payload's release none of the memory is used, and its key names the next one."""
    producer, reader = rig.serve(), rig.connect()
    for seed in range(5):
        data = Recipe("again", seed=seed).make()
        receipt = producer.put(data)
        assert producer.stats()["memory"]["used"] > 0
        receive(reader, receipt, data)
        until_freed(producer)


def check_views_outlive_the_block(rig: Rig) -> None:
    """Tensors that are kept beyond the `with` block keep the memory; the last one frees it."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("v").make())
    digest = hold(reader, "v")
    deliver(producer, reader, sized("w", MIB, seed=3).make())
    assert reader.peer.call("hash_held", key="v") == digest
    count = 1
    while count:
        assert not receipt.done, "released while a view was held"
        assert producer.stats()["memory"]["used"] > 0
        count = reader.peer.call("release_one", key="v")
    receipt.wait(timeout=60)


def check_put_waits_for_memory(rig: Rig) -> None:
    """With a full quota `put` raises at its deadline, and names bytes requested and free.

    Until then it waits, and goes on as soon as a reader releases. A payload larger than the quota
    is refused at once, and its key stays free.
    """
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    producer.put(sized("first", 1200 << 10).make())
    reader.call("hold", key="first", timeout=60)
    data = sized("second", 1200 << 10, seed=1).make()
    error = expect(CapacityError, producer.put, data, timeout=0.3, mentions=("second",))
    assert error.requested > 1200 << 10
    assert 0 < error.free < error.requested
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(producer.put, data, timeout=PATIENCE)
        until(lambda: producer.stats()["memory"]["waiting"] == 1, "put waits for memory")
        reader.peer.call("release", key="first")
        receipt = putting.result(PATIENCE)
    receive(reader, receipt, data)
    huge = sized("huge", 3 * MIB).make()
    error = expect(CapacityError, producer.put, huge, timeout=PATIENCE)
    assert f"quota={error.requested}" in str(error), error
    assert error.requested > 3 * MIB
    assert 0 < error.free <= 2 * MIB
    deliver(producer, reader, Recipe("huge").make())


def check_memory_does_not_fragment(rig: Rig) -> None:
    """After many sizes in many orders of release, the whole quota can be used."""
    producer, reader = rig.serve(quota=4 * MIB), rig.connect()
    for count in (20, 7, 3, 11, 1):
        recipes = [sized(str(number), (3900 << 10) // count) for number in range(count)]
        receipts = [producer.put(recipe.make()) for recipe in recipes]
        for number in range(count):  # in an order that is neither theirs nor its reverse
            reader.call("get", key=recipes[number * 13 % count].key, timeout=60)
        wait_all(receipts)


def check_corruption_is_found(rig: Rig) -> None:
    """`verify="full"` names branch, layer, K or V, or the path of a tensor; the receipt fails."""
    copier = TamperingCopier()
    producer, reader, other = rig.serve(copier=copier), rig.connect(), rig.connect()
    cache = Recipe("k")
    for recipe, tamper, mentions in (
        (cache, partial(flip_bit, "kv.0.key", 0), ("branch", "K", "layer 0")),
        (cache, partial(flip_bit, "kv.1.value", -1), ("branch", "V", "layer 1")),
        # Of two tensors that are wrong, the one that arrives first is named.
        (cache, partial(swap_tokens, ("kv.1.key", "kv.1.value")), ("branch", "layer 1")),
        (cache, partial(swap_tensors, "kv.0.key", "kv.0.value"), ("branch", "layer 0")),
        (cache, partial(swap_tensors, "kv.0.value", "kv.1.value"), ("branch", ", V")),
        (NESTED, partial(flip_bit, "tensors/nested/0", -1), ("nested/0",)),
        (MIXED, partial(flip_bit, "extra/nested/1/mask", -1), ("nested/1/mask",)),
    ):
        copier.tamper = tamper
        data = recipe.make()
        receipt = producer.put(data)
        get = reader.submit("get", key=data.request_id, timeout=60, verify="full")
        expect(IntegrityError, get.result, PATIENCE, mentions=mentions)
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", mentions[-1]))
        expect(TransferFailed, other.call, "get", key=data.request_id, timeout=60)


def check_missing_digests_are_an_error(rig: Rig) -> None:
    """`verify="full"` of a payload without digests raises, and its receipt says so."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("k").make()
    receipt = producer.put(data, digests=False)
    get = reader.submit("get", key="k", timeout=60, verify="full")
    expect(IntegrityError, get.result, PATIENCE, mentions=("'k'", "digests=True"))
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", "no digests"))
    for verify in ("auto", "off"):
        deliver(producer, reader, data, digests=False, verify=verify)
    deliver(producer, reader, Recipe("empty", tokens=0).make(), verify="full")


def check_no_torn_reads(rig: Rig) -> None:
    """Many puts and gets at once, large and small, while memory is reused all the time.

    Each reader gets its own payload; none is lost or doubled.
    """
    producer, readers = rig.serve(quota=2 * MIB), [rig.connect(), rig.connect()]
    recipes = [sized(f"t{n}", 300 << 10, seed=n) for n in range(24)]
    recipes += [Recipe(f"many-{n}", seed=n, tokens=1 + n % 7) for n in range(24)]
    gets = [
        readers[n % 2].submit("get", key=recipe.key, timeout=PATIENCE, verify="full")
        for n, recipe in enumerate(recipes)
    ]
    receipts = [producer.put(recipe.make(), timeout=PATIENCE) for recipe in reversed(recipes)]
    for recipe, get in zip(recipes, gets, strict=True):
        assert get.result(PATIENCE) == fingerprint(recipe.make()), recipe.key
    wait_all(receipts)
    assert producer.stats()["transfers"]["released"] == len(recipes)


def check_scatter_into_tensors_of_the_reader(rig: Rig) -> None:
    """In a list, or in a payload of the same structure."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (ODD, Recipe("b", bundle=True), Recipe("l", latent=True), *TENSORS):
        data = recipe.make()
        receipt = producer.put(data)
        received = consumer.get(recipe.key, timeout=60)
        targets = [torch.zeros_like(dense(tensor)) for tensor in data.tensors()]
        received.scatter(targets)
        assert hash_tensors(targets) == hash_tensors(data.tensors()), recipe
        other = dataclasses.replace(recipe, seed=7).make(contiguous=True)
        received.scatter(other)
        assert hash_tensors(other.tensors()) == hash_tensors(data.tensors()), recipe
        received.release()
        receipt.wait(timeout=60)


def check_scatter_finds_a_flipped_bit(rig: Rig) -> None:
    """`scatter` raises, names the tensor, and the receipt says that the payload was rejected."""
    copier = TamperingCopier()
    producer, consumer, other = rig.serve(copier=copier), rig.connect_here(), rig.connect()
    for recipe, name, mentions in (
        (ODD, "kv.0.key", ("layer 0", "K")),
        (ODD, "kv.2.value", ("layer 2", "V")),
        (NESTED, "tensors/nested/0", ("nested/0",)),
        (MIXED, "extra/nested/1/mask", ("nested/1/mask",)),
    ):
        copier.tamper = partial(flip_bit, name, -1)
        data = recipe.make()
        targets = [torch.zeros_like(dense(view)) for view in data.tensors()]
        receipt = producer.put(data)
        received = consumer.get(recipe.key, timeout=60, verify="off")  # "auto" may find it earlier
        views = received.data.tensors()
        error = expect(IntegrityError, received.scatter, targets, mentions=mentions)
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", *mentions))
        assert producer.stats()["transfers"]["leased"] == 1, "its views are in use"
        del views
        received.release()
        until(lambda: not producer.stats()["transfers"]["leased"], "an error keeps no payload")
        del error
        expect(TransferFailed, other.call, "get", key=recipe.key, timeout=60)
