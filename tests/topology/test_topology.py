"""Heads between stages with different numbers of ranks: the plan, views, refusals."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_kvlink import (
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    PagedTensor,
    PrefixOf,
    SameAs,
    SchemaError,
    Shard,
)
from omni_kvlink.payload.views import dense
from omni_kvlink.testing.caches import Recipe, make_bundle
from omni_kvlink.topology import Topology, head_targets, merge_heads, shard_of, slice_heads
from support.payloads.paged import LAYOUTS, Layout, paged
from support.payloads.random_caches import bits, cache, empty
from support.payloads.sharded import blank_like, contents, shard_of_cache, shard_of_latent, whole

_numbers = itertools.count()

WORLDS = st.sampled_from([1, 2, 4])
DEGREES = [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 1), (1, 4)]
HEADS = [1, 2, 4, 8]
"""With two and four ranks: fewer heads than ranks, as many, more."""


def sent(data: KVCacheTransferData, topology: Topology, rank: int) -> list[KVCacheTransferData]:
    """What a receiver gets, made by each sender from its own cache."""
    return [
        part.of(shard_of_cache(data, topology.sender(part.shard.rank)))
        for part in topology.sent_to(rank)
    ]


# ---- the sender of each part


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    senders, receivers = draw(WORLDS), draw(WORLDS)
    many = max(senders, receivers)
    heads = draw(st.sampled_from([1, 2, 4]) | st.integers(1, 4).map(lambda times: times * many))
    return Topology(heads=heads, senders=senders, receivers=receivers)


@given(topologies())
def test_every_rank_gets_its_heads_once(topology: Topology) -> None:
    for rank in range(topology.receivers):
        parts = topology.sent_to(rank)
        start, stop = topology.receiver(rank).heads
        numbers = [head for part in parts for head in range(*part.shard.heads)]
        assert numbers == list(range(start, stop))
        for part in parts:
            first, last = topology.sender(part.shard.rank).heads
            assert first <= part.shard.heads[0] < part.shard.heads[1] <= last


@given(topologies())
def test_both_sides_see_the_same_parts(topology: Topology) -> None:
    by = [part for rank in range(topology.senders) for part in topology.sent_by(rank)]
    to = {part for rank in range(topology.receivers) for part in topology.sent_to(rank)}
    assert set(by) == to
    assert len(by) == len(to)
    assert len({part.key("r") for part in by}) == len(by)


@given(topologies())
def test_ranks_with_the_same_heads_share_the_receivers(topology: Topology) -> None:
    served = [
        sum(len(part.receivers) for part in topology.sent_by(rank))
        for rank in range(topology.senders)
    ]
    if topology.senders <= topology.receivers:
        assert min(served) == max(served)
    else:
        assert max(served) <= 1


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((4, 1, 2), [(0, (0, 2), (0,)), (0, (2, 4), (1,))]),
        ((4, 2, 1), [(0, (0, 2), (0,)), (1, (2, 4), (0,))]),
        ((4, 2, 2), [(0, (0, 2), (0,)), (1, (2, 4), (1,))]),
        ((2, 2, 4), [(0, (0, 1), (0, 1)), (1, (1, 2), (2, 3))]),
        ((2, 4, 2), [(0, (0, 1), (0,)), (2, (1, 2), (1,))]),
        ((1, 2, 4), [(0, (0, 1), (0, 1)), (1, (0, 1), (2, 3))]),
        ((1, 4, 1), [(0, (0, 1), (0,))]),
    ],
)
def test_the_plan_in_numbers(numbers: tuple[int, int, int], expected: list[Any]) -> None:
    parts = Topology(*numbers).parts()
    assert [(part.shard.rank, part.shard.heads, part.receivers) for part in parts] == expected


@pytest.mark.parametrize(
    ("rank", "world", "heads", "message"),
    [
        (0, 4, 6, "6 KV heads on 4 ranks"),
        (0, 2, 3, "3 KV heads on 2 ranks"),
        (0, 2, 0, "0 KV heads"),
        (2, 2, 4, "rank 2 of 2"),
        (-1, 2, 4, "rank -1 of 2"),
        (0, 0, 4, "rank 0 of 0"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused(
    rank: int, world: int, heads: int, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        shard_of(rank, world, heads=heads)


def test_each_stage_is_checked() -> None:
    for senders, receivers in ((1, 3), (3, 1)):
        with pytest.raises(SchemaError, match="4 KV heads on 3 ranks"):
            Topology(heads=4, senders=senders, receivers=receivers)


# ---- slices and what they make together


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("senders", "receivers"), DEGREES)
def test_merged_is_what_the_rank_would_have(senders: int, receivers: int, heads: int) -> None:
    topology = Topology(heads, senders, receivers)
    data = whole(heads=heads, ropes=[2], image_shape=(8, 4), extra={"a": 1})
    for rank in range(receivers):
        shard = topology.receiver(rank)
        parts = sent(data, topology, rank)[::-1]  # in any order
        merged = merge_heads(parts, shard)
        assert merged.difference(shard_of_cache(data, shard)) == ""
        assert merged.metadata.shard == shard


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("senders", "receivers"), DEGREES)
def test_targets_are_views_of_the_receivers_tensors(
    senders: int, receivers: int, heads: int
) -> None:
    topology = Topology(heads, senders, receivers)
    data = whole(heads=heads)
    for rank in range(receivers):
        expected = shard_of_cache(data, topology.receiver(rank))
        mine, parts = blank_like(expected), sent(data, topology, rank)
        for part, target in zip(parts, head_targets(parts, into=mine), strict=True):
            for source, view in zip(part.tensors(), target.tensors(), strict=True):
                dense(view).view(torch.int16).copy_(dense(source).view(torch.int16))
        assert contents(mine) == contents(expected)


def test_a_slice_borrows() -> None:
    data = whole(layers=1, block_ids=[4, 2])
    part = slice_heads(data, 1, 3)
    for mine, theirs in zip(part.tensors(), data.tensors(), strict=True):
        assert isinstance(mine, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        assert mine.data_ptr() == theirs[:, 1].data_ptr()
        assert mine.stride() == theirs.stride()
    assert part.metadata == dataclasses.replace(data.metadata, shard=Shard(0, 1, (1, 3)))
    assert part.block_ids == [4, 2]


def test_one_part_is_not_copied() -> None:
    part = slice_heads(whole(), 0, 2)
    merged = merge_heads([part], Shard(0, 2, (0, 2)))
    assert all(a is b for a, b in zip(merged.tensors(), part.tensors(), strict=True))
    assert merged.request_id == "r"


def test_heads_are_numbered_as_in_the_model() -> None:
    data = whole()
    mine = shard_of_cache(data, shard_of(1, 2, heads=4))
    expected = [bits(dense(view)[:, 3:4]) for view in data.tensors()]
    assert contents(slice_heads(mine, 3, 4)) == expected
    assert contents(slice_heads(slice_heads(mine, 2, 4), 3, 4)) == expected
    assert slice_heads(slice_heads(mine, 2, 4), 3, 4).request_id == "r/rank1of2:3-4"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_slot", [False, True], ids=["blocks", "slots"])
def test_pages_are_sliced_in_their_pool(layout: Layout, by_slot: bool) -> None:
    data = paged(pools=layout("bfloat16", 1), by_slot=by_slot)
    part = slice_heads(data, 1, 3)
    for mine, theirs in zip(part.tensors(), data.tensors(), strict=True):
        assert isinstance(mine, PagedTensor)
        assert isinstance(theirs, PagedTensor)
        assert mine.block_table is theirs.block_table
        assert mine.pool.data_ptr() == theirs.pool[:, :, 1].data_ptr()
        assert bits(mine.dense()) == bits(theirs.dense()[:, 1:3])
    again = merge_heads([part, slice_heads(data, 0, 1)], Shard(0, 1, (0, 3)))
    assert contents(again) == contents(data)


def test_latents_are_replicated() -> None:
    topology = Topology(heads=1, senders=2, receivers=4)
    data = cache(shape=(5, 6))
    for rank in range(4):
        (part,) = topology.sent_to(rank)
        mine = shard_of_latent(data, topology.sender(part.shard.rank))
        merged = merge_heads([part.of(mine)], topology.receiver(rank))
        assert all(a is b for a, b in zip(merged.tensors(), data.tensors(), strict=True))
    with pytest.raises(SchemaError, match="a latent has no heads to slice"):
        slice_heads(data, 0, 2)


def test_empty_caches() -> None:
    data = empty()
    parts = [slice_heads(data, 0, 1), slice_heads(data, 1, 2)]
    merged = merge_heads(parts, Shard(0, 1, (0, 2)))
    assert merged.is_empty
    assert merged.metadata.shard == Shard(0, 1, (0, 2))


def test_bundles_stay_bundles() -> None:
    """Prefixes and twins cost no bytes in a part, and none in what is merged."""
    data = make_bundle(Recipe("b", heads=4))
    parts = [slice_heads(data, 0, 1), slice_heads(data, 1, 4)]
    for part, (start, stop) in zip(parts, ((0, 1), (1, 4)), strict=True):
        assert len(part.tensors()) == len(data.tensors())
        for name in data:
            expected = [bits(dense(view)[:, start:stop]) for view in data[name].tensors()]
            assert contents(part[name]) == expected
            assert part[name].metadata.shard == Shard(0, 1, (start, stop))
    merged = merge_heads(parts, Shard(0, 1, (0, 4)))
    assert isinstance(merged.branches["cfg_text"], PrefixOf)
    assert isinstance(merged.branches["cfg_img"], SameAs)
    assert {name: contents(merged[name]) for name in merged} == {
        name: contents(data[name]) for name in data
    }
    assert merged["cfg_text"].metadata.ropes == data["cfg_text"].metadata.ropes


# ---- refused


def renamed(data: KVCacheTransferData, **changes: Any) -> KVCacheTransferData:
    """A part whose sender had other metadata."""
    metadata = dataclasses.replace(data.metadata, **changes)
    return KVCacheTransferData(data.request_id, data.layer_blocks, (), metadata)


FIRST, SECOND = ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "rank 0 of 1, heads 0…4: no parts"),
        ([FIRST], "rank 0 of 1, heads 0…4: heads 2…4 are missing"),
        ([SECOND], "rank 0 of 1, heads 0…4: heads 0…2 are missing"),
        ([(0, 1), (3, 4)], "heads 1…3 are missing"),
        ([FIRST, FIRST, SECOND], "rank 0 of 1, heads 0…2: they come twice"),
        ([FIRST, (1, 4)], "rank 0 of 1, heads 1…4: they come twice"),
        ([FIRST, (2, 5)], "rank 0 of 1, heads 2…5: they are outside 0…4"),
    ],
)
def test_heads_complete_and_once(slices: list[tuple[int, int]], message: str) -> None:
    data = whole(heads=5)
    parts = [slice_heads(data, *heads) for heads in slices]
    with pytest.raises(SchemaError, match=message):
        merge_heads(parts, Shard(0, 1, (0, 4)))
    with pytest.raises(SchemaError, match=message):
        head_targets(parts, into=whole())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ropes": (9,)}, r"rank 0 of 1, heads 2…4: .*ropes \(9,\), in a part \(5,\)"),
        ({"kv_lens": (2, 3), "ropes": (1, 1)}, r"kv_lens \(2, 3\), in a part \(5,\)"),
        ({"image_shape": (1, 2)}, "image_shape"),
        ({"extra": {"a": 1}}, "extra"),
        ({"block_size": 4}, "block_size"),
    ],
)
def test_parts_of_different_caches(changes: dict[str, Any], message: str) -> None:
    data = whole()
    parts = [slice_heads(data, *FIRST), renamed(slice_heads(data, *SECOND), **changes)]
    with pytest.raises(SchemaError, match=message):
        merge_heads(parts, Shard(0, 1, (0, 4)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (cache("r", shape=(6, 4, 3), dtype="bfloat16"), "kv_lens"),
        (cache("r", shape=(5, 4, 3), dtype="float16"), "dtype"),
        (cache("r", shape=(5, 4, 3), dtype="bfloat16", layers=3), "num_layers"),
        (cache("r", shape=(5, 4, 7), dtype="bfloat16"), r"head_dim \[7\], in a part \[3\]"),
        (cache("q", shape=(5, 4, 3), dtype="bfloat16"), "'q/rank0of1:2-4' is no part of 'r'"),
    ],
    ids=["length", "dtype", "layers", "head_dim", "request"],
)
def test_parts_that_do_not_belong_together(other: KVCacheTransferData, message: str) -> None:
    parts = [slice_heads(whole(), *FIRST), slice_heads(other, *SECOND)]
    with pytest.raises(SchemaError, match=message):
        merge_heads(parts, Shard(0, 1, (0, 4)))


def test_a_part_has_a_key_and_a_shard() -> None:
    with pytest.raises(SchemaError, match=r"metadata.shard is missing"):
        merge_heads([whole()], Shard(0, 1, (0, 4)))


@pytest.mark.parametrize(
    "into",
    [
        cache(shape=(6, 4, 3), dtype="bfloat16"),
        whole(ropes=[1]),
        whole(layers=3),
        cache(shape=(5, 4, 7), dtype="bfloat16"),
    ],
    ids=["length", "ropes", "layers", "head_dim"],
)
def test_targets_must_fit(into: KVCacheTransferData) -> None:
    parts = [slice_heads(whole(), *FIRST), slice_heads(whole(), *SECOND)]
    with pytest.raises(SchemaError, match="the target: branch 'kv' has"):
        head_targets(parts, into=into)


@pytest.mark.parametrize("heads", [(1, 3), (3, 5), (2, 2), (3, 2)])
def test_heads_that_the_cache_does_not_have(heads: tuple[int, int]) -> None:
    mine = shard_of_cache(whole(), shard_of(1, 2, heads=4))
    with pytest.raises(SchemaError, match=f"rank 1 of 2, heads {heads[0]}…{heads[1]}.*2…4"):
        slice_heads(mine, *heads)


def test_a_sender_sends_its_own_heads_only() -> None:
    first, second = Topology(heads=4, senders=2, receivers=1).parts()
    mine = shard_of_cache(whole(), first.shard)
    with pytest.raises(SchemaError, match=r"rank 0 of 2, rank 1 of 2, heads 2…4 is required"):
        second.of(mine)
    with pytest.raises(SchemaError, match=r"rank 0 of 1, .* is required; set metadata.shard"):
        first.of(whole())


def test_bundles_of_other_branches() -> None:
    data = make_bundle(Recipe("b", heads=2))
    part = slice_heads(data, 0, 1)
    fewer = KVCacheBundle("b", {name: data.branches[name] for name in ("gen", "other")})
    prefix = data.branches["cfg_text"]
    assert isinstance(prefix, PrefixOf)
    shorter = KVMetadata((1,), (1,), num_layers=2, block_size=16, image_shape=(64, 48))
    moved = KVCacheBundle("b", {**data.branches, "cfg_text": PrefixOf("other", 1, shorter)})
    for other, message in ((fewer, "branches gen, other"), (moved, "not the same reference")):
        with pytest.raises(SchemaError, match=message):
            merge_heads([part, slice_heads(other, 1, 2)], Shard(0, 1, (0, 2)))
    single = slice_heads(whole("b", heads=2), 1, 2)
    with pytest.raises(SchemaError, match="is a KVCacheTransferData, a part KVCacheBundle"):
        merge_heads(list[KVCacheTransferData | KVCacheBundle]([part, single]), Shard(0, 1, (0, 2)))
    mixed = KVCacheBundle("r", {"a": shard_of_cache(whole(), Shard(1, 2, (0, 4))), "b": whole()})
    with pytest.raises(SchemaError, match="of several ranks"):
        slice_heads(mixed, 0, 1)
