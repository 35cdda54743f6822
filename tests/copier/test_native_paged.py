"""Paged tensors into and out of a payload, compared with a loop over tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kvlink.copier import NativeCopier, TorchCopier
from omni_kvlink.errors import SchemaError
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from support.devices.native_plans import (
    FEATURES,
    NEEDS_LIBRARY,
    as_bytes,
    plan_of,
    tensor_of,
    using,
)
from support.payloads.strategies import EXAMPLES

Pool = Callable[[int, int, int, int, torch.dtype, int], torch.Tensor]


def plain(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([blocks, size, heads, dim], dtype, seed)


def stacked(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([2, blocks, size, heads, dim], dtype, seed)[seed % 2]


def packed_in_block(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([blocks, 2, size, heads, dim], dtype, seed)[:, seed % 2]


def packed_in_head(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    both = tensor_of([blocks, size, heads, 2 * dim], dtype, seed)
    return both[..., :dim] if seed % 2 else both[..., dim:]


def heads_first(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([blocks, heads, size, dim], dtype, seed).transpose(1, 2)


def fewer_heads(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([blocks, size, 2 * heads, dim], dtype, seed)[:, :, heads:]


def dims_first(
    blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    return tensor_of([blocks, heads, dim, size], dtype, seed).permute(0, 3, 1, 2)


POOLS = (plain, stacked, packed_in_block, packed_in_head, heads_first, fewer_heads, dims_first)


def naive(pool: torch.Tensor, block_table: BlockTable) -> torch.Tensor:
    """Read token by token."""
    tokens = []
    for token in range(block_table.tokens):
        if block_table.by_slot:
            block, slot = divmod(int(block_table.index[token]), block_table.block_size)
        else:
            block, slot = (
                int(block_table.index[token // block_table.block_size]),
                token % block_table.block_size,
            )
        tokens.append(pool[block, slot])
    return torch.stack(tokens)


@st.composite
def block_tables(draw: st.DrawFn) -> tuple[BlockTable, int]:
    size, blocks = draw(st.sampled_from([1, 3, 16, 32])), draw(st.integers(1, 12))
    tokens = draw(st.integers(1, blocks * size))
    shuffle = random.Random(draw(st.integers(0, 999)))
    if draw(st.booleans()):
        ids = list(range(blocks))
        if draw(st.booleans()):
            shuffle.shuffle(ids)
        return BlockTable.of_blocks(ids, block_size=size, tokens=tokens), blocks
    slots = list(range(blocks * size))
    kind = draw(st.sampled_from(["ascending", "in runs", "random"]))
    if kind == "random":
        shuffle.shuffle(slots)
    if kind == "in runs":
        slots = slots[len(slots) // 2 :] + slots[: len(slots) // 2]
    return BlockTable.of_slots(slots[:tokens], block_size=size), blocks


@NEEDS_LIBRARY
@pytest.mark.parametrize("features", FEATURES)
@settings(max_examples=EXAMPLES * 60, deadline=None)
@given(
    table=block_tables(),
    kinds=st.lists(st.sampled_from(POOLS), min_size=1, max_size=3),
    heads=st.integers(1, 4),
    dim=st.sampled_from([1, 5, 64, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
)
def test_against_a_loop(
    features: str,
    table: tuple[BlockTable, int],
    kinds: list[Pool],
    heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    block_table, blocks = table
    pools = [
        kind(blocks, block_table.block_size, heads, dim, dtype, seed)
        for seed, kind in enumerate(kinds)
    ]
    paged = [PagedTensor(pool, block_table) for pool in pools]
    dense_layers = [naive(pool, block_table) for pool in pools]
    plan = plan_of(dense_layers)
    ours, theirs = Mapping.anonymous(plan.nbytes).region, Mapping.anonymous(plan.nbytes).region
    with using(features):
        digests = NativeCopier().gather(paged, plan, ours)
        assert digests == TorchCopier().gather(dense_layers, plan, theirs)
        assert bytes(ours.view()) == bytes(theirs.view())

        # And back, into pools of other bytes: only the sequence's tokens change.
        fresh = [
            kind(blocks, block_table.block_size, heads, dim, dtype, seed + 50)
            for seed, kind in enumerate(kinds)
        ]
        expected = [pool.clone() for pool in fresh]
        for pool, tokens in zip(expected, dense_layers, strict=True):
            PagedTensor(pool, block_table).fill(tokens)
        NativeCopier().scatter(
            plan.with_digests(digests), ours, [PagedTensor(pool, block_table) for pool in fresh]
        )
        for pool, like, tokens in zip(fresh, expected, dense_layers, strict=True):
            assert as_bytes(pool) == as_bytes(like)
            assert as_bytes(naive(pool, block_table)) == as_bytes(tokens)
            assert as_bytes(PagedTensor(pool, block_table).dense()) == as_bytes(tokens)


@NEEDS_LIBRARY
def test_latents_and_large_blocks() -> None:
    ids = random.Random(1).sample(range(80), 61)
    block_table = BlockTable.of_blocks(torch.tensor(ids), block_size=64, tokens=61 * 64 - 7)
    pools = [tensor_of([80, 64, 576], torch.bfloat16, seed) for seed in range(3)]
    dense_layers = [naive(pool, block_table) for pool in pools]
    plan = plan_of(dense_layers)
    region = Mapping.anonymous(plan.nbytes).region
    digests = NativeCopier().gather(
        [PagedTensor(pool, block_table) for pool in pools], plan, region
    )
    theirs = Mapping.anonymous(plan.nbytes).region
    assert digests == TorchCopier().gather(dense_layers, plan, theirs)
    assert bytes(region.view()) == bytes(theirs.view())


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: BlockTable.of_blocks([1, 2], block_size=16, tokens=33),
            "2 blocks of 16.*wanted 3",
        ),
        (
            lambda: BlockTable.of_blocks([1, 2, 1], block_size=16, tokens=48),
            "block id 1 occurs twice",
        ),
        (
            lambda: BlockTable.of_blocks([1, -2], block_size=16, tokens=32),
            "block id -2 is negative",
        ),
        (lambda: BlockTable.of_blocks([0.5], block_size=16, tokens=3), "integers"),  # type: ignore[list-item]
        (lambda: BlockTable.of_blocks([1], block_size=0, tokens=3), "block_size 0"),
        (lambda: BlockTable.of_slots([5, 6, 5], block_size=16), "slot 5 occurs twice"),
        (lambda: BlockTable.of_slots([-1], block_size=16), "slot -1 is negative"),
    ],
)
def test_tables_that_cannot_be(make: Callable[[], BlockTable], complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        make()


def test_pools_that_lack_the_blocks() -> None:
    pool = torch.zeros(8, 16, 2, 4)
    blocks = BlockTable.of_blocks([7, 8], block_size=16, tokens=20)
    with pytest.raises(SchemaError, match="layer 3, K: block id 8 is outside the pool's 8 blocks"):
        PagedTensor(pool, blocks, "layer 3, K")
    with pytest.raises(SchemaError, match="layer 0, V: slot 128 is outside the pool's 8 blocks"):
        PagedTensor(pool, BlockTable.of_slots([3, 128], block_size=16), "layer 0, V")
    with pytest.raises(SchemaError, match=r"wanted \[num_blocks, 4, …\]"):
        PagedTensor(pool, BlockTable.of_blocks([0], block_size=4, tokens=2))


def test_blocks_beyond_the_last_token_are_left_out() -> None:
    block_table = BlockTable.of_blocks([4, 9, 999, 999], block_size=16, tokens=17)
    assert list(block_table.index) == [4, 9]


@NEEDS_LIBRARY
def test_a_layer_that_does_not_fit_is_named() -> None:
    block_table = BlockTable.of_blocks([0], block_size=16, tokens=3)
    paged = PagedTensor(torch.zeros(1, 16, 2, 4), block_table)
    plan = plan_of([torch.zeros(3, 2, 4), torch.zeros(4, 2, 4)])
    region = Mapping.anonymous(plan.nbytes).region
    with pytest.raises(SchemaError, match="layer 1, K"):
        NativeCopier().gather([paged, paged], plan, region)


@NEEDS_LIBRARY
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
    ("size", "heads", "dim", "tokens"),
    [
        (16, 8, 64, 3000),  # rows of 128 bytes, as many as one call takes; two MiB, and a part
        (16, 4, 128, 2051),  # a last block of three tokens
        (16, 8, 128, 700),
        (32, 8, 128, 999),  # a block has more rows than one call takes
        (16, 3, 96, 1500),  # quarters of a MiB begin amid rows
        (1, 8, 128, 400),  # a row for each slot
        (16, 12, 1024, 300),  # rows of 2 KiB
    ],
)
def test_rows_of_heads(features: str, size: int, heads: int, dim: int, tokens: int) -> None:
    """Blocks that lie head by head: read in memory's order, sent token by token."""
    blocks = -(-tokens // size)
    ids = random.Random(tokens).sample(range(blocks + 3), blocks)
    table = BlockTable.of_blocks(ids, block_size=size, tokens=tokens)
    pools = [heads_first(blocks + 3, size, heads, dim, torch.bfloat16, seed) for seed in range(2)]
    sources: Any = [PagedTensor(pool, table) for pool in pools]
    plan = plan_of(sources)
    ours, theirs = Mapping.anonymous(plan.nbytes).region, Mapping.anonymous(plan.nbytes).region
    with using(features):
        copier = NativeCopier()
        digests = copier.gather(sources, plan, ours)
        assert digests == TorchCopier().gather(sources, plan, theirs)
        assert bytes(ours.view()) == bytes(theirs.view())
        targets = [torch.zeros(blocks + 3, heads, size, dim, dtype=torch.bfloat16) for _ in pools]
        views = [PagedTensor(target.transpose(1, 2), table) for target in targets]
        copier.scatter(plan.with_digests(digests), ours, views)
    for pool, target in zip(pools, targets, strict=True):
        got, expected = (naive(one, table) for one in (target.transpose(1, 2), pool))
        assert as_bytes(got) == as_bytes(expected)
