"""Checks of puts without a copy: of memory that `allocate` gave, and with `direct=True`."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

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
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.memory_checks import MIB, sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    receive,
    request,
    until,
    until_freed,
    until_requested,
)
from omni_kvlink.testing.stream_checks import finish, write_all

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
)


def fill(allocation: Allocation, data: Payload) -> None:
    """Write a payload's tensors into allocated memory, as an engine does."""
    for target, source in zip(allocation.data.tensors(), data.tensors(), strict=True):
        flat = dense(source).contiguous().view(-1)
        dense(target).view(-1).view(torch.uint8).copy_(flat.view(torch.uint8))


def check_put_of_allocated_memory_copies_nothing(rig: Rig) -> None:
    """One cache, a bundle, latents; with digests and without; and every byte arrives."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (CACHE, BUNDLE, Recipe("a", latent=True, tokens=700, dim=999)):
        for digests in (True, False):
            allocation, data = _filled(producer, recipe)
            deliver(
                producer,
                reader,
                allocation.data,
                data,
                digests=digests,
                copies=0,
                verify="full" if digests else "auto",
            )
            until_freed(producer)


def check_planned_with_blank(rig: Rig) -> None:
    """A blank is enough to allocate memory and to plan a stream, but it cannot be put."""
    producer, reader = rig.serve(), rig.connect()
    data = CACHE.make()
    assert isinstance(data, KVCacheTransferData)
    blank = KVCacheTransferData.blank(
        "a", row=(2, 24), dtype=torch.bfloat16, metadata=data.metadata
    )
    expect(SchemaError, producer.put, blank, mentions=("blank",))
    allocation = producer.allocate(blank)
    fill(allocation, data)
    cache, blocks = _blocks(allocation.data)
    named = KVCacheTransferData(cache.request_id, blocks, data.block_ids, data.metadata)
    deliver(producer, reader, named, data, copies=0, verify="full")


def check_less_than_allocated(rig: Rig) -> None:
    """Fewer tokens or branches than allocated, or other metadata: still put in place."""
    producer, reader = rig.serve(), rig.connect()
    for tokens in (10, 7, 1):
        allocation, data = _filled(producer, CACHE)
        extra = {"steps": list(range(tokens))}
        shorter = _first_tokens(allocation.data, tokens, extra=extra)
        expected = _first_tokens(data, tokens, extra=extra)
        deliver(producer, reader, shorter, expected, copies=0, verify="full")
        del shorter
        until_freed(producer)
    allocation, data = _filled(producer, BUNDLE)
    deliver(
        producer,
        reader,
        _branches_of(allocation.data, "other"),
        _branches_of(data, "other"),
        copies=0,
        verify="full",
    )


def check_partly_in_place(rig: Rig) -> None:
    """Only the tensors that are not in the allocated memory are copied."""
    producer, reader = rig.serve(), rig.connect()
    allocation, data = _filled(producer, CACHE)
    deliver(producer, reader, _mixed(allocation.data, data), data, copies=1, verify="full")


def check_misplaced_tensors(rig: Rig) -> None:
    """A tensor at the wrong offset of the memory is refused: it would be overwritten while read."""
    producer = rig.serve()
    for turn in ("reverse", "strided", "beyond"):
        allocation, _ = _filled(producer, CACHE)
        wrong = _misplaced(allocation.data, turn)
        expect(SchemaError, producer.put, wrong, mentions=("memory",))
        del wrong
        until_freed(producer)


def check_more_than_allocated(rig: Rig) -> None:
    """A larger payload is refused, and what fits can still be put."""
    producer, reader = rig.serve(), rig.connect()
    allocation, data = _filled(producer, CACHE)
    for larger in (
        Recipe("a", layers=4, tokens=10, heads=2, dim=24),
        Recipe("a", layers=3, tokens=11, heads=2, dim=24),
        Recipe("a", bundle=True),
    ):
        expect(SchemaError, producer.put, larger.make())
        expect(SchemaError, producer.stream_put, larger.make())
    big = _first_tokens(data, 10, extra={"text": "x" * 20_000})
    expect(SchemaError, producer.put, big, mentions=("header", "allocated"))
    deliver(producer, reader, allocation.data, data, copies=0, verify="full")


def check_allocated_memory_is_not_reused_too_soon(rig: Rig) -> None:
    """Memory is reused only after the last tensor of it was dropped."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect()
    allocation, data = _filled(producer, sized("a", 1200 << 10))
    kept = dense(allocation.data.tensors()[0])
    deliver(producer, reader, allocation.data, data, copies=0, verify="full")
    expect(CapacityError, producer.put, data, timeout=0.1)
    assert hash_tensors([kept]) == hash_tensors(data.tensors()[:1])
    del kept
    until_freed(producer)
    deliver(producer, reader, data, timeout=60)


