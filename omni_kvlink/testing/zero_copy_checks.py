"""Checks of puts without a copy: of memory that `allocate` gave, and with `direct=True`."""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink.connectors.base import Producer
from omni_kvlink.copier import TorchCopier
from omni_kvlink.errors import (
    CapacityError,
    ClosedError,
    DuplicateKeyError,
    SchemaError,
    TransferFailed,
    TransferTimeout,
)
from omni_kvlink.link import begin_get
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import (
    MIB,
    TENSORS,
    Recipe,
    fill,
    fingerprint,
    hash_tensors,
    layers_of,
    sized,
)
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    aborts,
    deliver,
    expect,
    receive,
    request,
    until,
    until_freed,
    until_requested,
)
from omni_kvlink.testing.stream_checks import LayerStream, finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.transfer import Receipt
    from omni_kvlink.link import Allocation, KVProducer, Payload
    from omni_kvlink.memory.region import Region
    from omni_kvlink.payload.manifest import Manifest

CACHE = Recipe("a", layers=3, tokens=10, heads=2, dim=24)
BUNDLE = Recipe("a", bundle=True, layers=2, tokens=9)
DIRECT = (
    Recipe("d", layers=3, tokens=100),
    Recipe("d", latent=True, tokens=700, dim=999),  # padding behind each tensor
    Recipe("d", bundle=True, tokens=9),
    Recipe("d", tokens=0),
    sized("d", 12 * MIB),
    *TENSORS,
)


def filled(producer: KVProducer, recipe: Recipe) -> tuple[Allocation, Payload]:
    """Allocate memory for a payload, and write it there."""
    data = recipe.make()
    allocation = producer.allocate(data)
    fill(allocation, data)
    return allocation, data


def check_put_of_allocated_memory_copies_nothing(rig: Rig) -> None:
    """Every byte of caches, bundles, latents and nested tensors arrives.

    With digests, without, and in the background: the receipt reports the end.
    """
    producer, reader = rig.serve(), rig.connect()
    for recipe, options in itertools.product(
        (CACHE, BUNDLE, Recipe("a", latent=True, tokens=700, dim=999), *TENSORS),
        ({"digests": True}, {"digests": False}, {"background": True}),
    ):
        allocation, data = filled(producer, recipe)
        verify = "full" if options.get("digests", True) else "auto"
        receipt = producer.put(allocation.data, **options)
        receive(reader, receipt, data, verify=verify)
        assert receipt.ledger.copies == 0
        assert (receipt.ledger.digests != "off") == options.get("digests", True)
        del allocation
        until_freed(producer)
    mentions = ("allocate",)
    expect(SchemaError, producer.put, CACHE.make(), background=True, mentions=mentions)


def check_put_that_fails_in_the_background(rig: Rig) -> None:
    """The receipt and the reader's get raise the error of the background put."""
    producer, reader = rig.serve(copier=BrokenCopier()), rig.connect()
    allocation, _ = filled(producer, CACHE)
    waiting = reader.submit("get", key="a", timeout=60)
    receipt = producer.put(allocation.data, background=True)
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("out of luck",))
    expect(TransferFailed, waiting.result, 5, mentions=("out of luck",))


class BrokenCopier(TorchCopier):
    """Raises an error, as a device may."""

    def digest(self, manifest: Manifest, region: Region, **options: float) -> list[str]:
        """Raise an error."""
        raise RuntimeError("out of luck")


def check_allocated_memory_is_not_reused_too_soon(rig: Rig) -> None:
    """Memory is reused only after the last tensor of it was dropped."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    allocation, data = filled(producer, sized("a", 1200 << 10))
    kept = dense(allocation.data.tensors()[0])
    deliver(producer, reader, allocation.data, data, copies=0, verify="full")
    expect(CapacityError, producer.put, data, timeout=0.1)
    assert hash_tensors([kept]) == hash_tensors(data.tensors()[:1])
    del kept
    until_freed(producer)
    deliver(producer, reader, data, timeout=60)


def check_allocation_is_put_once(rig: Rig) -> None:
    """A second put of an allocation raises; after `release`, key and memory are free."""
    producer, reader = rig.serve(), rig.connect()
    for _ in range(3):
        allocation = producer.allocate(CACHE.make())
        expect(DuplicateKeyError, producer.allocate, CACHE.make(), mentions=("'a'",))
        allocation.release()
        allocation.release()
        expect(ClosedError, allocation.data.tensors)
        expect(ClosedError, producer.put, allocation.data)
        until_freed(producer)
    deliver(producer, reader, CACHE.make(), copies=1, verify="full")
    allocation, data = filled(producer, CACHE)
    receipt = producer.put(allocation.data)
    expect(ClosedError, producer.put, allocation.data)
    expect(DuplicateKeyError, producer.put, CACHE.make())
    allocation.release()
    receive(reader, receipt, data)


def check_abort_of_an_allocation(rig: Rig) -> None:
    """After an abort by either side `put` raises, the memory is free, and so is the key."""
    producer, consumer = rig.serve(), rig.connect_here()
    mentions = ("the user left",)
    for link in (producer, consumer):
        allocation, data = filled(producer, CACHE)
        waiting = begin_get(consumer, "a", timeout=60)
        until_requested(producer, 1)
        link.abort("a", "the user left")
        expect(TransferFailed, waiting.wait, timeout=60)
        expect(TransferFailed, consumer.get, "a", timeout=60, mentions=mentions)
        expect(TransferFailed, producer.put, allocation.data, mentions=mentions)
        del allocation
        until_freed(producer)
        deliver(producer, consumer, data, copies=1)
        until_freed(producer)


def check_streamed_in_place(rig: Rig) -> None:
    """A stream of layers that are in the allocated memory."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (CACHE, BUNDLE):
        allocation, data = filled(producer, recipe)
        stream = LayerStream(producer, reader, allocation.data)
        stream.pass_through(data, "scatter_layer")
        assert stream.out.ledger.copies == 0
        del allocation, stream
        until_freed(producer)


