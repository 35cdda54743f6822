from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import sys
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import CapacityError, ClosedError, KVCacheTransferData
from omni_kvlink.memory import mapping as memory_mapping
from omni_kvlink.memory.mapping import (
    F_ADD_SEALS,
    PAGE,
    STEP,
    Mapping,
    available_bytes,
    check_available,
    is_sealed,
    seal,
)
from omni_kvlink.memory.region import Lease, Region
from omni_kvlink.payload.tensor_memory import tensor_view
from omni_kvlink.testing.rig import until
from support.payloads.random_caches import cache, written

if TYPE_CHECKING:
    from collections.abc import Callable


def anonymous(nbytes: int = PAGE) -> Region:
    return Mapping.anonymous(nbytes).region


def test_a_region_is_written_through_its_view() -> None:
    region = anonymous()
    region.view(2, 5)[:] = b"abc"
    assert bytes(region.view(0, 7)) == b"\0\0abc\0\0"
    assert region.view().nbytes == region.nbytes == PAGE


def test_a_slice_is_the_same_memory() -> None:
    region = anonymous()
    part = region.slice(100, 28)
    part.view()[:] = b"x" * 28
    assert bytes(region.view(99, 129)) == b"\0" + b"x" * 28 + b"\0"
    assert part.address == region.address + 100


@pytest.mark.parametrize("span", [(-1, 1), (0, -1), (0, PAGE + 1), (PAGE, 1), (PAGE + 1, 0)])
def test_a_slice_stays_inside(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="region"):
        anonymous().slice(*span)


# ---- one owner


def lease() -> tuple[Lease, list[str]]:
    released: list[str] = []
    return Lease(anonymous(), lambda: released.append("released")), released


def test_release_happens_once() -> None:
    owner, released = lease()
    owner.release()
    owner.release()
    assert released == ["released"]


def test_leaving_the_block_releases_also_after_an_error() -> None:
    owner, released = lease()
    with pytest.raises(KeyError), owner:
        raise KeyError
    assert released == ["released"]


def test_use_after_release_raises() -> None:
    owner, _ = lease()
    owner.release()
    with pytest.raises(ClosedError):
        owner.region  # noqa: B018
    with pytest.raises(ClosedError):
        owner.move()


def test_a_moved_lease_releases_nothing() -> None:
    owner, released = lease()
    with owner:
        region = owner.region
        assert owner.move() is region
        with pytest.raises(ClosedError):
            owner.region  # noqa: B018
        with pytest.raises(ClosedError):
            owner.move()
    assert released == []


# ---- shared memory


def read_only(shared: Mapping) -> Mapping:
    return Mapping.readonly(os.dup(shared.fd), shared.nbytes)


def test_another_mapping_sees_what_is_written() -> None:
    shared = Mapping.shared("test", 3 * PAGE)
    other = read_only(shared)
    shared.region.view()[5:8] = b"abc"
    assert bytes(other.region.view(4, 9)) == b"\0abc\0"


def test_a_readonly_view_cannot_be_written() -> None:
    region = read_only(Mapping.shared("test", PAGE)).region
    for view in (region.view(), region.view(3, 9), region.slice(1, 5).view()):
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
        with pytest.raises(TypeError):
            view[:] = bytes(len(view))


def test_seals_forbid_every_other_way_to_write() -> None:
    shared = Mapping.shared("test", 2 * PAGE)
    fd = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
    try:
        assert is_sealed(shared.fd)
        assert is_sealed(fd)
        for number in (fd, shared.fd):
            for attack in (
                lambda n=number: os.ftruncate(n, PAGE),
                lambda n=number: os.ftruncate(n, 3 * PAGE),
                lambda n=number: os.write(n, b"x"),
                lambda n=number: os.pwrite(n, b"x", 0),
                lambda n=number: mmap.mmap(n, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE),
                lambda n=number: fcntl.fcntl(n, F_ADD_SEALS, 0x8),
            ):
                with pytest.raises(OSError) as caught:
                    attack()
                assert caught.value.errno == errno.EPERM
        mmap.mmap(fd, PAGE, mmap.MAP_SHARED, mmap.PROT_READ).close()
    finally:
        os.close(fd)
    shared.region.view()[0] = 7  # the owner still may