def check_allocation_that_is_not_put(rig: Rig) -> None:
    """After `release`, key and memory are free, and the allocation cannot be put."""
    producer, reader = rig.serve(), rig.connect()
    for _ in range(3):
        allocation = producer.allocate(CACHE.make())
        expect(DuplicateKeyError, producer.allocate, CACHE.make(), mentions=("'a'",))
        allocation.release()
        allocation.release()
        expect(ClosedError, allocation.data.tensors)
        expect(ClosedError, producer.put, allocation.data)
        until_freed(producer)
    deliver(producer, reader, CACHE.make(), CACHE.make(), copies=1, verify="full")


def check_allocation_is_put_once(rig: Rig) -> None:
    """A second put of an allocation raises, and the first one is not harmed."""
    producer, reader = rig.serve(), rig.connect()
    allocation, data = _filled(producer, CACHE)
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
        allocation, data = _filled(producer, CACHE)
        waiting = begin_get(consumer, "a", timeout=60)
        until_requested(producer, 1)
        link.abort("a", "the user left")
        expect(TransferFailed, waiting.wait, timeout=60)
        expect(TransferFailed, consumer.get, "a", timeout=60, mentions=mentions)
        expect(TransferFailed, producer.put, allocation.data, mentions=mentions)
        del allocation
        until_freed(producer)
        receipt = producer.put(data)
        assert receipt.ledger.copies == 1
        consumer.get("a", timeout=60).release()
        receipt.wait(timeout=60)
        until_freed(producer)


def check_streamed_in_place(rig: Rig) -> None:
    """A stream of layers that are in the allocated memory; of all that was allocated, or less."""
    producer, reader = rig.serve(), rig.connect()
    for recipe, tokens in ((CACHE, 10), (CACHE, 6), (BUNDLE, 0)):
        allocation, data = _filled(producer, recipe)
        plan, expected = allocation.data, data
        if tokens:
            plan, expected = _first_tokens(plan, tokens), _first_tokens(data, tokens)
        with producer.stream_put(plan) as out:
            reader.call("stream_get", key="a", timeout=60)
            write_all(out, layers_of(plan), reader, "a", "scatter_layer")
        assert out.ledger.copies == 0
        del plan
        finish(reader, expected, out.commit())
        until_freed(producer)


def check_put_in_the_background(rig: Rig) -> None:
    """`put(background=True)` returns before the digests exist; the receipt reports the end."""
    producer, reader = rig.serve(), rig.connect()
    expect(SchemaError, producer.put, CACHE.make(), background=True, mentions=("allocate",))
    for recipe in (CACHE, BUNDLE):
        allocation, data = _filled(producer, recipe)
        deliver(producer, reader, allocation.data, data, background=True, copies=0, verify="full")
        until_freed(producer)


def check_put_that_fails_in_the_background(rig: Rig) -> None:
    """The receipt and the reader's get raise the error of the background put."""
    producer, reader = rig.serve(copier=BrokenCopier()), rig.connect()
    allocation, _ = _filled(producer, CACHE)
    waiting = reader.submit("get", key="a", timeout=60)
    receipt = producer.put(allocation.data, background=True)
    expect(TransferFailed, receipt.wait, timeout=60, mentions=("out of luck",))
    expect(TransferFailed, waiting.result, 5, mentions=("out of luck",))


def check_direct_put_copies_nothing(rig: Rig) -> None:
    """More bytes arrive than the link has memory for; or the put is refused with the reason."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect(quota=64 * MIB)
    if not can_put_direct(producer):
        data = DIRECT[0].make()
        expect(SchemaError, producer.put, data, direct=True, mentions=("link's own memory",))
        assert producer.stats()["transfers"]["live"] == 0
        return
    for recipe in (*DIRECT, sized("d", 12 * MIB)):
        for digests in (True, False):
            deliver_direct(producer, reader, recipe.make(), digests=digests)


def deliver_direct(
    producer: KVProducer, reader: RemoteLink, data: Payload, *, digests: bool = True
) -> None:
    """Put a payload directly: its waiting reader gets every byte, and nothing is copied."""
    key = data.request_id
    verify = "full" if digests else "auto"
    waiting = reader.submit("get", key=key, timeout=PATIENCE, verify=verify)
    receipt = producer.put(data, direct=True, digests=digests)
    assert waiting.result(PATIENCE) == fingerprint(data)
    receipt.wait(timeout=60)
    assert (receipt.ledger.copies, receipt.ledger.digests != "off") == (0, digests)


def check_direct_put_waits_for_its_readers(rig: Rig) -> None:
    """It returns after the last reader was sent the tensors, which may then be modified."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
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


