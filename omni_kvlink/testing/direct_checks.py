"""Checks of `put(direct=True)`, which sends from the caller's tensors, or is refused."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from omni_kvlink.connectors.base import Producer
from omni_kvlink.errors import SchemaError, TransferFailed, TransferTimeout
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, fingerprint, layers_of
from omni_kvlink.testing.memory_checks import MIB, sized
from omni_kvlink.testing.peer_harness import PATIENCE, RemoteLink
from omni_kvlink.testing.rig import SLACK, Rig, deliver, expect, until, until_freed, until_requested
from omni_kvlink.testing.stream_checks import finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_kvlink.connectors.protocol.transfer_table import Receipt
    from omni_kvlink.link import KVProducer, Payload

RECIPES = (
    Recipe("d", layers=3, tokens=100),
    Recipe("d", latent=True, tokens=700, dim=999),  # padding behind each tensor
    Recipe("d", bundle=True, tokens=9),
    Recipe("d", tokens=0),
)


def check_direct_put_copies_nothing(rig: Rig) -> None:
    """More bytes arrive than the link has memory for; or the put is refused with the reason."""
    producer, reader = rig.serve(quota=2 * MIB), rig.connect(quota=64 * MIB)
    if not can_put_direct(producer):
        data = RECIPES[0].make()
        expect(SchemaError, producer.put, data, direct=True, mentions=("link's own memory",))
        assert producer.stats()["transfers"]["live"] == 0
        return
    for recipe in (*RECIPES, sized("d", 12 * MIB)):
        for digests in (True, False):
            deliver_direct(producer, reader, recipe.make(), digests=digests)


def deliver_direct(
    producer: KVProducer, reader: RemoteLink, data: Payload, *, digests: bool = True
) -> None:
    """Put a payload directly: its waiting reader gets every byte, and nothing is copied."""
    key = data.request_id
    waiting = reader.submit("get", key=key, timeout=PATIENCE, verify="full")
    receipt = producer.put(data, direct=True, digests=digests)
    assert waiting.result(PATIENCE) == fingerprint(data)
    receipt.wait(timeout=5)
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
    time.sleep(SLACK / 5)
    assert not putting.done(), "it did not wait for the second reader"
    assert not first.done(), "delivered before it was committed"
    second = reader.submit("get", key="d", timeout=PATIENCE)
    receipt = putting.result(PATIENCE)
    _overwrite(data)
    assert first.result(PATIENCE) == second.result(PATIENCE) == fingerprint(recipe.make())
    receipt.wait(timeout=5)


def check_direct_put_times_out(rig: Rig) -> None:
    """With a reader missing it raises at its deadline, and the key can be put again."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
    recipe = sized("d", MIB)
    data = recipe.make()
    put = partial(producer.put, data, direct=True)
    mentions = ("1 readers missing", "its caller's tensors")
    expect(TransferTimeout, put, timeout=0.2, within=0.2 + SLACK, mentions=mentions)
    stream = reader.submit("stream_get", key="d", timeout=PATIENCE)
    until_requested(producer, 1)
    expect(TransferTimeout, put, readers=2, timeout=1.0, within=1.0 + SLACK, mentions=mentions)
    _overwrite(data)
    stream.result(PATIENCE)
    layer = reader.peer.submit("wait_layer", key="d", layer=0, timeout=5)
    expect(TransferFailed, layer.result, PATIENCE, mentions=("gave it up",))
    reader.peer.call("release", key="d")
    until_freed(producer)
    deliver(producer, reader, recipe.make(), verify="full")


def check_stream_of_a_direct_put(rig: Rig) -> None:
    """A reader of layers gets all of them at the commit."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
    data = RECIPES[0].make()
    reading = reader.submit("stream_get", key="d", timeout=PATIENCE)
    until_requested(producer, 1)
    receipt = producer.put(data, direct=True)
    assert reading.result(PATIENCE) == [list(name) for name in layers_of(data)]
    finish(reader, data)
    receipt.wait(timeout=5)


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
        putting = _start_direct_put(producer, RECIPES[0].make())
        waiting = reader.submit("get", key="d", timeout=PATIENCE)
        _until_offered(producer)
        end()
        expect(TransferFailed, putting.result, PATIENCE, within=SLACK)
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