def test_unsealed_descriptors_are_recognized() -> None:
    plain = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    reading, writing = os.pipe()
    try:
        assert not is_sealed(plain)
        assert not is_sealed(reading)
    finally:
        for fd in (plain, reading, writing):
            os.close(fd)


SEAL, SHRINK, GROW, FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10  # linux/fcntl.h


@pytest.mark.parametrize("missing", [SEAL, SHRINK, GROW, FUTURE_WRITE])
def test_every_seal_is_required(missing: int) -> None:
    """Each alone allows what the others do not: to truncate, to write, or to seal otherwise."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, PAGE)
        fcntl.fcntl(fd, F_ADD_SEALS, (SEAL | SHRINK | GROW | FUTURE_WRITE) & ~missing)
        assert not is_sealed(fd)
        if missing == SEAL:
            fcntl.fcntl(fd, F_ADD_SEALS, SEAL)
            assert is_sealed(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("allocated", [0, 1, 3, 4])
def test_a_file_with_holes_is_not_sealed_memory(allocated: int) -> None:
    """A reader's access would allocate what its owner did not."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4 * PAGE)
        for page in range(allocated):
            os.pwrite(fd, b"x", page * PAGE)
        seal(fd)
        assert is_sealed(fd) is (allocated == 4)
    finally:
        os.close(fd)


