"""Paged caches: how they are declared, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    BlockTable,
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    PagedTensor,
    PrefixOf,
    SameAs,
    SchemaError,
    split_packed,
    split_stacked,
)
from omni_kvlink.copier import TorchCopier
from omni_kvlink.memory.mapping import Mapping
from support.payloads.paged import (
    BLOCKS,
    DIM,
    HEADS,
    LAYERS,
    SIZE,
    Pools,
    about,
    dense_copy,
    paged,
    separate,
    table,
)
from support.payloads.random_caches import bits, noise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from omni_kvlink.payload.kv_checks import LayerBlocks

# ---- the schema


def test_metadata_and_block_ids_are_filled_in() -> None:
    data = paged(10)
    assert data.block_ids == table(10, by_slot=False)["block_ids"]
    meta = data.metadata
    assert (meta.num_layers, meta.block_size, meta.dtype) == (LAYERS, SIZE, "bfloat16")
    slots = [SIZE * 7 + 1, 2, SIZE * 7, 3, SIZE]
    keys, values = separate("int8", 0)
    data = KVCacheTransferData.from_paged(
        "r", keys, values, block_size=SIZE, metadata=about(5), slot_mapping=slots
    )
    assert data.block_ids == [7, 0, 1]


def test_blocks_beyond_the_tokens_are_not_sent() -> None:
    keys, values = separate("int8", 0)
    data = KVCacheTransferData.from_paged(
        "r", keys, values, block_size=SIZE, metadata=about(5), block_ids=[3, 1, 8, 8, 10**6]
    )
    assert data.block_ids == [3, 1]


def test_several_sequences_by_slot() -> None:
    keys, values = separate("int8", 0)
    metadata = KVMetadata((3, 2), (3, 2), LAYERS)
    data = KVCacheTransferData.from_paged(
        "r", keys, values, block_size=SIZE, metadata=metadata, slot_mapping=[8, 9, 10, 0, 1]
    )
    assert bits(data.tensors()[0]) == bits(torch.cat([keys[0][2, :3], keys[0][0, :2]]))


def test_latents() -> None:
    pools = [noise(layer, (BLOCKS, SIZE, 12)) for layer in range(LAYERS)]
    data = KVCacheTransferData.from_paged(
        "r", pools, None, block_size=SIZE, metadata=about(6, layout="ND"), block_ids=[4, 1]
    )
    assert bits(data.tensors()[1]) == bits(torch.cat([pools[1][4], pools[1][1, :2]]))


def test_an_empty_sequence() -> None:
    keys, values = separate("int8", 0)
    data = KVCacheTransferData.from_paged(
        "r", keys, values, block_size=SIZE, metadata=about(0), block_ids=[]
    )
    assert data.is_empty
    assert (data.block_ids, data.metadata.block_size) == ([], SIZE)


@pytest.mark.parametrize(("split", "side"), [(split_stacked, 0), (split_packed, 1)])
def test_k_is_the_first_half_and_v_the_second(split: Callable[..., Any], side: int) -> None:
    layers = [noise(n, (2, 2, SIZE, HEADS, DIM)) for n in range(2)]
    for number, part in enumerate(split(layers)):
        assert [pool.data_ptr() for pool in part] == [
            layer.select(side, number).data_ptr() for layer in layers
        ]
        assert [bits(pool) for pool in part] == [
            bits(layer.select(side, number)) for layer in layers
        ]


def test_a_dict_and_back_shares_the_pages() -> None:
    data = paged()
    again = KVCacheTransferData.from_dict(data.to_dict())
    assert again.difference(data) == ""
    assert all(a is b for a, b in zip(again.tensors(), data.tensors(), strict=True))


def test_difference_finds_one_byte() -> None:
    data, pools = paged(), separate("bfloat16", 1)
    pools[1][1][data.block_ids[2], 1, 2, 4] += 1
    assert data.difference(paged(pools=pools)) == "layer 1, V"
    pools = separate("bfloat16", 1)
    pools[1][1][data.block_ids[2], 2] += 1  # beyond the last token
    assert data.difference(paged(pools=pools)) == ""


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_a_file_holds_the_dense_cache(tmp_path: Path, by_slot: bool) -> None:
    data = paged(by_slot=by_slot)
    data.save(tmp_path / "a.safetensors")
    found = KVCacheTransferData.load(tmp_path / "a.safetensors")
    assert found.difference(data) == ""
    dense_copy(data).save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 10])
def test_a_prefix_of_pages(tmp_path: Path, tokens: int, by_slot: bool) -> None:
    data = paged(by_slot=by_slot)
    short = KVMetadata((tokens,), (9,), LAYERS)
    bundle = KVCacheBundle(
        "r", {"gen": data, "half": PrefixOf("gen", tokens, short), "same": SameAs("gen")}
    )
    for part, whole in zip(bundle["half"].tensors(), data.tensors(), strict=True):
        assert isinstance(part, PagedTensor)
        assert isinstance(whole, PagedTensor)
        assert part.pool is whole.pool
        assert bits(part) == bits(whole.dense()[:tokens])
    assert bundle.reused_nbytes == 4 * HEADS * DIM * 2 * (tokens + 10)
    bundle["half"].save(tmp_path / "half")  # it can be sent on its own
    assert KVCacheTransferData.load(tmp_path / "half").difference(bundle["half"]) == ""
    plan = bundle.plan()
    region = Mapping.anonymous(plan.nbytes).region
    digests = TorchCopier().gather(bundle.tensors(), plan, region)
    found = KVCacheBundle.from_region(plan.with_digests(digests), region)
    assert found.difference(bundle) == ""


# ---- what is refused


def build(
    keys: Any = None, values: Any = None, size: int = SIZE, tokens: int = 10, **other: Any
) -> KVCacheTransferData:
    first, second = separate("float32", 1)
    tables = {name: other.pop(name) for name in ("block_ids", "slot_mapping") if name in other}
    return KVCacheTransferData.from_paged(
        "r",
        first if keys is None else keys,
        second if values is None else values,
        block_size=size,
        metadata={**about(tokens), **other},
        **(tables or {"block_ids": [4, 2, 7]}),
    )


def pools(**at: Any) -> Pools:
    """One part's pools, with one or more replaced: `l1=...` is layer 1's."""
    found = separate("float32", 1)[0]
    for name, other in at.items():
        found[int(name[1:])] = other
    return found


def zeros(*shape: int, **other: Any) -> torch.Tensor:
    return torch.zeros(*shape, **other)


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda: build(block_ids=[4, 9, 7]), ["layer 0, K", "block id 9", "9 blocks"]),
        (lambda: build(None, pools(l1=zeros(7, SIZE, HEADS, DIM))),
         ["layer 1, V", "block id 7", "7 blocks"]),
        (lambda: build(block_ids=[4, -1, 7]), ["K and V", "block id -1"]),
        (lambda: build(block_ids=[4, 2, 4]), ["K and V of every layer", "block id 4", "twice"]),
        (lambda: build(block_ids=[4, 2]), ["K and V of every layer", "2 blocks of 4", "wanted 3"]),
        (lambda: build(block_ids=[1.0, 2, 3]), ["K and V", "integers"]),
        (lambda: build(block_ids=[]), ["0 blocks", "wanted 3"]),
        (lambda: build(slot_mapping=[*range(9), 36]), ["layer 0, K", "slot 36", "9 blocks"]),
        (lambda: build(slot_mapping=[*range(9), 3]), ["K and V", "slot 3", "twice"]),
        (lambda: build(slot_mapping=[*range(9), -1]), ["K and V", "slot -1"]),
        (lambda: build(slot_mapping=range(9)), ["9 slots", "10 tokens"]),
        (lambda: build(slot_mapping=range(11)), ["11 slots", "10 tokens"]),
        (lambda: build(slot_mapping=range(10), block_ids=[1, 2, 3]), ["either", "slot_mapping"]),
        (lambda: build(block_ids=None), ["either", "slot_mapping"]),
        (lambda: build(kv_lens=[4, 6], ropes=[1, 1]), ["2 kv_lens", "slot_mapping"]),
        (lambda: build(None, pools(l1=zeros(BLOCKS, SIZE, HEADS, 6))),
         ["layer 1, V", "3, 6]", "its K", "3, 5]"]),
        (lambda: build(None, pools(l0=zeros(BLOCKS + 1, SIZE, HEADS, DIM))),
         ["layer 0, V", "[10, 4", "its K", "[9, 4"]),
        (lambda: build(*(pools(l1=zeros(BLOCKS, SIZE, 2, DIM)),) * 2),
         ["layer 1, K", "[10, 2, 5]", "[10, 3, 5]"]),
        (lambda: build(None, [pool.half() for pool in pools()]), ["layer 0, V", "16", "32"]),
        (lambda: build(pools(l1=None)), ["layer 1, K", "missing"]),
        (lambda: build(None, pools(l0=None)), ["layer 0, V", "missing"]),
        (lambda: build(None, pools()[:1]), ["V: 1 layers", "num_layers is 2"]),
        (lambda: build(num_layers=3), ["K: 2 layers", "num_layers is 3"]),
        (lambda: build(size=8), ["layer 0, K", "[9, 4, 3, 5]", "[num_blocks, 8"]),
        (lambda: build(size=0), ["block_size 0"]),
        (lambda: build(block_size=16), ["block_size 4", "metadata says 16"]),
        (lambda: build(pools(l1=[[1]])), ["layer 1, K", "list"]),
        (lambda: build(pools(l0=zeros(9, 4, 3, 5, device="meta"))), ["layer 0, K", "meta"]),
        (lambda: build(pools(l0=zeros(9, 4))), ["layer 0, K", "[9, 4]"]),
        (lambda: build([zeros(9, 4, 15)] * 2, [zeros(9, 4, 15)] * 2), ["layer 0, K", "[10, 15]"]),
        (lambda: build([zeros(9, 4, 3, 5).long()] * 2, [zeros(9, 4, 3, 5).long()] * 2),
         ["layer 0, K", "int64"]),
        (lambda: build(layout="ND"), ["layout 'ND'", "1 pools", "2 given"]),
        (lambda: build(layout="HND"), ["layout 'HND'", "NHD, ND"]),
        (lambda: split_stacked([zeros(2, 9, 4, 3, 5), zeros(9, 2, 4, 3, 5)]),
         ["layer 1, K and V", "[9, 2, 4, 3, 5]", "[2, num_blocks"]),
        (lambda: split_packed([zeros(9, 2, 4, 3, 5), zeros(2, 9, 4, 3, 5)]),
         ["layer 1, K and V", "[2, 9, 4, 3, 5]", "[num_blocks, 2"]),
        (lambda: split_packed([zeros(9, 2, 4, 15)]), ["layer 0", "[9, 2, 4, 15]"]),
        (lambda: split_stacked([None]), ["layer 0", "NoneType"]),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_a_wrong_one_cannot_exist(make: Callable[[], Any], texts: list[str]) -> None:
    with pytest.raises(SchemaError) as caught:
        make()
    assert all(word in str(caught.value) for word in texts), str(caught.value)


def test_a_layer_may_not_differ_from_the_others() -> None:
    block_table = BlockTable.of_blocks([1], block_size=SIZE, tokens=3)
    other = BlockTable.of_blocks([1], block_size=SIZE, tokens=4)
    pool = zeros(2, SIZE, HEADS, DIM)
    for odd in (
        PagedTensor(pool, other),
        PagedTensor(pool.half(), block_table),
        zeros(3, HEADS, 6),
    ):
        blocks: LayerBlocks = {"key_cache": [PagedTensor(pool, block_table)], "value_cache": [odd]}
        with pytest.raises(SchemaError, match="layer 0, V"):
            KVCacheTransferData("r", blocks, (), about(3, num_layers=1))
    blocks = {"key_cache": [PagedTensor(pool, block_table)], "value_cache": [pool[0, :3]]}
    assert KVCacheTransferData("r", blocks, (), about(3, num_layers=1)).metadata.dtype == "float32"
