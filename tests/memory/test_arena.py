from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import omni_kvlink.memory.arena
from omni_kvlink import CapacityError, ClosedError
from omni_kvlink.memory.arena import GRAIN, Arena, ArenaPool
from omni_kvlink.memory.block import Block, Holder
from omni_kvlink.memory.mapping import STEP, Mapping
from omni_kvlink.testing.rig import until
from support.payloads.strategies import EXAMPLES
from support.processes.line_counts import count_lines
from support.processes.line_interrupts import interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

steps = settings(max_examples=EXAMPLES * 60, stateful_step_count=40, deadline=None)


def holes(nbytes: int, blocks: dict[int, int]) -> list[tuple[int, int]]:
    """Return (length, offset) of every gap between blocks, computed the simple way."""
    gaps, at = [], 0
    for offset, length in sorted(blocks.items()):
        if offset > at:
            gaps.append((offset - at, at))
        at = offset + length
    if nbytes > at:
        gaps.append((nbytes - at, at))
    return gaps


class ArenaModel(RuleBasedStateMachine):
    SIZE = 64

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(self.SIZE)
        self.model: dict[int, int] = {}

    blocks = Bundle("blocks")

    @rule(target=blocks, nbytes=st.integers(1, 40))
    def allocate(self, nbytes: int) -> int | None:
        fitting = [hole for hole in holes(self.SIZE, self.model) if hole[0] >= nbytes]
        assert (self.arena.largest_hole >= nbytes) is bool(fitting)
        if not fitting:
            with pytest.raises(CapacityError) as caught:
                self.arena.allocate(nbytes)
            assert (caught.value.requested, caught.value.free) == (nbytes, self.arena.largest_hole)
            return None
        offset = self.arena.allocate(nbytes)
        assert offset == min(fitting)[1]
        self.model[offset] = nbytes
        return offset

    @rule(offset=consumes(blocks))
    def free(self, offset: int | None) -> None:
        if offset is not None:
            self.arena.free(offset)
            del self.model[offset]

    @invariant()
    def agrees_with_the_model(self) -> None:
        gaps = holes(self.SIZE, self.model)
        assert self.arena.largest_hole == max(gaps, default=(0, 0))[0]
        assert self.arena.free_nbytes == sum(length for length, _ in gaps)
        assert self.arena.blocks == len(self.model)

    def teardown(self) -> None:
        for offset in self.model:
            self.arena.free(offset)
        assert self.arena.largest_hole == self.SIZE


ArenaModel.TestCase.settings = steps
TestArena = ArenaModel.TestCase


def test_best_fit_keeps_the_large_hole() -> None:
    arena = Arena(100)
    small, _, large, _ = (arena.allocate(n) for n in (10, 5, 30, 5))
    arena.free(large)
    arena.free(small)
    assert arena.allocate(10) == small
    assert arena.allocate(30) == large


def test_freeing_twice_raises() -> None:
    arena = Arena(100)
    offset = arena.allocate(10)
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)


@pytest.mark.parametrize("nbytes", [0, -1, 101])
def test_sizes_that_cannot_be_allocated(nbytes: int) -> None:
    with pytest.raises(CapacityError):
        Arena(100).allocate(nbytes)


# ---- the pool


@pytest.fixture(autouse=True, scope="module")
def small_arenas() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omni_kvlink.memory.arena, "MIN_ARENA", 4 * GRAIN)
        yield


