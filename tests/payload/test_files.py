from __future__ import annotations

import errno
import os
import resource
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from omni_kvlink import (
    CapacityError,
    ClosedError,
    FileError,
    IntegrityError,
    KVCacheBundle,
    KVCacheTransferData,
    KVMetadata,
    PrefixOf,
    SchemaError,
    WireError,
)
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.payload.views import dense
from support.payloads import strategies
from support.payloads.random_caches import DTYPES, bits, cache, empty, written
from support.payloads.strategies import EXAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def bundle() -> KVCacheBundle:
    prefix = PrefixOf("gen", 2, KVMetadata((2,), (1,), 2))
    return KVCacheBundle(
        "r", {"gen": cache(), "cfg_text": prefix, "mla": cache(shape=(3, 8)), "none": empty()}
    )


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 7), (5, 9)])
def test_save_and_load(tmp_path: Path, dtype: str, shape: tuple[int, ...], mmap: bool) -> None:
    data = cache(dtype=dtype, shape=shape)
    data.save(tmp_path / "a.safetensors")
    assert KVCacheTransferData.load(tmp_path / "a.safetensors", mmap=mmap).difference(data) == ""
    assert os.listdir(tmp_path) == ["a.safetensors"]


@settings(
    max_examples=EXAMPLES * 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(strategies.bundles())
def test_save_and_load_a_bundle(tmp_path: Path, data: KVCacheBundle) -> None:
    data.save(tmp_path / "b.safetensors")
    assert KVCacheBundle.load(tmp_path / "b.safetensors").difference(data) == ""


def test_a_file_is_the_payload_byte_for_byte(tmp_path: Path) -> None:
    bundle().save(tmp_path / "b")
    _, mapping = written(bundle())
    assert (tmp_path / "b").read_bytes() == bytes(mapping.region.view())


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    data = cache()
    data.save(tmp_path / "a")
    kept = KVCacheTransferData.load(tmp_path / "a").tensors()[3]
    (tmp_path / "a").unlink()
    assert bits(kept) == bits(data.tensors()[3])


def test_loading_leaves_no_descriptor_open(tmp_path: Path) -> None:
    cache().save(tmp_path / "a")
    KVCacheTransferData.load(tmp_path / "a")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        KVCacheTransferData.load(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_other_kind_is_named(tmp_path: Path) -> None:
    bundle().save(tmp_path / "b")
    cache().save(tmp_path / "a")
    with pytest.raises(SchemaError, match=r"b holds a KVCacheBundle: KVCacheBundle\.load"):
        KVCacheTransferData.load(tmp_path / "b")
    with pytest.raises(
        SchemaError, match=r"a holds a KVCacheTransferData: KVCacheTransferData\.load"
    ):
        KVCacheBundle.load(tmp_path / "a")


def test_a_loaded_cache_is_a_copy(tmp_path: Path) -> None:
    """It keeps its bytes when the file is written to, and when it is truncated; it is writable."""
    data = cache()
    path = tmp_path / "a"
    data.save(path)
    loaded = KVCacheTransferData.load(path)
    with open(path, "r+b") as file:
        file.write(b"x" * path.stat().st_size)
    assert loaded.difference(data) == ""
    os.truncate(path, 0)
    assert loaded.difference(data) == ""
    tensor = dense(loaded.tensors()[0])
    tensor.zero_()
    assert not tensor.any()


def test_a_mapped_cache_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache(seed=1).save(path)
    loaded = KVCacheTransferData.load(path, mmap=True)
    other = cache(seed=2)
    other.save(tmp_path / "b")
    path.write_bytes((tmp_path / "b").read_bytes())
    assert loaded.difference(other) == ""


def test_a_loaded_cache_is_inherited_by_forked_children(tmp_path: Path) -> None:
    """It is the caller's own memory, unlike that of a link."""
    data = cache()
    data.save(tmp_path / "a")
    loaded = KVCacheTransferData.load(tmp_path / "a")
    child = os.fork()
    if child == 0:
        os._exit(len(loaded.difference(data)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    """A sparse file claims to be of any size."""
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(CapacityError, match="available"):
        KVCacheTransferData.load(tmp_path / "a")


# ---- damage


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (0, "branch 'gen', layer 0, K"),
        (1, "branch 'gen', layer 0, V"),
        (3, "branch 'gen', layer 1, V"),
        (5, "branch 'mla', layer 1, latent"),
    ],
)
def test_a_flipped_bit_is_located(tmp_path: Path, number: int, where: str) -> None:
    path = tmp_path / "b"
    bundle().save(path)
    payload = bytearray(path.read_bytes())
    manifest = Manifest.decode(bytes(payload))
    payload[manifest.header_nbytes + manifest.tensors[number].stop - 1] ^= 0x10
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match=where):
        KVCacheBundle.load(path)


def test_a_flipped_bit_of_a_large_tensor_is_located_to_the_mib(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache(layers=1, shape=(5, 1 << 10, 1 << 7)).save(path)
    payload = bytearray(path.read_bytes())
    manifest = Manifest.decode(bytes(payload))
    payload[manifest.header_nbytes + manifest.tensors[1].start + (1 << 20)] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match=r"layer 0, V: .*1048576.*MiB 1 of 3"):
        KVCacheTransferData.load(path)


def test_two_swapped_tensors_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache().save(path)
    payload = bytearray(path.read_bytes())
    manifest = Manifest.decode(bytes(payload))
    key, value = (
        slice(manifest.header_nbytes + spec.start, manifest.header_nbytes + spec.stop)
        for spec in manifest.tensors[:2]
    )
    payload[key], payload[value] = payload[value], payload[key]
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match="layer 0, K"):
        KVCacheTransferData.load(path)