def test_holes_cannot_be_made_later() -> None:
    """Neither by a mapping that may still be written to."""
    shared = Mapping.shared("test", 4 * PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    punch, keep_size, remove = 0x2, 0x1, 9  # linux/falloc.h, mman.h
    start, nbytes = ctypes.c_long(0), ctypes.c_long(PAGE)
    assert libc.fallocate(shared.fd, punch | keep_size, start, nbytes) == -1
    assert ctypes.get_errno() == errno.EPERM
    assert libc.madvise(ctypes.c_void_p(shared.region.address), nbytes, remove) == -1
    assert is_sealed(shared.fd)


def test_a_descriptor_is_closed_with_its_mapping() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    shared = Mapping.shared("test", PAGE)
    other = read_only(shared)
    assert set(os.listdir("/proc/self/fd")) > before
    del shared, other
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_too_much_is_refused_before_the_kernel_is_asked() -> None:
    """A size that the kernel would refuse, too, so that a missing check allocates nothing."""
    nbytes = 1 << 63
    for make in (Mapping.anonymous, lambda n: Mapping.shared("test", n), check_available):
        with pytest.raises(CapacityError, match="available on this machine") as caught:
            make(nbytes)
        assert caught.value.requested == nbytes
        assert 0 < caught.value.free < nbytes
    check_available(available_bytes() // 2)


# ---- lifetime of the memory


def mapped_ranges() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as lines:
        return [
            tuple(int(side, 16) for side in line.split()[0].split("-"))  # type: ignore[misc]
            for line in lines
        ]


def is_mapped(address: int) -> bool:
    return any(start <= address < stop for start, stop in mapped_ranges())


@pytest.mark.parametrize("holder", ["region", "slice", "view", "span"])
def test_memory_stays_mapped_while_anything_points_to_it(holder: str) -> None:
    mapping = Mapping.shared("test", 64 * PAGE)
    mapping.region.view()[:3] = b"abc"
    address = mapping.region.address
    holders: dict[str, Any] = {
        "region": mapping.region,
        "slice": mapping.region.slice(0, 3),
        "view": mapping.region.view(0, 3),
        "span": mapping.region.span,
    }
    kept = holders[holder]
    del holders
    collected = weakref.ref(mapping)
    del mapping
    gc.collect()
    assert collected() is None
    assert is_mapped(address)
    assert bytes(memoryview(kept.span if isinstance(kept, Region) else kept))[:3] == b"abc"
    del kept
    gc.collect()
    assert not is_mapped(address)


def test_the_finalizer_waits_for_the_last_tensor() -> None:
    manifest, mapping = written(cache())
    region = mapping.region.slice(0, manifest.nbytes)
    ended: list[str] = []
    weakref.finalize(region.span, ended.append, "last view freed")
    data = KVCacheTransferData.from_region(manifest, region)
    del mapping, region
    tensor = data.tensors()[3]
    assert isinstance(tensor, torch.Tensor)
    kept = tensor[1:].view(torch.uint8)
    expected = kept.clone()
    data.close()
    del data, tensor
    gc.collect()
    assert ended == []
    assert torch.equal(kept, expected)
    part = kept[0, 0, :2].numpy()
    del kept
    gc.collect()
    assert ended == []
    del part
    gc.collect()
    assert ended == ["last view freed"]


def test_each_slice_has_a_finalizer_of_its_own() -> None:
    region = anonymous()
    first, second = region.slice(0, 8), region.slice(8, 8)
    ended: list[int] = []
    weakref.finalize(first.span, ended.append, 1)
    weakref.finalize(second.span, ended.append, 2)
    del first
    gc.collect()
    assert ended == [1]


def test_a_tensor_is_a_view_and_no_copy() -> None:
    manifest, mapping = written(cache())
    for spec in manifest.tensors:
        tensor = tensor_view(mapping.region, spec, manifest.header_nbytes)
        start = mapping.region.address + manifest.header_nbytes + spec.start
        assert tensor.data_ptr() == start
        assert tensor.data_ptr() % 256 == 0


# ---- allocating


def test_other_threads_run_while_pages_are_allocated() -> None:
    """The GIL is released within each step, not only between them."""
    rounds, is_over = [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            rounds[0] += 1
            time.sleep(0)  # gives the GIL back at once

    during = list[int]()

    def is_wanted() -> bool:  # called between steps, here always with the GIL
        during.append(rounds[0])
        return True

    def has_run() -> bool:
        during.clear()
        Mapping.anonymous(4 * STEP, is_wanted)
        return len(set(during)) > 1

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(600)  # no thread is interrupted: it runs until it gives the GIL back
    try:
        until(has_run, "another thread ran during a step")
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


MAKES = [Mapping.anonymous, partial(Mapping.shared, "steps"), partial(Mapping.for_readers, "steps")]


@pytest.mark.parametrize("make", MAKES)
def test_memory_that_is_not_wanted_any_more_is_given_back(
    make: Callable[[int, Callable[[], bool]], Mapping],
) -> None:
    answers = [True, True, False]
    with pytest.raises(ClosedError, match="not wanted"):
        make(6 * STEP, lambda: answers.pop(0))
    assert answers == []
    gc.collect()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory
            assert "memfd:steps" not in os.readlink(f"/proc/self/fd/{fd}")


def resident_bytes(region: Region) -> int:
    """The bytes of a region's mapping whose pages are mapped."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.split("-")[0] == f"{region.address:x}":
                break
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


@pytest.mark.parametrize("advice", [None, 9999])
def test_every_page_is_mapped(monkeypatch: pytest.MonkeyPatch, advice: int | None) -> None:
    """By advice to the kernel, or where that is too old for it, by touching them."""
    if advice is not None:
        # Advice that this kernel does not know stands for an older kernel.
        monkeypatch.setattr(memory_mapping, "_MADV_POPULATE_WRITE", advice)
    region = Mapping.shared("populated", STEP + 3 * PAGE).region
    assert resident_bytes(region) == STEP + 3 * PAGE
    assert not any(region.view())