def can_put_direct(producer: KVProducer) -> bool:
    """Whether a producer can send from its caller's own tensors."""
    assert isinstance(producer._end, Producer)
    return not producer._end.direct_refusal("cpu")


def _where_possible(check: Callable[[KVProducer, RemoteLink], None]) -> Callable[[Rig], None]:
    """Return the check for a producer that has direct puts; with another it passes unrun."""

    @functools.wraps(check)
    def checked(rig: Rig) -> None:
        producer, reader = rig.serve(), rig.connect()
        if can_put_direct(producer):
            check(producer, reader)

    return checked


def check_direct_put_copies_nothing(rig: Rig) -> None:
    """More bytes arrive than the link has memory for; or the put is refused with the reason.

    A reader of layers gets all of them at the commit.
    """
    producer, reader = rig.serve(quota=2 * MIB), rig.connect(quota=64 * MIB)
    if not can_put_direct(producer):
        data = DIRECT[0].make()
        expect(SchemaError, producer.put, data, direct=True, mentions=("link's own memory",))
        assert producer.stats()["transfers"]["live"] == 0
        return
    for recipe, digests in itertools.product(DIRECT, (True, False)):
        data, verify = recipe.make(contiguous=True), "full" if digests else "auto"
        waiting = reader.submit("get", key=recipe.key, timeout=PATIENCE, verify=verify)
        receipt = producer.put(data, direct=True, digests=digests)
        assert waiting.result(PATIENCE) == fingerprint(data)
        receipt.wait(timeout=60)
        assert (receipt.ledger.copies, receipt.ledger.digests != "off") == (0, digests)
    data = DIRECT[0].make()
    reading = request(reader, producer, "d", command="stream_get")
    receipt = producer.put(data, direct=True)
    assert reading.result(PATIENCE) == [list(name) for name in layers_of(data)]
    finish(reader, data, receipt)


@_where_possible
def check_direct_put_waits_for_its_readers(producer: KVProducer, reader: RemoteLink) -> None:
    """It returns after the last reader was sent the tensors, which may then be modified."""
    recipe = sized("d", MIB)
    data = recipe.make()
    putting = _start_direct_put(producer, data)
    first = reader.submit("get", key="d", timeout=PATIENCE)
    _until_offered(producer)
    deliver(producer, reader, Recipe("later").make())
    assert not putting.done(), "it did not wait for the second reader"
    assert not first.done(), "delivered before it was committed"
    second = reader.submit("get", key="d", timeout=PATIENCE)
    receipt = putting.result(PATIENCE)
    _overwrite(data)
    assert first.result(PATIENCE) == second.result(PATIENCE) == fingerprint(recipe.make())
    receipt.wait(timeout=60)


@_where_possible
def check_direct_put_times_out(producer: KVProducer, reader: RemoteLink) -> None:
    """With a reader missing it raises at its deadline, and the key can be put again."""
    recipe = sized("d", MIB)
    data = recipe.make()
    put = partial(producer.put, data, direct=True)
    mentions = ("1 readers missing", "its caller's tensors")
    expect(TransferTimeout, put, timeout=0.2, mentions=mentions)
    stream = request(reader, producer, "d", command="stream_get")
    expect(TransferTimeout, put, readers=2, timeout=1.0, mentions=mentions)
    _overwrite(data)
    stream.result(PATIENCE)
    layer = reader.peer.submit("wait_layer", key="d", layer=0, timeout=60)
    expect(TransferFailed, layer.result, PATIENCE, mentions=("gave it up",))
    reader.peer.call("release", key="d")
    until_freed(producer)
    deliver(producer, reader, recipe.make(), verify="full")


@_where_possible
def check_direct_put_can_be_aborted(producer: KVProducer, reader: RemoteLink) -> None:
    """It raises after an abort by either side, and when the link is closed."""
    for end in (*aborts(producer, reader), lambda *_: producer.close()):
        putting = _start_direct_put(producer, DIRECT[0].make())
        waiting = reader.submit("get", key="d", timeout=PATIENCE)
        _until_offered(producer)
        end("d", "no more")
        expect(TransferFailed, putting.result, PATIENCE)
        assert waiting.exception(PATIENCE) is not None


def _start_direct_put(producer: KVProducer, data: Payload) -> Future[Receipt]:
    """Start a direct put for two readers in a thread; return when a get can find it.

    A get that arrives earlier is answered with the end of the key's last transfer, if it failed.
    """
    until(lambda: producer.stats()["transfers"]["live"] == 0, "the last transfer ended")
    pool = ThreadPoolExecutor(1)
    future = pool.submit(producer.put, data, direct=True, readers=2)
    pool.shutdown(wait=False)
    until(lambda: producer.stats()["transfers"]["live"] == 1, "the put has begun")
    return future


def _until_offered(producer: KVProducer) -> None:
    """Wait for the offer: after the request alone there may be nothing to abort yet."""
    until(lambda: producer.stats()["transfers"]["leased"] == 1, "a reader has the offer")


def _overwrite(data: Payload) -> None:
    for view in data.tensors():
        dense(view).view(torch.uint8).fill_(0xBB)
