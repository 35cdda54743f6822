"""Checks of `TensorTransferData`, and of bundles that have one beside their caches."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from typing import Any

import torch

from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.errors import ClosedError, IntegrityError, SchemaError, TransferFailed
from omni_kvlink.payload.bundle import KVCacheBundle
from omni_kvlink.payload.tensor_data import TensorTransferData
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, fingerprint, hash_tensors, layers_of
from omni_kvlink.testing.memory_checks import TamperingCopier, flip_bit
from omni_kvlink.testing.peer_harness import PATIENCE
from omni_kvlink.testing.rig import Rig, deliver, expect, until_freed
from omni_kvlink.testing.stream_checks import finish, write_all
from omni_kvlink.testing.zero_copy_checks import can_put_direct, deliver_direct, fill

NESTED = Recipe("t", tensors=True, tokens=11)
MIXED = Recipe("t", tensors=True, bundle=True, tokens=9)
RECIPES = (
    NESTED,
    MIXED,
    Recipe("t", tensors=True, tokens=0),
    Recipe("t", tensors=True, tokens=1025, dim=600),
)
"""Nested tensors of every dtype; beside caches; mostly empty ones; more than one digest chunk."""


def check_tensors_arrive(rig: Rig) -> None:
    """Names, structure, metadata and every byte, with digests and without."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in RECIPES:
        for digests in (True, False):
            verify = "full" if digests else "auto"
            deliver(producer, reader, recipe.make(), verify=verify, digests=digests)


def check_tensors_have_their_structure(rig: Rig) -> None:
    """Dicts and lists come back as they were, and the kinds of payload are not mixed up."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in (NESTED, MIXED):
        data = recipe.make()
        receipt = producer.put(data)
        received = consumer.get("t", timeout=60)
        payload = received.data
        assert type(payload) is type(data)
        if isinstance(payload, KVCacheBundle):
            assert isinstance(data, KVCacheBundle)
            assert list(payload.branches) == list(data.branches)
            payload, data = payload.tensor_data["extra"], data.tensor_data["extra"]
        assert isinstance(payload, TensorTransferData)
        assert isinstance(data, TensorTransferData)
        assert not payload.difference(data), payload.difference(data)
        received.release()
        expect(ClosedError, payload.tensors)
        del payload
        receipt.wait(timeout=60)


def check_tensors_by_asyncio(rig: Rig) -> None:
    """Put and received by the links of `omni_kvlink.aio`."""

    async def transfer(data: Any) -> str:
        async with (
            await AsyncKVLink.serve(rig.url, **rig.options) as producer,
            await AsyncKVLink.connect(rig.url, timeout=60, **rig.options) as consumer,
        ):
            receipt = await producer.put(data)
            received = await consumer.get("t", timeout=60, verify="full")
            digest = fingerprint(received.data)
            received.release()
            del received
            await producer.wait(receipt, timeout=60)
            return digest

    for recipe in (NESTED, MIXED):
        assert asyncio.run(transfer(recipe.make())) == fingerprint(recipe.make())


def check_direct_put_of_tensors(rig: Rig) -> None:
    """Sent from the caller's tensors, where the connector can."""
    producer, reader = rig.serve(), rig.connect()
    if not can_put_direct(producer):
        return
    for recipe in RECIPES:
        deliver_direct(producer, reader, recipe.make(contiguous=True))


def check_tensors_written_in_place(rig: Rig) -> None:
    """Into memory that `allocate` gave, planned from sizes alone; nothing is copied."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in RECIPES:
        data = plan = recipe.make()
        if isinstance(data, TensorTransferData):
            plan = TensorTransferData.blank("t", data.tree, data.metadata)
            expect(SchemaError, producer.put, plan, mentions=("t",))
        allocation = producer.allocate(plan)
        fill(allocation, data)
        deliver(producer, reader, allocation.data, data, verify="full", copies=0)
        del allocation
        until_freed(producer)


def check_scatter_of_tensors(rig: Rig) -> None:
    """Copied into tensors of the reader's own, in a list or in a payload of the same structure."""
    producer, consumer = rig.serve(), rig.connect_here()
    for recipe in RECIPES:
        data = recipe.make()
        receipt = producer.put(data)
        received = consumer.get("t", timeout=60)
        targets = [torch.zeros_like(dense(tensor)) for tensor in data.tensors()]
        received.scatter(targets)
        assert hash_tensors(targets) == hash_tensors(data.tensors()), recipe
        other = dataclasses.replace(recipe, seed=7).make(contiguous=True)
        received.scatter(other)
        assert hash_tensors(other.tensors()) == hash_tensors(data.tensors()), recipe
        received.release()
        receipt.wait(timeout=60)


def check_stream_of_tensors(rig: Rig) -> None:
    """Every tensor is a layer of its own, which the reader has before the next one is written."""
    producer, reader = rig.serve(), rig.connect()
    for recipe in (NESTED, MIXED):
        data = recipe.make()
        layers = layers_of(data)
        with producer.stream_put(data) as out:
            assert reader.call("stream_get", key="t", timeout=60) == [list(name) for name in layers]
            write_all(out, layers, reader, "t")
        finish(reader, data, out.commit())


def check_flipped_bit_of_a_tensor(rig: Rig) -> None:
    """`get` and `scatter` name the tensor by its path, and the receipt fails."""
    copier = TamperingCopier()
    producer, reader, consumer = rig.serve(copier=copier), rig.connect(), rig.connect_here()
    for name, recipe in (("tensors/nested/0", NESTED), ("extra/nested/1/mask", MIXED)):
        path = name.partition("/")[2]
        copier.tamper = partial(flip_bit, name, -1)
        data = recipe.make()
        receipt = producer.put(data)
        get = reader.submit("get", key="t", timeout=60, verify="full")
        expect(IntegrityError, get.result, PATIENCE, mentions=(path,))
        expect(TransferFailed, receipt.wait, timeout=60, mentions=("rejected", path))
        receipt = producer.put(data)
        targets = [torch.zeros_like(dense(tensor)) for tensor in data.tensors()]
        received = consumer.get(
            "t", timeout=60, verify="off"
        )  # over a network "auto" would find it
        expect(IntegrityError, received.scatter, targets, mentions=(path,))
        received.release()
        expect(TransferFailed, receipt.wait, timeout=60)
