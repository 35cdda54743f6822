"""Checks of the link's memory: when it is free, how much there is, and what is in it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from omni_kvlink.copier import TorchCopier
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    IntegrityError,
    SchemaError,
    TransferFailed,
)
from omni_kvlink.testing.caches import Recipe, fingerprint
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import SLACK, Rig, expect, until_freed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest
    from omni_kvlink.payload.views import TensorView

MIB = 1 << 20


def sized(key: str, nbytes: int, *, seed: int = 0) -> Recipe:
    """A recipe of a cache of about `nbytes` bytes."""
    tokens = max(1, nbytes // (2 * 2 * 1024))
    return Recipe(key, seed=seed, layers=2, tokens=tokens, heads=4, dim=256, dtype="uint8")


def check_release_frees(rig: Rig) -> None:
    """After every reader released a payload, none of the producer's memory is used."""
    producer, reader = rig.serve(), rig.connect()
    for number in range(5):
        receipt = producer.put(Recipe(f"k{number}").make())
        assert producer.stats()["memory"]["used"] > 0
        reader.call("get", key=f"k{number}", timeout=5)
        receipt.wait(timeout=5)
        until_freed(producer)


def check_views_outlive_the_block(rig: Rig) -> None:
    """Tensors that are kept beyond the `with` block keep the memory; the last one frees it."""
    producer, reader = rig.serve(), rig.connect()
    receipt = producer.put(Recipe("v").make())
    reader.call("hold", key="v", timeout=5)
    before = reader.peer.call("hash_held", key="v")
    other = producer.put(sized("w", MIB, seed=3).make())
    reader.call("get", key="w", timeout=5)
    other.wait(timeout=5)
    assert reader.peer.call("hash_held", key="v") == before
    left = 1
    while left:
        assert not receipt.done, "released while a view was held"
        assert producer.stats()["memory"]["used"] > 0
        left = reader.peer.call("release_one", key="v")
    receipt.wait(timeout=5)
    until_freed(producer)


def check_data_is_closed_after_the_block(rig: Rig) -> None:
    """Using a payload after its `with` block raises, and the error names the block."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (Recipe("c"), Recipe("b", bundle=True)):
        receipt = producer.put(recipe.make())
        expect(
            ClosedError,
            lambda key=recipe.key: reader.call("use_after_block", key=key, timeout=5),  # type: ignore[misc]
            mentions=("with",),
        )
        receipt.wait(timeout=5)


def check_put_waits_for_memory(rig: Rig) -> None:
    """With a full quota `put` waits, and goes on as soon as a reader releases."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    producer.put(sized("first", 1200 << 10).make())
    reader.call("hold", key="first", timeout=5)
    ended: list[float] = []
    data = sized("second", 1200 << 10, seed=1).make()

    def put() -> None:
        producer.put(data, timeout=PATIENCE)
        ended.append(time.monotonic())

    thread = threading.Thread(target=put)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "put did not wait for memory"
    dropped = time.monotonic()
    reader.peer.call("release", key="first")
    thread.join(PATIENCE)
    assert ended, "put did not return"
    assert ended[0] - dropped < SLACK, "put was woken late"
    assert reader.call("get", key="second", timeout=5) == fingerprint(data)


def check_put_times_out_without_memory(rig: Rig) -> None:
    """With a full quota `put` raises at its deadline, and names bytes requested and free."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    first = producer.put(sized("first", 1200 << 10).make())
    data = sized("second", 1200 << 10).make()
    error = expect(
        CapacityError,
        lambda: producer.put(data, timeout=0.3),
        within=0.3 + SLACK,
        mentions=("second",),
    )
    assert error.requested > 1200 << 10
    assert 0 < error.free < error.requested
    reader.call("get", key="first", timeout=5)
    first.wait(timeout=5)
    second = producer.put(data, timeout=1)
    reader.call("get", key="second", timeout=5)
    second.wait(timeout=5)
    until_freed(producer)


def check_larger_than_the_quota(rig: Rig) -> None:
    """A payload larger than the quota is refused at once, and its key stays free."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    data = sized("huge", 3 * MIB).make()
    error = expect(CapacityError, lambda: producer.put(data, timeout=PATIENCE), within=SLACK)
    assert error.requested > 3 * MIB
    assert 0 < error.free <= 2 * MIB
    small = producer.put(Recipe("huge").make())
    reader.call("get", key="huge", timeout=5)
    small.wait(timeout=5)


def check_memory_does_not_fragment(rig: Rig) -> None:
    """After many sizes in many orders of release, the whole quota can be used."""
    producer, reader = rig.serve(quota=4 * MIB), rig.connect()
    sizes = [100, 700, 300, 900, 60, 500, 1100]
    for turn in range(3):
        keys = [f"{turn}-{n}" for n in range(len(sizes))]
        receipts = [
            producer.put(sized(key, size << 10).make())
            for key, size in zip(keys, sizes, strict=True)
        ]
        for key in sorted(keys, key=lambda key: hash(key) % 17):
            reader.call("get", key=key, timeout=5)
        for receipt in receipts:
            receipt.wait(timeout=5)
    until_freed(producer)
    whole = producer.put(sized("whole", 3900 << 10).make(), timeout=1)
    reader.call("get", key="whole", timeout=5)
    whole.wait(timeout=5)