class PoolModel(RuleBasedStateMachine):
    """Predicts every decision of a pool from what it made, retired, reserved and freed."""

    QUOTA = 10 * GRAIN + 100

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.used: dict[Block, int] = {}
        self.made = 0
        self.pool = ArenaPool(self.make, self.QUOTA, self.retire)

    def make(self, nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        self.sizes[self.made] = nbytes
        self.made += 1
        assert sum(self.sizes.values()) <= self.QUOTA
        return Mapping.anonymous(nbytes)

    def retire(self, number: int) -> None:
        assert not self.of(number)
        del self.sizes[number]

    def of(self, arena: int) -> dict[int, int]:
        return {block.offset: block.nbytes for block in self.used if block.arena == arena}

    def free_nbytes(self) -> int:
        """The largest block that could be reserved now."""
        largest = [
            length
            for number, size in self.sizes.items()
            for length, _ in holes(size, self.of(number))
        ]
        taken = sum(size for number, size in self.sizes.items() if self.of(number))
        return max([*largest, self.QUOTA - taken])

    blocks = Bundle("blocks")

    @rule(target=blocks, nbytes=st.integers(1, 12 * GRAIN), mark=st.integers(1, 255))
    def reserve(self, nbytes: int, mark: int) -> Block | None:
        rounded = -(-nbytes // GRAIN) * GRAIN
        free = self.free_nbytes()
        if rounded > free:
            with pytest.raises(CapacityError) as caught:
                self.pool.reserve(nbytes)
            assert (caught.value.requested, caught.value.free) == (rounded, free)
            return None
        fits = [
            (max(length for length, _ in gaps), number)
            for number, size in self.sizes.items()
            if (gaps := [gap for gap in holes(size, self.of(number)) if gap[0] >= rounded])
        ]
        before = self.made
        block = self.pool.reserve(nbytes)
        assert block.nbytes == rounded
        assert (self.made > before) is (not fits)
        assert not fits or block.arena == min(fits)[1]
        self.pool.region(block).view()[:] = bytes([mark]) * rounded
        self.used[block] = mark
        return block

    @rule(block=consumes(blocks))
    def free(self, block: Block | None) -> None:
        if block is not None:
            assert set(self.pool.region(block).view()) == {self.used[block]}
            del self.used[block]
            self.pool.free(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.pool.stats() == {
            "waiting": 0,
            "quota": self.QUOTA,
            "mapped": sum(self.sizes.values()),
            "used": sum(block.nbytes for block in self.used),
            "arenas": len(self.sizes),
            "blocks": len(self.used),
            "prefault": {"requested": 0, "mapped": 0, "milliseconds": 0, "error": ""},
        }
        for arena in self.sizes:
            at = 0
            for offset, length in sorted(self.of(arena).items()):
                assert offset >= at
                at = offset + length
            assert at <= self.sizes[arena]


PoolModel.TestCase.settings = steps
TestArenaPool = PoolModel.TestCase


def pool(pages: int = 4, *, keep: bool = True) -> ArenaPool:
    return ArenaPool(Mapping.anonymous, pages * GRAIN, keep=keep)


def test_memory_is_reused() -> None:
    arenas = pool()
    first = arenas.reserve(GRAIN)
    address = arenas.region(first).address
    arenas.free(first)
    assert arenas.region(arenas.reserve(GRAIN)).address == address


def test_without_keep_each_block_has_an_arena_of_its_own() -> None:
    retired: list[int] = []
    arenas = ArenaPool(Mapping.anonymous, 8 * GRAIN, retired.append, keep=False)
    blocks = [arenas.reserve(n * GRAIN) for n in (1, 2, 1)]
    assert [block.arena for block in blocks] == [0, 1, 2]
    assert [block.offset for block in blocks] == [0, 0, 0]
    assert arenas.stats()["mapped"] == 4 * GRAIN
    arenas.free(blocks[1])
    assert retired == [1]
    assert arenas.stats()["mapped"] == 2 * GRAIN


@pytest.mark.parametrize(("grains", "dropped"), [(1, []), (2, [0]), (3, [0, 1]), (4, [0, 1, 2])])
def test_no_more_empty_arenas_are_dropped_than_a_new_one_takes(
    grains: int, dropped: list[int]
) -> None:
    """The others keep their pages, which the next payload need not map."""
    retired: list[int] = []
    arenas = ArenaPool(Mapping.anonymous, 4 * GRAIN, retired.append, min_arena=GRAIN)
    blocks = [arenas.reserve(GRAIN) for _ in range(3)]
    for block in blocks:
        arenas.free(block)
    arenas.reserve(grains * GRAIN)
    assert retired == dropped


def test_prefault_makes_the_first_reserve_cheap() -> None:
    made: list[int] = []

    def make(nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        made.append(nbytes)
        return Mapping.anonymous(nbytes)

    arenas = ArenaPool(make, 8 * GRAIN)
    arenas.prefault(5 * GRAIN)
    arenas.reserve(5 * GRAIN)
    assert made == [5 * GRAIN]


def test_a_failed_mapping_releases_its_quota() -> None:
    fail = [True]

    def make(nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        if fail.pop():
            raise CapacityError("none", requested=nbytes)
        return Mapping.anonymous(nbytes)

    arenas = ArenaPool(make, 4 * GRAIN)
    with pytest.raises(CapacityError, match="none"):
        arenas.reserve(GRAIN)
    assert arenas.stats()["mapped"] == 0
    fail.append(False)
    assert arenas.reserve(4 * GRAIN).nbytes == 4 * GRAIN


def test_a_waiting_reserve_is_woken_by_a_free() -> None:
    arenas = pool()
    blocks = [arenas.reserve(GRAIN) for _ in range(4)]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(arenas.reserve, 2 * GRAIN, timeout=600)
        until_waiting(arenas, 1)
        arenas.free(blocks[1])
        until_waiting(arenas, 1)  # one page is free, two are requested
        assert not waiting.done()
        arenas.free(blocks[2])
        assert waiting.result().offset == GRAIN


def until_waiting(arenas: ArenaPool, threads: int) -> None:
    """Wait until so many threads wait for memory, and none has been woken to look again."""
    # `stats()` counts those who wait; that they look again after a wake-up is seen in their locks.
    waiters = arenas._waiters
    until(
        lambda: len(waiters) == threads and all(waiter.locked() for waiter in list(waiters)),
        f"{threads} threads wait",
    )


def test_a_timeout_names_the_requested_and_the_free_bytes() -> None:
    arenas = pool()
    arenas.reserve(3 * GRAIN)
    start = time.monotonic()
    with pytest.raises(CapacityError, match="quota") as caught:
        arenas.reserve(2 * GRAIN, timeout=0.2)
    assert time.monotonic() - start >= 0.2
    assert (caught.value.requested, caught.value.free) == (2 * GRAIN, GRAIN)


def test_more_than_the_quota_is_refused_without_waiting() -> None:
    with pytest.raises(CapacityError):
        pool().reserve(5 * GRAIN, timeout=3600)


def test_close_wakes_waiting_threads_and_leaves_regions_usable() -> None:
    arenas = pool()
    block = arenas.reserve(4 * GRAIN)
    region = arenas.region(block)
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(arenas.reserve, GRAIN, timeout=3600) for _ in range(3)]
        until_waiting(arenas, 3)
        arenas.close()
        for waiter in waiting:
            with pytest.raises(ClosedError):
                waiter.result()
    region.view()[:] = b"x" * region.nbytes
    arenas.free(block)
    with pytest.raises(ClosedError):
        arenas.region(block)
    with pytest.raises(ClosedError):
        arenas.reserve(1)


def test_close_ends_the_growth_of_a_pool() -> None:
    """A put that maps gigabytes does not go on doing so after its link was closed."""
    answers: list[bool] = []

    def make(nbytes: int, is_wanted: Callable[[], bool]) -> Mapping:
        def is_still_wanted() -> bool:
            if answers:
                arenas.close()
            answers.append(is_wanted())
            return answers[-1]

        return Mapping.anonymous(nbytes, is_still_wanted)

    arenas = ArenaPool(make, 8 * STEP)
    with pytest.raises(ClosedError):
        arenas.reserve(4 * STEP)
    assert answers == [True, False]
    assert arenas.stats()["mapped"] == 0


def test_many_threads_share_a_pool() -> None:
    arenas = pool(16)
    inside: dict[int, int] = {}
    lock = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            block = arenas.reserve(chance.randint(1, 6) * GRAIN, timeout=600)
            region = arenas.region(block)
            region.view()[:] = bytes([seed]) * region.nbytes
            pages = range(region.address, region.address + region.nbytes, GRAIN)
            with lock:
                assert not inside.keys() & set(pages)
                inside.update(dict.fromkeys(pages, seed))
            with lock:
                assert set(region.view()) == {seed}
                for page in pages:
                    del inside[page]
            arenas.free(block)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(1, 5)]:
            done.result()
    stats = arenas.stats()
    assert (stats["used"], stats["blocks"]) == (0, 0)
    assert stats["mapped"] <= 16 * GRAIN


def test_a_share_takes_no_more_than_the_quota() -> None:
    pool, first, second = ArenaPool(Mapping.anonymous, 2 * GRAIN), Holder(), Holder()
    assert pool.share(2 * GRAIN, first)
    assert not pool.share(1, second)
    pool.release(first)
    assert not pool.share(2 * GRAIN + 1, first)
    assert pool.share(2 * GRAIN, first)


def arenas_with_gaps() -> tuple[ArenaPool, list[Holder]]:
    """A pool with blocks of which every second one is freed, and the owners of the others."""
    arenas = ArenaPool(Mapping.anonymous, 16 * GRAIN, min_arena=16 * GRAIN)
    owners = [Holder() for _ in range(8)]
    for owner in owners:
        arenas.reserve(GRAIN, owner)
    for owner in owners[::2]:
        arenas.release(owner)
    return arenas, owners[1::2]


@pytest.mark.parametrize("call", ["reserve", "merge", "fill"])
def test_an_interrupt_at_any_line_loses_no_block_and_gives_none_twice(call: str) -> None:
    """What it cuts is completed by the next call: the owner has a block, or the pool has it."""
    for number in itertools.count():
        arenas, owners = arenas_with_gaps()
        owner = Holder()
        calls: dict[str, Callable[[], object]] = {
            "reserve": partial(arenas.reserve, 3 * GRAIN, owner),
            "merge": partial(arenas.release, owners[1]),
            "fill": partial(arenas.try_reserve, GRAIN, owner),
        }
        was_interrupted = interrupted(number, calls[call], [])
        arenas.release(owners[2])
        owners += [owner, *(Holder() for _ in range(8))]
        for other in owners[-8:]:
            arenas.try_reserve(GRAIN, other)
        parts = [one.block for one in owners if one.block is not None]
        pages = [
            (arena, page)
            for arena, offset, nbytes in parts
            for page in range(offset, offset + nbytes, GRAIN)
        ]
        assert len(set(pages)) == len(pages)
        stats = arenas.stats()
        assert (stats["used"], stats["blocks"]) == (len(pages) * GRAIN, len(parts))
        for one in owners:
            arenas.release(one)
        assert arenas.try_reserve(16 * GRAIN) is not None  # all of the arena is one hole again
        if not was_interrupted:
            break
    assert number > 20


def test_a_block_among_many_costs_no_more_than_one_among_few() -> None:
    """Nothing is copied that grows with the number of live blocks."""
    arena = Arena(1 << 40)
    offsets = [arena.allocate(GRAIN) for _ in range(20_000)]
    for offset in offsets[::2]:
        arena.free(offset)
    tracemalloc.start()
    try:
        arena.free(arena.allocate(GRAIN))
        arena.free(offsets[1])
        assert tracemalloc.get_traced_memory()[1] < 4 * GRAIN
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("keep", [True, False])
def test_a_block_among_many_arenas_takes_no_more_steps_than_among_few(*, keep: bool) -> None:
    """Kept payloads fill hundreds of arenas, and each put, eviction and `stats` asks the pool."""

    def steps_among(count: int) -> dict[str, int]:
        arenas = ArenaPool(Mapping.anonymous, count * GRAIN, keep=keep, min_arena=GRAIN)
        owners = [Holder() for _ in range(count)]
        for owner in owners:
            arenas.reserve(GRAIN, owner)
        middle, last = owners[count // 2], owners[-1]
        calls: dict[str, Callable[[], object]] = {
            "no room": lambda: arenas.try_reserve(GRAIN),
            "stats": arenas.stats,
            "release": partial(arenas.release, middle),
            "reserve": partial(arenas.reserve, GRAIN, middle),
            "release, the last": partial(arenas.release, last),
            "reserve again": partial(arenas.reserve, GRAIN, last),
        }
        steps = {name: count_lines(call) for name, call in calls.items()}
        assert arenas.stats()["used"] == count * GRAIN
        return steps

    few, many = steps_among(4), steps_among(200)
    assert many == few


@pytest.mark.parametrize("call", ["reserve", "release", "grow", "drop"])
def test_an_interrupt_at_any_line_forgets_the_room_of_no_arena(call: str) -> None:
    """Whatever it cuts, all arenas can be filled afterwards, each block once."""
    for number in itertools.count():
        arenas = ArenaPool(Mapping.anonymous, 5 * GRAIN, min_arena=GRAIN)
        owners = [Holder() for _ in range(4)]
        for owner in owners:
            arenas.reserve(GRAIN, owner)
        arenas.release(owners[1])
        arenas.release(owners[3])
        new = Holder()
        calls: dict[str, Callable[[], object]] = {
            "reserve": partial(arenas.try_reserve, GRAIN, new),
            "release": partial(arenas.release, owners[2]),
            "grow": partial(arenas.reserve, 2 * GRAIN, new),
            "drop": partial(arenas.reserve, 3 * GRAIN, new),
        }
        was_interrupted = interrupted(number, calls[call], [])
        arenas.release(new)
        for owner in owners:
            arenas.release(owner)
        owners = [Holder() for _ in range(5)]
        for owner in owners:
            arenas.reserve(GRAIN, owner)
        blocks = {owner.block for owner in owners}
        assert len(blocks) == 5
        stats = arenas.stats()
        assert (stats["used"], stats["blocks"], stats["mapped"]) == (5 * GRAIN, 5, 5 * GRAIN)
        if not was_interrupted:
            break
    assert number > 10


def test_the_first_arenas_are_no_more_than_a_reader_should_map() -> None:
    arenas = ArenaPool(Mapping.anonymous, 8 * GRAIN, min_arena=GRAIN)
    for _ in range(4):
        arenas.reserve(GRAIN)
    assert arenas.find_first(3 * GRAIN) == [0, 1, 2]
    assert arenas.find_first(GRAIN - 1) == []
    sealed = ArenaPool(Mapping.anonymous, 8 * GRAIN, keep=False)
    sealed.reserve(GRAIN)
    assert sealed.find_first(3 * GRAIN) == []


def test_the_cyclic_collector_forgets_a_block() -> None:
    """Tens of thousands of live payloads must not make its runs long."""
    arenas, owner = pool(), Holder()
    arenas.reserve(GRAIN, owner)
    gc.collect()
    assert not gc.is_tracked(owner.block)