def test_no_truncation_loads(tmp_path: Path) -> None:
    cache().save(tmp_path / "a")
    payload = (tmp_path / "a").read_bytes()
    for length in {0, 1, 7, 8, 9, 100, 1023, 1024, 1025, len(payload) - 1}:
        (tmp_path / "b").write_bytes(payload[:length])
        with pytest.raises(WireError):
            KVCacheTransferData.load(tmp_path / "b")


@pytest.mark.parametrize("what", [b"", b"\0" * 4096, b"not a payload, but text\n" * 50])
def test_other_files_are_refused(tmp_path: Path, what: bytes) -> None:
    (tmp_path / "x").write_bytes(what)
    with pytest.raises(WireError):
        KVCacheTransferData.load(tmp_path / "x")


def test_a_missing_file_is_the_builtin_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KVCacheTransferData.load(tmp_path / "none")


# ---- saving is all or nothing


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """What a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with no_file_larger_than(1024), pytest.raises(OSError):
        cache().save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache(seed=1).save(path)
    with no_file_larger_than(1024), pytest.raises(OSError):
        cache(seed=2).save(path)
    closed = cache(seed=3)
    closed.close()
    with pytest.raises(ClosedError):
        closed.save(path)
    assert KVCacheTransferData.load(path).difference(cache(seed=1)) == ""
    assert os.listdir(tmp_path) == ["a"]


def test_a_tensor_that_changed_its_shape_fails_before_the_file_appears(tmp_path: Path) -> None:
    data = cache()
    dense(data.tensors()[2]).resize_(3, 2, 3)
    with pytest.raises(SchemaError, match="layer 1, K"):
        data.save(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_name_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="folder: Is a directory; save to another path") as raised:
        cache().save(tmp_path / "folder")
    assert raised.value.errno == errno.EISDIR
    assert os.listdir(tmp_path) == ["folder"]


def test_saving_over_a_file_in_use_leaves_its_readers_theirs(tmp_path: Path) -> None:
    path = tmp_path / "a"
    cache(seed=1).save(path)
    mapped = KVCacheTransferData.load(path, mmap=True)
    cache(seed=2).save(path)
    assert mapped.difference(cache(seed=1)) == ""
    assert KVCacheTransferData.load(path).difference(cache(seed=2)) == ""
