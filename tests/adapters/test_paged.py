"""Pools of blocks, out through the schema and back into other blocks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    KVCacheTransferData,
    KVLink,
    SameAs,
    SchemaError,
    split_packed,
    split_stacked,
)
from omni_kvlink._native import host
from omni_kvlink.adapters import BagelAdapter, PagedAdapter, PagedCache
from omni_kvlink.payload.views import dense
from support.devices.native_plans import without_library
from support.payloads.random_caches import DTYPES, bits, cache, empty, noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from omni_kvlink import KVConsumer, KVProducer

BLOCKS, SIZE, HEADS, DIM, TOKENS = 8, 4, 2, 3, 10
_numbers = itertools.count()
ADAPTER = PagedAdapter()


def separate(blocks: int, size: int, dtype: str, seed: int) -> tuple[Any, Any]:
    keys, values = (
        [noise(seed + 2 * layer + part, (blocks, size, HEADS, DIM), dtype) for layer in range(2)]
        for part in range(2)
    )
    return keys, values


def stacked(blocks: int, size: int, dtype: str, seed: int) -> tuple[Any, Any]:
    return split_stacked([noise(seed + n, (2, blocks, size, HEADS, DIM), dtype) for n in range(2)])


def packed(blocks: int, size: int, dtype: str, seed: int) -> tuple[Any, Any]:
    return split_packed([noise(seed + n, (blocks, 2, size, HEADS, DIM), dtype) for n in range(2)])


LAYOUTS = (separate, stacked, packed)


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without the compiled library."""
    if request.param == "torch":
        without_library(monkeypatch)
    elif host.missing():
        pytest.skip(host.missing() or "")
    return str(request.param)