def check_refused_puts_use_nothing(rig: Rig) -> None:
    """A put with wrong arguments uses neither memory nor the key."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("k").make()
    for how in (
        {"readers": 0},
        {"readers": -1},
        {"ttl": 0.0},
        {"ttl": -1.0},
        {"ttl": float("nan")},
    ):
        expect(SchemaError, lambda how=how: producer.put(data, **how))  # type: ignore[misc]
    assert producer.stats()["memory"]["used"] == 0
    receipt = producer.put(data)
    reader.call("get", key="k", timeout=5)
    receipt.wait(timeout=5)


def check_corruption_is_found(rig: Rig) -> None:
    """`verify="full"` names the branch, layer, K or V whose bytes changed; the receipt fails."""
    copier = TamperingCopier()
    producer, reader, other = rig.serve(copier=copier), rig.connect(), rig.connect()
    cases: list[tuple[Callable[[Manifest, Region], None], tuple[str, ...]]] = [
        (flip_bit("kv.0.key", 0), ("layer 0", "K")),
        (flip_bit("kv.1.value", -1), ("layer 1", "V")),
        (swap_tokens("kv.1.key", "kv.1.value"), ("layer 1", "K")),
        (swap_tensors("kv.0.key", "kv.0.value"), ("layer 0", "K")),
        (swap_tensors("kv.0.value", "kv.1.value"), ("layer 0", "V")),
    ]
    for number, (tamper, mentions) in enumerate(cases):
        key = f"bad-{number}"
        copier.tamper = tamper
        receipt = producer.put(Recipe(key, seed=number).make())
        expect(
            IntegrityError,
            lambda key=key: reader.call("get", key=key, timeout=5, verify="full"),  # type: ignore[misc]
            mentions=("branch", *mentions),
        )
        expect(TransferFailed, lambda r=receipt: r.wait(timeout=5), mentions=("rejected",))  # type: ignore[misc]
        expect(TransferFailed, lambda key=key: other.call("get", key=key, timeout=5), within=SLACK)  # type: ignore[misc]
    until_freed(producer)


def check_no_torn_reads(rig: Rig) -> None:
    """While memory is reused all the time, every get returns its own bytes."""
    producer, readers = rig.serve(quota=2 * MIB), [rig.connect(), rig.connect()]
    recipes = [sized(f"t{n}", 300 << 10, seed=n) for n in range(24)]
    gets = [
        readers[n % 2].submit("get", key=recipe.key, timeout=PATIENCE, verify="full")
        for n, recipe in enumerate(recipes)
    ]
    for recipe in recipes:
        producer.put(recipe.make(), timeout=PATIENCE)
    for recipe, get in zip(recipes, gets, strict=True):
        assert get.result(PATIENCE) == fingerprint(recipe.make()), recipe.key
    until_freed(producer)


class TamperingCopier(TorchCopier):
    """Computes true digests, then changes the payload, as a fault of the transport would."""

    def __init__(self) -> None:
        self.tamper: Callable[[Manifest, Region], None] = lambda manifest, region: None

    def gather(
        self, sources: Sequence[TensorView], manifest: Manifest, region: Region
    ) -> list[str]:
        """Gather, then call `tamper`."""
        digests = super().gather(sources, manifest, region)
        self.tamper(manifest, region)
        return digests


def _bytes_of(manifest: Manifest, region: Region, name: str) -> memoryview:
    spec = next(spec for spec in manifest.tensors if spec.name == name)
    start = manifest.header_nbytes + spec.start
    return region.view()[start : start + spec.nbytes]


def flip_bit(name: str, at: int) -> Callable[[Manifest, Region], None]:
    """A change that flips a bit of one tensor."""

    def tamper(manifest: Manifest, region: Region) -> None:
        _bytes_of(manifest, region, name)[at] ^= 0x10

    return tamper


def swap_tokens(*names: str) -> Callable[[Manifest, Region], None]:
    """A change that swaps the first two tokens in each tensor: sums of bytes stay the same."""

    def tamper(manifest: Manifest, region: Region) -> None:
        for name in names:
            found = _bytes_of(manifest, region, name)
            spec = next(spec for spec in manifest.tensors if spec.name == name)
            row = spec.nbytes // spec.shape[0]
            first, second = bytes(found[:row]), bytes(found[row : 2 * row])
            found[: 2 * row] = second + first

    return tamper


def swap_tensors(one: str, other: str) -> Callable[[Manifest, Region], None]:
    """A change that swaps two tensors."""

    def tamper(manifest: Manifest, region: Region) -> None:
        a, b = _bytes_of(manifest, region, one), _bytes_of(manifest, region, other)
        a[:], b[:] = bytes(b), bytes(a)

    return tamper
