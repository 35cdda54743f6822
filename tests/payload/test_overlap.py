"""Whether targets share memory, compared with the sets of their bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_kvlink import SchemaError
from omni_kvlink.payload.overlap import check_distinct, find_overlap
from omni_kvlink.payload.paged import BlockTable, PagedTensor
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from omni_kvlink.payload.views import TensorView

SIZE = 4


def covered(view: TensorView) -> set[int]:
    """The addresses of a view's bytes, the simplest way: of its elements' numbers in the memory."""
    memory = view.pool if isinstance(view, PagedTensor) else view
    storage = memory.untyped_storage()
    numbers = torch.arange(storage.nbytes() // memory.itemsize)
    numbers = numbers.as_strided(memory.shape, memory.stride(), memory.storage_offset())
    if isinstance(view, PagedTensor):
        table = view.block_table
        blocks = range(table.tokens)
        positions = [
            divmod(int(table.index[token]), SIZE)
            if table.by_slot
            else (int(table.index[token // SIZE]), token % SIZE)
            for token in blocks
        ]
        numbers = torch.stack([numbers[position] for position in positions])
    starts = storage.data_ptr() + numbers.reshape(-1) * memory.itemsize
    return {start + byte for start in starts.tolist() for byte in range(memory.itemsize)}


@st.composite
def dense_views(draw: st.DrawFn, storage: torch.Tensor) -> torch.Tensor:
    shape = [draw(st.integers(1, 4)) for _ in range(3)]
    strides, reach = [0, 0, 0], 1
    for dim in draw(st.permutations(range(3))):
        strides[dim] = reach + draw(st.sampled_from([0, 0, 1, 2, 5]))
        reach += (shape[dim] - 1) * strides[dim]
    offset = draw(st.integers(0, storage.numel() - reach)) if reach < storage.numel() else 0
    if reach > storage.numel():
        return storage[:1].view(1, 1, 1)
    return storage.as_strided(shape, strides, offset)


@st.composite
def paged_views(draw: st.DrawFn, storage: torch.Tensor) -> PagedTensor:
    """K or V of a pool in one of the layouts of engines, anywhere in the storage."""
    blocks, heads, dim = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    half = draw(st.integers(0, 1))
    count = 2 * blocks * SIZE * heads * dim
    flat = storage[draw(st.sampled_from([0, 0, 1, dim, SIZE])) :][:count]
    kind = draw(st.sampled_from(["stacked", "packed", "heads first", "in head"]))
    if kind == "stacked":
        pool = flat.view(2, blocks, SIZE, heads, dim)[half]
    elif kind == "packed":
        pool = flat.view(blocks, 2, SIZE, heads, dim)[:, half]
    elif kind == "heads first":
        pool = flat.view(blocks, 2, heads, SIZE, dim)[:, half].transpose(1, 2)
    else:
        pool = flat.view(blocks, SIZE, heads, 2 * dim)[..., half * dim :][..., :dim]
    if draw(st.booleans()):
        slots = draw(st.lists(st.integers(0, blocks * SIZE - 1), min_size=1, unique=True))
        return PagedTensor(pool, BlockTable.of_slots(slots, block_size=SIZE))
    ids = draw(st.lists(st.integers(0, blocks - 1), min_size=1, unique=True))
    tokens = draw(st.integers(len(ids) * SIZE - SIZE + 1, len(ids) * SIZE))
    return PagedTensor(pool, BlockTable.of_blocks(ids, block_size=SIZE, tokens=tokens))


@settings(max_examples=EXAMPLES * 400, deadline=None)
@given(st.data())
def test_against_the_sets_of_bytes(data: st.DataObject) -> None:
    storage = torch.zeros(256, dtype=data.draw(st.sampled_from([torch.int16, torch.uint8])))
    either = st.one_of(dense_views(storage), paged_views(storage))
    views: list[TensorView] = data.draw(st.lists(either, min_size=2, max_size=3))
    sets = [covered(view) for view in views]
    pairs = [
        (one, other)
        for other in range(len(views))
        for one in range(other)
        if sets[one] & sets[other]
    ]
    found = find_overlap(views)
    assert found in pairs if pairs else found is None


def halves_of_a_pool() -> list[TensorView]:
    """K and V of two layers in one pool, which lie between each other, and share no byte."""
    pool = torch.zeros(2, 8, 2, SIZE, 2, 8)
    table = BlockTable.of_blocks([5, 0, 3], block_size=SIZE, tokens=10)
    return [PagedTensor(pool[layer, :, half], table) for layer in range(2) for half in range(2)]


def two_requests_of_a_pool(shared: int) -> list[TensorView]:
    pool = torch.zeros(8, SIZE, 2, 8)
    ids = ([5, 0, 3], [shared, 7])
    tables = [BlockTable.of_blocks(each, block_size=SIZE, tokens=len(each) * SIZE) for each in ids]
    return [PagedTensor(pool, table) for table in tables]


def columns(gap: int) -> list[TensorView]:
    """Heads of one tensor of `[tokens, heads, dim]`."""
    whole = torch.zeros(100, 8, 16)
    return [whole[:, :4], whole[:, 4 - gap :]]


@pytest.mark.parametrize(
    ("views", "found"),
    [
        (halves_of_a_pool(), None),
        (two_requests_of_a_pool(6), None),
        (two_requests_of_a_pool(3), (0, 1)),
        (columns(0), None),
        (columns(1), (0, 1)),
        ([torch.zeros(9)[:5], torch.zeros(9)[5:], torch.zeros(0)], None),
    ],
)
def test_what_engines_have(views: list[TensorView], found: tuple[int, int] | None) -> None:
    assert find_overlap(views) == found
    names = ["first", "second", "third", "fourth"]
    if found is None:
        check_distinct(views, names.__getitem__)
    else:
        with pytest.raises(ValueError, match="targets of first and of second share memory"):
            check_distinct(views, names.__getitem__)


@pytest.mark.parametrize("strides", [(0, 8, 1), (8, 0, 1), (8, 7, 1), (1, 1, 1)])
def test_elements_that_share_memory(strides: tuple[int, int, int]) -> None:
    target = torch.zeros(100).as_strided((3, 2, 8), strides)
    with pytest.raises(SchemaError, match=re.escape(f"second: a target with strides {strides}")):
        check_distinct([torch.zeros(1), target], ["first", "second"].__getitem__)