def table(blocks: int, size: int, *, by_slot: bool, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    if by_slot:
        return {"slot_mapping": torch.tensor(chance.sample(range(blocks * size), TOKENS))}
    return {"block_ids": chance.sample(range(blocks), -(-TOKENS // size))}


def positions(cache: PagedCache) -> list[tuple[int, int]]:
    if cache.slot_mapping is not None:
        return [divmod(int(slot), cache.block_size) for slot in cache.slot_mapping]
    assert cache.block_ids is not None
    size, ids = cache.block_size, [int(block) for block in cache.block_ids]
    return [(ids[token // size], token % size) for token in range(TOKENS)]


def pools_of(cache: PagedCache) -> list[torch.Tensor]:
    """The pools of K by layer, then those of V."""
    assert cache.value_cache is not None
    return [*cache.key_cache, *cache.value_cache]


def tokens_of(cache: PagedCache) -> list[bytes]:
    """Layer by layer, K before V, read a token at a time."""
    assert cache.value_cache is not None
    return [
        b"".join(bits(pool[position]) for position in positions(cache))
        for pools in zip(cache.key_cache, cache.value_cache, strict=True)
        for pool in pools
    ]


def canaries(cache: PagedCache) -> list[bytes]:
    """Every byte of the pools' memory, also around them, except the sequence's."""
    found = []
    for pool in pools_of(cache):
        copy = pool.clone()
        for position in positions(cache):
            copy[position] = 0
        found.append(bits(copy))
    return found


def about(**other: Any) -> dict[str, Any]:
    return {"kv_lens": [TOKENS], "ropes": [3], **other}


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("into", LAYOUTS)
@pytest.mark.parametrize("out_of", LAYOUTS)
def test_from_pool_to_pool(
    backend: str,
    out_of: Callable[..., tuple[Any, Any]],
    into: Callable[..., tuple[Any, Any]],
    size: int,
    by_slot: bool,
) -> None:
    """Other blocks, another block size, another layout; nothing else changes."""
    for seed, dtype in enumerate(DTYPES):
        tables = table(BLOCKS, SIZE, by_slot=by_slot, seed=seed)
        source = PagedCache(*out_of(BLOCKS, SIZE, dtype, seed), SIZE, **tables)
        blocks = 32 // size
        tables = table(blocks, size, by_slot=not by_slot, seed=seed + 9)
        target = PagedCache(*into(blocks, size, dtype, seed + 99), size, **tables)
        before = canaries(target)
        data = ADAPTER.export(source, request_id="r", metadata=about())
        assert tokens_of(target) != tokens_of(source)
        assert ADAPTER.load(data, target) is target
        assert tokens_of(target) == tokens_of(source), dtype
        assert canaries(target) == before, dtype
        again = ADAPTER.export(target, request_id="r", metadata=about())
        assert again.difference(data).startswith(("block_ids", "metadata"))


@pytest.fixture(params=["inproc", "shm"])
def ends(
    request: pytest.FixtureRequest, sockets: str, backend: str
) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = f"{request.param}://adapter-{next(_numbers)}"
    options: dict[str, Any] = {
        "directory": sockets,
        "copier": "auto" if backend == "compiled" else backend,
    }
    with (
        KVLink.serve(url, **options) as producer,
        KVLink.connect(url, timeout=60, **options) as consumer,
    ):
        yield producer, consumer


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_through_a_link_into_blocks(ends: tuple[KVProducer, KVConsumer], by_slot: bool) -> None:
    producer, consumer = ends
    tables = table(BLOCKS, SIZE, by_slot=by_slot, seed=1)
    source = PagedCache(*packed(BLOCKS, SIZE, "bfloat16", 1), SIZE, **tables)
    tables = table(4, 16, by_slot=by_slot, seed=2)
    target = PagedCache(*stacked(4, 16, "bfloat16", 50), 16, **tables)
    before = canaries(target)
    receipt = producer.put(ADAPTER.export(source, request_id="r", metadata=about()))
    with consumer.get("r", timeout=60) as data:
        assert isinstance(data, KVCacheTransferData)
        ADAPTER.load(data, target)
    receipt.wait(timeout=60)
    assert tokens_of(target) == tokens_of(source)
    assert canaries(target) == before


def test_the_rest_of_the_storage_is_not_written(backend: str) -> None:
    """Pools that are a window of larger memory: heads of more, in blocks of more slots."""
    whole = [noise(n, (BLOCKS, SIZE + 2, HEADS + 2, DIM + 1)) for n in range(4)]
    windows = [one[:, 1 : 1 + SIZE, 1 : 1 + HEADS, :DIM] for one in whole]
    target = PagedCache(windows[:2], windows[2:], SIZE, block_ids=[6, 0, 3])
    data = cache(shape=(TOKENS, HEADS, DIM))
    expected = [one.clone() for one in whole]
    for one, tensor in zip([expected[0], expected[2], expected[1], expected[3]], data.tensors(),
                           strict=True):  # fmt: skip
        for token, (block, slot) in enumerate(positions(target)):
            one[block, 1 + slot, 1 : 1 + HEADS, :DIM] = dense(tensor)[token]
    ADAPTER.load(data, target)
    assert [bits(one) for one in whole] == [bits(one) for one in expected]


def test_latents(backend: str) -> None:
    data = cache(shape=(TOKENS, 6))
    pools = [noise(9 + n, (BLOCKS, SIZE, 6)) for n in range(2)]
    ADAPTER.inject(data, pools, None, block_size=SIZE, block_ids=[7, 0, 2, 5])
    for pool, tokens in zip(pools, data.tensors(), strict=True):
        assert bits(torch.cat([pool[7], pool[0], pool[2, :2]])) == bits(tokens)


def test_any_strides_of_the_data(backend: str) -> None:
    turned = [noise(n, (HEADS, TOKENS, DIM)).transpose(0, 1) for n in range(4)]
    blocks = {"key_cache": turned[:2], "value_cache": turned[2:]}
    data = KVCacheTransferData("r", blocks, (), about(num_layers=2))
    target = PagedCache(*packed(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 3, 2])
    ADAPTER.load(data, target)
    assert tokens_of(target) == [bits(tensor) for tensor in data.tensors()]


def test_an_empty_cache_writes_nothing() -> None:
    target = PagedCache(*separate(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[])
    before = [bits(pool) for pool in target.key_cache]
    ADAPTER.load(empty(), target)
    assert [bits(pool) for pool in target.key_cache] == before
    assert ADAPTER.export(target, request_id="r", metadata=about(kv_lens=[0])).is_empty


def test_pages_become_tensors_in_a_naive_cache() -> None:
    """Exported as they are, compared with a prefix, and loaded as tensors."""
    source = PagedCache(*separate(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 2, 0])
    data = ADAPTER.export(source, request_id="r", metadata=about())
    naive = SimpleNamespace(**data.layer_blocks)
    contexts = {
        name: {"kv_lens": [TOKENS], "ropes": [1], "past_key_values": naive}
        for name in ("gen", "cfg_text")
    }
    bundle = BagelAdapter().export_contexts(contexts, request_id="r")
    assert isinstance(bundle.branches["cfg_text"], SameAs)
    empty_one = SimpleNamespace(key_cache=[None] * 2, value_cache=[None] * 2)
    loaded = BagelAdapter().load(bundle["gen"], empty_one)
    assert [bits(t) for t in loaded.key_cache] == tokens_of(source)[::2]


# ---- what is refused, and that nothing was written by then


def changed(**other: Any) -> Callable[[PagedCache], PagedCache]:
    return lambda target: dataclasses.replace(target, **other)


def value(layer: int, make: Callable[[torch.Tensor], Any]) -> Callable[[PagedCache], PagedCache]:
    def change(target: PagedCache) -> PagedCache:
        assert target.value_cache is not None
        pools = list(target.value_cache)
        pools[layer] = make(pools[layer])
        return dataclasses.replace(target, value_cache=pools)

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (changed(block_ids=[1, 2, 1]), ["K and V of every layer", "block id 1", "twice"]),
        (changed(block_ids=[1, 2, 8]), ["layer 0, K", "block id 8", "8 blocks"]),
        (changed(block_ids=[1, 2, -1]), ["block id -1"]),
        (changed(block_ids=[1, 2]), ["2 blocks", "wanted 3"]),
        (changed(block_ids=None, slot_mapping=[*range(9), 8]), ["slot 8", "twice"]),
        (changed(block_ids=None, slot_mapping=[*range(9), 32]), ["layer 0, K", "slot 32"]),
        (changed(block_ids=None, slot_mapping=[*range(9), -1]), ["slot -1"]),
        (changed(block_ids=None, slot_mapping=range(9)), ["9 slots", "10 tokens"]),
        (changed(slot_mapping=range(10)), ["either", "slot_mapping"]),
        (changed(block_size=8), ["layer 0, K", "[num_blocks, 8"]),
        (changed(value_cache=None), ["layout 'NHD'", "2 pools", "1 given"]),
        (value(1, lambda pool: pool[:7]), ["layer 1, V", "[7, 4, 2, 3]", "its K"]),
        (value(1, lambda pool: pool[..., :2]), ["layer 1, V", "its K"]),
        (value(1, lambda pool: pool.view(torch.int32)), ["layer 1, V", "int32", "float32"]),
        (value(1, lambda pool: None), ["layer 1, V", "missing"]),
        (value(1, lambda pool: pool[:1].expand(8, 4, 2, 3)), ["layer 1, V", "overlaps itself"]),
        (value(1, lambda pool: pool.as_strided((8, 4, 2, 3), (23, 6, 3, 1))),
         ["layer 1, V", "(23, 6, 3, 1)", "overlaps itself"]),
        (lambda target: dataclasses.replace(target, value_cache=target.key_cache),
         [", V", ", K", "share memory"]),
        (changed(key_cache=[torch.zeros(8, 4, 2, 3)]), ["K: 1 pools", "2 layers"]),
        (changed(value_cache=[torch.zeros(8, 4, 2, 3)] * 3), ["V: 3 pools", "2 layers"]),
    ],
)  # fmt: skip
def test_refused_before_a_byte_is_written(
    backend: str, change: Callable[[PagedCache], PagedCache], parts: list[str]
) -> None:
    good = PagedCache(*separate(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 2, 0])
    before = [bits(pool) for pool in pools_of(good)]
    with pytest.raises(SchemaError) as caught:
        ADAPTER.load(cache(shape=(TOKENS, HEADS, DIM)), change(good))
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert [bits(pool) for pool in pools_of(good)] == before


def test_pools_of_other_tokens_are_refused() -> None:
    data = cache(shape=(TOKENS, HEADS, DIM + 1))
    target = PagedCache(*separate(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 2, 0])
    with pytest.raises(SchemaError, match=r"layer 0, K: a pool .*3\] for tokens .*4\]"):
        ADAPTER.load(data, target)


def test_data_in_the_same_pools_is_refused(backend: str) -> None:
    """Half of it would be overwritten before it is read."""
    target = PagedCache(*stacked(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 2, 0])
    other = dataclasses.replace(target, block_ids=[2, 1, 4])
    data = ADAPTER.export(target, request_id="r", metadata=about())
    with pytest.raises(SchemaError, match="layer 0, K: the data lies in the pools"):
        ADAPTER.load(data, other)


def test_several_sequences_need_slots() -> None:
    target = PagedCache(*separate(BLOCKS, SIZE, "float32", 7), SIZE, block_ids=[1, 2, 0])
    data = cache(shape=(TOKENS, HEADS, DIM), kv_lens=[4, 6], ropes=[1, 1])
    with pytest.raises(SchemaError, match="2 kv_lens"):
        ADAPTER.load(data, target)
    ADAPTER.load(data, dataclasses.replace(target, block_ids=None, slot_mapping=range(10)))
    assert bits(target.key_cache[0][:2]) == bits(dense(data.tensors()[0])[:8])
