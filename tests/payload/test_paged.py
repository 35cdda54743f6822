"""Paged caches: what reaches the payload and the other side."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import BlockTable, KVCacheTransferData, KVLink, PagedTensor
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.manifest import Manifest
from support.payloads.paged import (
    BLOCKS,
    COPIERS,
    LAYERS,
    LAYOUTS,
    SIZE,
    Layout,
    about,
    copier,
    dense_copy,
    expected_bytes,
    packed,
    paged,
    separate,
    slots_of,
    table,
)
from support.payloads.random_caches import DTYPES, bits, noise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_kvlink import KVConsumer, KVProducer

_numbers = itertools.count()

# ---- what reaches the payload


@pytest.mark.parametrize("tokens", [1, 3, SIZE, 10, BLOCKS * SIZE])
@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COPIERS)
def test_the_payload_is_the_dense_caches(
    name: str, layout: Layout, by_slot: bool, tokens: int
) -> None:
    for seed, dtype in enumerate(DTYPES):
        pools, tables = layout(dtype, seed), table(tokens, by_slot=by_slot, seed=seed)
        data = KVCacheTransferData.from_paged(
            "r", *pools, block_size=SIZE, metadata=about(tokens), **tables
        )
        plan = data.plan()
        region = Mapping.anonymous(plan.nbytes).region
        digests = copier(name).gather(data.tensors(), plan, region)

        found = KVCacheTransferData.from_region(plan.with_digests(digests), region)
        assert [bits(t) for t in found.tensors()] == expected_bytes(pools, tables, tokens), dtype
        assert found.difference(data) == data.difference(found) == ""
        theirs = Mapping.anonymous(plan.nbytes).region
        assert digests == TorchCopier().gather(found.tensors(), plan, theirs)

        fresh = layout(dtype, seed + 50)
        before = [pool.clone() for pools in fresh for pool in pools]
        targets = [
            PagedTensor(pool, view.block_table)
            for pool, view in zip(sum(zip(*fresh, strict=True), ()), views(data), strict=True)
        ]
        copier(name).scatter(plan.with_digests(digests), region, targets)
        assert expected_bytes(fresh, tables, tokens) == expected_bytes(pools, tables, tokens), dtype
        others = [pool for pools in fresh for pool in pools]
        for old, new in zip(before, others, strict=True):
            for block, slot in slots_of(tables, tokens):
                old[block, slot] = new[block, slot]
            assert bits(old) == bits(new), f"{dtype}: wrote beside"


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize("size", [16, 1024])
@pytest.mark.parametrize("name", COPIERS)
def test_several_steps_and_digest_chunks(name: str, size: int, by_slot: bool) -> None:
    """Blocks smaller and larger than what torch copies at a time; more than one MiB a tensor."""
    blocks, tokens = 4096 // size, 3 * 1024 + 13
    pool = noise(0, (blocks, 2, size, 2, 96), "float32")[:, 1]
    order = random.Random(3).sample(range(blocks), blocks)
    block_table = BlockTable.of_blocks(order, block_size=size, tokens=tokens)
    if by_slot:
        slots = random.Random(4).sample(range(blocks * size), tokens)
        block_table = BlockTable.of_slots(torch.tensor(slots), block_size=size)
    view = PagedTensor(pool, block_table)
    data = KVCacheTransferData(
        "r", {"key_cache": [view], "value_cache": [view]}, (), about(tokens, num_layers=1)
    )
    plain = dense_copy(data)
    plan = data.plan()
    ours, theirs = (Mapping.anonymous(plan.nbytes).region for _ in range(2))
    digests = copier(name).gather(data.tensors(), plan, ours)
    assert digests == TorchCopier().gather(plain.tensors(), plan, theirs)
    assert bytes(ours.view()) == bytes(theirs.view())
    index = (
        block_table.index
        if by_slot
        else [order[t // size] * size + t % size for t in range(tokens)]
    )
    assert bits(view.dense()) == b"".join(
        bits(pool[slot // size, slot % size]) for slot in map(int, index)
    )


@pytest.mark.parametrize("name", COPIERS)
def test_torch_takes_what_the_library_does_not(name: str) -> None:
    """Negated pools, and pools of more dimensions than the library has, by both copiers."""
    block_table = BlockTable.of_blocks([2, 0, 1], block_size=SIZE, tokens=9)
    many = noise(0, (3, SIZE, 2, 2, 2, 2, 4), "float32")[..., ::2]
    for pool in (torch._neg_view(noise(0, (3, SIZE, 2, 4)).nan_to_num()), many):
        view = PagedTensor(pool, block_table)
        fresh = PagedTensor(torch.zeros_like(pool), block_table)
        tokens = torch.cat([pool[2], pool[0], pool[1, :1]])
        assert torch.equal(view.dense().nan_to_num(), tokens.nan_to_num())
        fresh.fill(tokens)
        assert bits(fresh.dense()) == bits(tokens)
        spec = ("kv.0.key", "F32", tuple(view.shape))
        plan = Manifest.lay_out("r", [], [spec], bundle=False, digests=True)
        ours, theirs = (Mapping.anonymous(plan.nbytes).region for _ in range(2))
        expected_bytes = TorchCopier().gather([tokens], plan, theirs)
        assert copier(name).gather([view], plan, ours) == expected_bytes
        assert bytes(ours.view()) == bytes(theirs.view())


NO_TEMPORARY = """
import random, sys
import torch
from omni_kvlink import KVCacheTransferData
from omni_kvlink.copier import NativeCopier, TorchCopier
from omni_kvlink.memory.mapping import Mapping
from support.processes.watermark import taken

