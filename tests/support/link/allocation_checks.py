"""Checks of memory that `allocate` gave, in which the link recognises parts of a payload."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.errors import (
    SchemaError,
)
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.schema import KVCacheTransferData
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import (
    TENSORS,
    Recipe,
    fill,
)
from omni_kvlink.testing.rig import (
    Rig,
    deliver,
    expect,
    until_freed,
)
from omni_kvlink.testing.stream_checks import LayerStream
from omni_kvlink.testing.zero_copy_checks import BUNDLE, CACHE, filled

if TYPE_CHECKING:
    from omni_kvlink.link import Payload


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
    del allocation, cache, blocks, named
    for recipe in TENSORS:
        tensors = recipe.make()
        if isinstance(tensors, TensorTransferData):
            plan = TensorTransferData.blank("t", tensors.tree, tensors.metadata)
            expect(SchemaError, producer.put, plan, mentions=("t",))
            allocation = producer.allocate(plan)
            fill(allocation, tensors)
            deliver(producer, reader, allocation.data, tensors, copies=0, verify="full")
            del allocation
            until_freed(producer)


def check_less_than_allocated(rig: Rig) -> None:
    """Fewer tokens or branches than allocated, or other metadata: still put in place."""
    producer, reader = rig.serve(), rig.connect()
    for tokens in (10, 7, 1):
        allocation, data = filled(producer, CACHE)
        extra = {"steps": list(range(tokens))}
        shorter = _first_tokens(allocation.data, tokens, extra=extra)
        expected = _first_tokens(data, tokens, extra=extra)
        deliver(producer, reader, shorter, expected, copies=0, verify="full")
        del shorter
        until_freed(producer)
    allocation, data = filled(producer, CACHE)
    stream = LayerStream(producer, reader, _first_tokens(allocation.data, 6))
    stream.pass_through(_first_tokens(data, 6), "scatter_layer")
    assert stream.out.ledger.copies == 0
    del allocation, stream
    until_freed(producer)
    allocation, data = filled(producer, BUNDLE)
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
    allocation, data = filled(producer, CACHE)
    deliver(producer, reader, _mixed(allocation.data, data), data, copies=1, verify="full")


def check_misplaced_tensors(rig: Rig) -> None:
    """A tensor at the wrong offset of the memory is refused: it would be overwritten while read."""
    producer = rig.serve()
    for turn in ("reverse", "strided", "beyond"):
        allocation, _ = filled(producer, CACHE)
        wrong = _misplaced(allocation.data, turn)
        expect(SchemaError, producer.put, wrong, mentions=("memory",))
        del wrong
        until_freed(producer)


def check_more_than_allocated(rig: Rig) -> None:
    """A larger payload is refused, and what fits can still be put."""
    producer, reader = rig.serve(), rig.connect()
    allocation, data = filled(producer, CACHE)
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
