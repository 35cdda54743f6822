"""What the library itself refuses, whatever its callers have checked before, and its fence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest

from omni_kvlink._native import host
from support.devices.native_plans import FEATURES, NEEDS_LIBRARY, noise, using

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = NEEDS_LIBRARY

ROOT = Path(__file__).resolve().parents[2]
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]
Index: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]

BLOCK, BLOCKS = 256, 8
USED = 3
"""Blocks of the view in these tests."""


def address(array: Bytes | Index) -> int:
    return int(array.ctypes.data)


class Memory:
    """A pool of blocks, 512 bytes apart, and a payload of the same bytes in another order."""

    def __init__(self, index: list[int]) -> None:
        self.pool, self.payload = noise(2 * BLOCK * BLOCKS, 1), noise(4096, 2)
        self.index: Index = np.array(index, np.int64)
        self.before = self.pool.copy(), self.payload.copy()

    def view(self, limit: int = BLOCKS) -> host.PackedView:
        pool = (address(self.pool), self.pool.nbytes, BLOCK)
        view = host.packed_view(*pool, sizes=(USED, 1, 1, 1), strides=(2 * BLOCK, 0, 0, 0))
        return host.packed_indexed_view(view, address(self.index), limit=limit)

    def batch(self, nbytes: int = USED * BLOCK, view: host.PackedView = ()) -> host.CopyBatch:
        batch = host.CopyBatch(address(self.payload), self.payload.nbytes)
        batch.add(64, nbytes, view or self.view(), digest=False)
        return batch

    def refused(self, call: Callable[[], object], status: int, text: str) -> None:
        with pytest.raises(host.CopyFailed, match=text) as caught:
            call()
        assert caught.value.status == status
        assert np.array_equal(self.pool, self.before[0]), "written before it was refused"
        assert np.array_equal(self.payload, self.before[1]), "written before it was refused"


def test_a_valid_view_is_copied_both_ways() -> None:
    memory = Memory([5, 0, 2])
    memory.batch().gather()
    blocks = memory.pool.reshape(BLOCKS, 2, BLOCK)[:, 0]
    assert np.array_equal(memory.payload[64:][: USED * BLOCK], blocks[[5, 0, 2]].reshape(-1))
    memory.pool[:] = 0
    memory.batch().scatter(b"")
    assert np.array_equal(memory.payload[64:][: USED * BLOCK], blocks[[5, 0, 2]].reshape(-1))
    assert not blocks[[1, 3, 4, 6, 7]].any()


def test_a_target_that_is_indexed_twice() -> None:
    memory = Memory([5, 2, 5])
    memory.batch().gather()  # reading twice is fine
    memory = Memory([5, 2, 5])
    memory.refused(lambda: memory.batch().scatter(b""), host.OVERLAP, r"index\[2\] is 5, .* before")


@pytest.mark.parametrize("entry", [-1, -(1 << 63), BLOCKS, 1 << 40, (1 << 63) - 1])
@pytest.mark.parametrize("entry_number", range(USED))
def test_an_index_outside_the_pool(entry: int, entry_number: int) -> None:
    index = [5, 0, 2]
    index[entry_number] = entry
    memory = Memory(index)
    text = rf"index\[{entry_number}\] is {entry}; it must be below 8"
    memory.refused(lambda: memory.batch().gather(), host.BOUNDS, text)
    memory.refused(lambda: memory.batch().scatter(b""), host.BOUNDS, text)


def test_a_limit_beyond_the_pool() -> None:
    memory = Memory([5, 0, 2])
    view = memory.view(limit=BLOCKS + 1)
    memory.refused(lambda: memory.batch(view=view).gather(), host.BOUNDS, "in memory of 4096")
    memory.refused(lambda: memory.batch(view=view).scatter(b""), host.BOUNDS, "in memory of 4096")


@pytest.mark.parametrize("less", [0, 1, BLOCK - 1])
def test_the_last_block_may_be_partly_filled(less: int) -> None:
    memory = Memory([5, 0, 2])
    nbytes = USED * BLOCK - less
    memory.batch(nbytes).gather()
    blocks = memory.pool.reshape(BLOCKS, 2, BLOCK)[:, 0]
    assert np.array_equal(memory.payload[64:][:nbytes], blocks[[5, 0, 2]].reshape(-1)[:nbytes])
    assert np.array_equal(memory.payload[64 + nbytes :], memory.before[1][64 + nbytes :])


@pytest.mark.parametrize("nbytes", [1, 2 * BLOCK, USED * BLOCK + 1, 4000])
def test_an_indexed_view_of_another_size(nbytes: int) -> None:
    """More than its blocks hold, or so little that the last block would not be needed."""
    memory = Memory([5, 0, 2])
    text = f"a view of 768 bytes for a span of {nbytes}"
    memory.refused(lambda: memory.batch(nbytes).gather(), host.BOUNDS, text)
    memory.refused(lambda: memory.batch(nbytes).scatter(b""), host.BOUNDS, text)


@pytest.mark.parametrize("shift", [-767, -1, 0, 1, 767])
def test_a_view_that_is_its_own_payload(shift: int) -> None:
    memory = Memory([5, 0, 2])
    view = host.packed_flat_view(address(memory.payload) + 1000 + shift, 768)

    def batch() -> host.CopyBatch:
        batch = host.CopyBatch(address(memory.payload), memory.payload.nbytes)
        batch.add(1000, 768, view, digest=False)
        return batch

    memory.refused(lambda: batch().gather(), host.OVERLAP, "same memory")
    memory.refused(lambda: batch().scatter(b""), host.OVERLAP, "same memory")


@pytest.mark.parametrize("shift", [-768, 768])
def test_a_view_beside_its_place_in_the_payload(shift: int) -> None:
    payload = noise(4096, 2)
    expected = payload[1000 + shift :][:768].copy()
    batch = host.CopyBatch(address(payload), payload.nbytes)
    view = host.packed_flat_view(address(payload) + 1000 + shift, 768)
    batch.add(1000, 768, view, digest=False)
    batch.gather()
    assert np.array_equal(payload[1000:][:768], expected)


@pytest.mark.parametrize("stride", [0, 1, BLOCK - 1, 1 - BLOCK])
def test_a_target_that_overlaps_itself(stride: int) -> None:
    memory = Memory([0])
    view = host.packed_view(
        *(address(memory.pool), memory.pool.nbytes, BLOCK),
        offset=1024,
        sizes=(1, 1, 1, USED),
        strides=(0, 0, 0, stride),
    )
    memory.batch(view=view).gather()  # the payload only
    memory = Memory([0])
    view = (address(memory.pool), *view[1:])
    memory.refused(
        lambda: memory.batch(view=view).scatter(b""), host.OVERLAP, f"stride of {abs(stride)} bytes"
    )


def test_spans_of_a_payload_that_overlap() -> None:
    memory = Memory([5, 0, 2])
    batch = memory.batch()
    batch.add(
        64 + USED * BLOCK - 1, 1, host.packed_flat_view(address(memory.pool), 1), digest=False
    )
    memory.refused(batch.gather, host.OVERLAP, "copy 1: a span at 831 after one that ends at 832")


@pytest.mark.parametrize("verb", ["gather", "scatter", "digest", "verify"])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_digests_beyond_those_given(verb: str, given: int) -> None:
    """Three digests are needed; the library is told of fewer, and touches none behind them."""
    payload, tensor = noise(host.CHUNK * 3, 3), noise(host.CHUNK * 3, 4)
    before = payload.copy(), tensor.copy()
    batch = host.CopyBatch(address(payload), payload.nbytes)
    view = host.packed_flat_view(address(tensor), host.CHUNK + 1)
    batch.add(0, host.CHUNK + 1, view, digest=True)  # two digests
    batch.add(2 * host.CHUNK, 9, host.packed_flat_view(address(tensor), 9), digest=True)
    # `add` counts them right: the library is to refuse a caller that does not.
    batch._num_digests = given
    arguments = (bytes(4 * given),) if verb in ("scatter", "verify") else ()
    first = 0 if given < 2 else 2
    text = rf"copy {int(given == 2)}: digests {first} to {2 if given < 2 else 3} of {given}"
    with pytest.raises(host.CopyFailed, match=text) as caught:
        getattr(batch, verb)(*arguments)
    assert caught.value.status == host.BOUNDS
    assert np.array_equal(payload, before[0])
    assert np.array_equal(tensor, before[1])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("block", [3000, 4096, 1 << 16, (1 << 20) - 64, (1 << 20) + 64])
@pytest.mark.parametrize("gap_after_mib", [False, True])
def test_neighbours_across_a_digest_chunk(features: str, block: int, gap_after_mib: bool) -> None:
    """Blocks that follow each other in memory are copied as one piece, up to where they do not."""
    blocks = (3 << 20) // block + 2
    pool = noise((blocks + 1) * block, 5)
    index = np.arange(blocks)
    if gap_after_mib:  # the first block that begins in the second MiB, and all after it
        index[-(-(1 << 20) // block) :] += 1
    index[-1] = index[0]
    index[0] = blocks
    used = pool.reshape(-1, block)[index].reshape(-1)
    nbytes = len(used) - block // 2
    payload = np.zeros(nbytes, np.uint8)

    def batch() -> host.CopyBatch:
        view = host.packed_view(
            *(address(pool), pool.nbytes, block), sizes=(blocks, 1, 1, 1), strides=(block, 0, 0, 0)
        )
        indexed = host.packed_indexed_view(view, address(index), limit=blocks + 1)
        batch = host.CopyBatch(address(payload), nbytes, threads=1)
        batch.add(0, nbytes, indexed, digest=True)
        return batch

    with using(features):
        digests = batch().gather()
        assert np.array_equal(payload, used[:nbytes])
        expected = [
            host.crc32c(used[at : min(at + host.CHUNK, nbytes)])
            for at in range(0, nbytes, host.CHUNK)
        ]
        assert [
            int.from_bytes(digests[at : at + 4], "big") for at in range(0, len(digests), 4)
        ] == (expected)
        written = pool.copy()
        pool[:] = 0
        batch().scatter(digests)
    covered = np.zeros((blocks + 1, block), bool)
    covered[index] = True
    covered[index[-1], block - block // 2 :] = False
    assert np.array_equal(pool, np.where(covered.reshape(-1), written, 0))


FENCE = Path(__file__).with_name("fence.cpp")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="installed without the sources")
def test_a_fence_follows_the_stores_of_each_thread(tmp_path: Path) -> None:
    """By a kernel that notes its calls: no processor shows that a fence is missing."""
    sources = [str(path) for path in (ROOT / "csrc").glob("*.cpp") if path.name != "kernel.cpp"]
    program, include = str(tmp_path / "fence"), f"-I{ROOT / 'csrc'}"
    command = [str(COMPILER), "-std=c++17", "-O0", "-pthread", include, str(FENCE), *sources]
    built = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.stdout == "each of 3 calls: stored, then fenced\n", done.stdout


def test_the_fence_of_x86_is_an_instruction() -> None:
    if "neon" in FEATURES:
        pytest.skip("not this processor's")
    library = Path(host.__file__).with_name(host.LIBRARY)
    assert b"\x0f\xae\xf8" in library.read_bytes()  # sfence