copier = {"torch": TorchCopier, "native": NativeCopier}[sys.argv[1]]()
pools = [torch.ones(2304, 16, 8, 32) for part in range(2)]  # 36 MiB each
metadata = {"kv_lens": [32768 + 7], "ropes": [1]}
tables = [
    {"block_ids": random.sample(range(2304), 2049)},
    {"slot_mapping": random.sample(range(2304 * 16), 32768 + 7)},
]
for table in tables:
    data = KVCacheTransferData.from_paged(
        "r", pools[:1], pools[1:], block_size=16, metadata=metadata, **table
    )
    plan = data.plan()
    region = Mapping.anonymous(plan.nbytes).region
    manifest = plan.with_digests(copier.gather(data.tensors(), plan, region))
    copier.scatter(manifest, region, data.tensors())
    # Threads, their stacks and caches are there now, of both directions.
    print(taken(lambda: copier.gather(data.tensors(), plan, region)))
    print(taken(lambda: copier.scatter(manifest, region, data.tensors())))
print(taken(lambda: [place.dense() for place in data.tensors()]))
"""


@pytest.mark.parametrize("name", COPIERS)
def test_pages_need_no_temporary(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TEMPORARY, name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *copies, dense = map(int, done.stdout.split())
    assert len(copies) == 4
    assert max(copies) < 8 << 20
    assert dense > 50 << 20  # the measure does see a temporary


# ---- through a link


@pytest.fixture(params=COPIERS)
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = f"shm://paged-{next(_numbers)}"
    with (
        KVLink.serve(url, directory=sockets, copier=request.param) as producer,
        KVLink.connect(url, timeout=60, directory=sockets) as consumer,
    ):
        yield producer, consumer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_through_shared_memory(
    ends: tuple[KVProducer, KVConsumer],
    layout: Layout,
    by_slot: bool,
) -> None:
    producer, consumer = ends
    source = layout("bfloat16", 3)
    data = paged(pools=source, by_slot=by_slot)
    receipt = producer.put(data)
    for side in source:
        for pool in side:
            pool.zero_()  # committed: the pools are the engine's again
    with consumer.get("r", timeout=60, verify="full") as found:
        tokens = expected_bytes(layout("bfloat16", 3), table(10, by_slot=by_slot), 10)
        assert [bits(t) for t in found.tensors()] == tokens
        assert isinstance(found, KVCacheTransferData)
        assert found.block_ids == data.block_ids
        assert found.metadata == data.metadata
    receipt.wait(timeout=60)
    assert receipt.ledger.copies == 1


READER = """
import hashlib, json, sys
import torch
from omni_kvlink import KVLink

url, directory = sys.argv[1:]
with KVLink.connect(url, timeout=60, directory=directory) as link:
    with link.get("two", timeout=60, verify="full") as data:
        hashes = [
            hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            for tensor in data.tensors()
        ]
        print(json.dumps([hashes, data.block_ids, data.metadata.block_size]))
"""


def test_two_processes(sockets: str) -> None:
    source = packed("float16", 5)
    data = paged(pools=source, request_id="two")
    url = f"shm://paged-{next(_numbers)}"
    with KVLink.serve(url, directory=sockets) as producer:
        receipt = producer.put(data)
        done = subprocess.run(
            [sys.executable, "-c", READER, url, sockets],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        receipt.wait(timeout=60)
    tables = table(10, by_slot=False)
    hashes = [hashlib.sha256(one).hexdigest() for one in expected_bytes(source, tables, 10)]
    assert json.loads(done.stdout) == [hashes, tables["block_ids"], SIZE]


def views(data: KVCacheTransferData) -> Sequence[PagedTensor]:
    return [view for view in data.tensors() if isinstance(view, PagedTensor)]


def test_the_pages_are_borrowed() -> None:
    source = separate("int8", 0)
    data = paged(pools=source)
    assert [view.pool for view in views(data)][::2] == source[0]
    assert len(views(data)) == 2 * LAYERS