def check_direct_put_times_out(rig: Rig) -> None:
    """With a reader missing it raises at its deadline, and the key can be put again."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
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


def check_stream_of_a_direct_put(rig: Rig) -> None:
    """A reader of layers gets all of them at the commit."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
    data = DIRECT[0].make()
    reading = request(reader, producer, "d", command="stream_get")
    receipt = producer.put(data, direct=True)
    assert reading.result(PATIENCE) == [list(name) for name in layers_of(data)]
    finish(reader, data, receipt)


def check_direct_put_can_be_aborted(rig: Rig) -> None:
    """It raises after an abort by either side, and when the link is closed."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
    ends: tuple[Callable[[], object], ...] = (
        lambda: producer.abort("d", "no more"),
        lambda: reader.call("abort", key="d", reason="no more"),
        producer.close,
    )
    for end in ends:
        putting = _start_direct_put(producer, DIRECT[0].make())
        waiting = reader.submit("get", key="d", timeout=PATIENCE)
        _until_offered(producer)
        end()
        expect(TransferFailed, putting.result, PATIENCE)
        assert waiting.exception(PATIENCE) is not None


def check_what_cannot_be_sent_directly(rig: Rig) -> None:
    """Tensors that cannot be sent directly are refused before they are announced."""
    producer, reader = rig.serve(), rig.connect()
    data = Recipe("d", layers=1, tokens=8, heads=4).make()
    assert isinstance(data, KVCacheTransferData)
    pieces = {
        name: [torch.stack([dense(view)] * 2, -1)[..., 0] for view in layers if view is not None]
        for name, layers in data.layer_blocks.items()
    }
    broken = KVCacheTransferData.from_dict({**data.to_dict(), "layer_blocks": pieces})
    expect(SchemaError, producer.put, broken, direct=True, mentions=("layer 0, K",))
    allocation = producer.allocate(data)
    for background in (True, False):
        put = partial(producer.put, allocation.data, direct=True, background=background)
        expect(SchemaError, put, mentions=("tensors of your own",))
    allocation.release()
    deliver(producer, reader, broken, data, verify="full")


class BrokenCopier(TorchCopier):
    """Raises an error, as a device may."""

    def digest(self, manifest: Manifest, region: Region, **options: float) -> list[str]:
        """Raise an error."""
        raise RuntimeError("out of luck")


def _filled(producer: KVProducer, recipe: Recipe) -> tuple[Allocation, Payload]:
    data = recipe.make()
    allocation = producer.allocate(data)
    fill(allocation, data)
    return allocation, data


def _blocks(data: Payload) -> tuple[KVCacheTransferData, dict[str, list[Any]]]:
    assert isinstance(data, KVCacheTransferData)
    return data, {name: list(layers) for name, layers in data.layer_blocks.items()}


def _first_tokens(data: Payload, tokens: int, extra: Any = None) -> KVCacheTransferData:
    cache, _ = _blocks(data)
    metadata = dataclasses.replace(
        cache.metadata, kv_lens=(tokens,), ropes=(tokens,), seq_len=tokens, extra=extra or {}
    )
    return cache.first_tokens(tokens, metadata)


def _branches_of(data: Payload, *names: str) -> KVCacheBundle:
    assert isinstance(data, KVCacheBundle)
    return KVCacheBundle(data.request_id, {name: data.branches[name] for name in names})


def _mixed(data: Payload, other: Payload) -> KVCacheTransferData:
    """A cache whose first K is in other memory."""
    cache, blocks = _blocks(data)
    _, other_blocks = _blocks(other)
    blocks["key_cache"][0] = other_blocks["key_cache"][0]
    return KVCacheTransferData(cache.request_id, blocks, cache.block_ids, cache.metadata)


def _misplaced(data: Payload, kind: str) -> KVCacheTransferData:
    cache, blocks = _blocks(data)
    if kind == "reverse":
        blocks["key_cache"].reverse()
    elif kind == "strided":
        first = blocks["key_cache"][0]
        blocks["key_cache"][0] = first.as_strided(tuple(first.shape), (48, 1, 2))
    else:  # after the payload, where the draft of a stream would be
        shorter = _first_tokens(cache, 4)
        _, less = _blocks(shorter)
        less["value_cache"][2] = dense(blocks["value_cache"][2])[-4:]
        return KVCacheTransferData("a", less, (), shorter.metadata)
    return KVCacheTransferData(cache.request_id, blocks, cache.block_ids, cache.metadata)


def can_put_direct(producer: KVProducer) -> bool:
    """Whether a producer can send from its caller's own tensors."""
    assert isinstance(producer._end, Producer)
    return not producer._end.direct_refusal("cpu")


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
