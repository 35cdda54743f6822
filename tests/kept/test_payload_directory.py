"""Payloads as files: whole or absent, checked at each load, within a budget, on any disk."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from omni_kvlink import BusyError, TensorTransferData
from omni_kvlink.errors import ConnectorError, WireError
from omni_kvlink.kept.payload_directory import PayloadDirectory, file_name
from omni_kvlink.payload.bundle import open_payload
from omni_kvlink.payload.manifest import Manifest
from support.payloads.random_caches import bits
from support.payloads.small_payloads import MAKERS, bytes_of, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_kvlink.payload.bundle import Payload

KEYS = [
    "a",
    "block/3f",
    "../../etc/passwd",
    "ümläut\n\0 🂡",
    "x" * 1024,
    "n@" + "0" * 32,
    "@",
    "a@b@c",
]
NBYTES = Manifest.decode(bytes_of(tensors("a"))).nbytes


def write(files: PayloadDirectory, data: Payload, *, digests: bool = True) -> bool:
    payload = bytes_of(data, digests=digests)
    return files.write(Manifest.decode(payload), payload)


def difference(files: PayloadDirectory, data: Payload) -> str:
    """Where the file of a payload differs from it; "absent" if there is none."""
    try:
        found = files.read(data.request_id)
    except WireError:
        return "absent"
    return "absent" if found is None else open_payload(*found).difference(data)  # type: ignore[arg-type]


def path_of(folder: Path, key: str) -> Path:
    return folder / file_name(key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def files(folder: Path) -> Iterator[PayloadDirectory]:
    with PayloadDirectory(folder, 1 << 20) as files:
        yield files


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_under_every_key(kind: str, key: str, files: PayloadDirectory) -> None:
    data = MAKERS[kind](key, seed=3)
    assert key not in files
    assert write(files, data)
    assert key in files
    assert difference(files, data) == ""
    assert {*os.listdir(files.path)} == {file_name(key), "store.lock"}


def test_a_file_is_one_that_other_programs_read(files: PayloadDirectory, folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    data = tensors("a", seed=1)
    write(files, data)
    read = safetensors.load_file(path_of(folder, "a"))
    assert bits(read["tensors/a"]) == bits(data["a"])


def test_all_files_are_back_after_a_restart(folder: Path) -> None:
    payloads = [tensors(f"k{number}", seed=number) for number in range(20)]
    with PayloadDirectory(folder, 1 << 20) as files:
        assert all(write(files, data) for data in payloads)
        nbytes = files.stats()["nbytes"]
    with PayloadDirectory(folder, 1 << 20) as files:
        assert files.stats()["files"] == 20
        assert files.stats()["nbytes"] == nbytes
        assert all(data.request_id in files for data in payloads)
        assert [difference(files, data) for data in payloads] == [""] * 20


def test_a_start_reads_no_file(folder: Path) -> None:
    with PayloadDirectory(folder, 1 << 20) as files:
        write(files, tensors("a"))
    path_of(folder, "a").write_bytes(b"no payload")
    with PayloadDirectory(folder, 1 << 20) as files:
        assert "a" in files
        assert files.stats()["damaged"] == 0
        assert difference(files, tensors("a")) == "absent"
        assert files.stats()["damaged"] == 1
        assert "a" not in files
    assert not path_of(folder, "a").exists()


def test_two_hundred_flipped_bits_are_two_hundred_misses(
    files: PayloadDirectory, folder: Path
) -> None:
    """Anywhere in a file: its length, its header, its tensors, its padding."""
    choose, data = random.Random(7), tensors("a", seed=9)
    path = path_of(folder, "a")
    assert write(files, data)
    whole = path.read_bytes()
    padding = [byte for byte in range(len(whole) - 300, len(whole)) if whole[byte] == 0]
    flipped = [choose.randrange(8 * len(whole)) for _ in range(160)]
    flipped += [8 * choose.choice(padding) + choose.randrange(8) for _ in range(20)]
    flipped += [choose.randrange(64) for _ in range(20)]
    for number, bit in enumerate(flipped):
        assert write(files, data)
        damaged = bytearray(path.read_bytes())
        assert damaged == whole
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert difference(files, data) == "absent", bit
        assert files.stats()["damaged"] == number + 1
        assert "a" not in files
        assert not path.exists()
    assert write(files, data)
    assert difference(files, data) == ""


def test_files_that_were_cut_grown_emptied_or_exchanged(
    files: PayloadDirectory, folder: Path
) -> None:
    data, path = tensors("a"), path_of(folder, "a")
    whole = bytes(bytes_of(data))
    other = bytes(bytes_of(tensors("b")))
    off = bytes(bytes_of(data, digests=False))
    cut = [whole[:size] for size in (len(whole) - 1, 400, 8, 0)]
    for count, wrong in enumerate([*cut, whole + b"\0", other, off, b"\xff" * 999], 1):
        write(files, data)
        path.write_bytes(wrong)
        assert difference(files, data) == "absent"
        assert files.stats()["damaged"] == count
        assert str(path) in files.last_error


def test_stale_memory_does_not_reach_the_disk(files: PayloadDirectory, folder: Path) -> None:
    data = tensors("a")
    payload = bytearray(bytes_of(data))
    manifest = Manifest.decode(bytes(payload))
    first, second = manifest.tensors[:2]
    start = manifest.header_nbytes
    gap = slice(start + first.stop, start + second.start)
    payload[gap] = b"\x55" * (gap.stop - gap.start)
    assert files.write(manifest, memoryview(payload))
    assert b"\x55\x55" not in path_of(folder, "a").read_bytes()
    assert difference(files, data) == ""


def test_a_file_that_somebody_removed(files: PayloadDirectory, folder: Path) -> None:
    write(files, tensors("a"))
    path_of(folder, "a").unlink()
    assert "a" in files
    assert difference(files, tensors("a")) == "absent"
    assert files.stats()["unreadable"] == 1
    assert "a" not in files
    assert files.stats()["nbytes"] == 0


def test_the_least_recently_used_files_are_removed(folder: Path) -> None:
    with PayloadDirectory(folder, 3 * NBYTES) as files:
        for key in "abc":
            write(files, tensors(key))
        assert difference(files, tensors("a")) == ""  # b is the oldest now
        write(files, tensors("d"))
        assert [key in files for key in "abcd"] == [True, False, True, True]
        assert files.stats()["evicted"] == 1
        assert files.stats()["nbytes"] == 3 * NBYTES
        assert not path_of(folder, "b").exists()


def test_the_order_of_use_outlives_a_restart(folder: Path) -> None:
    with PayloadDirectory(folder, 3 * NBYTES) as files:
        for number, key in enumerate("abc"):
            write(files, tensors(key))
            os.utime(path_of(folder, key), (number, number))
        assert difference(files, tensors("a")) == ""
    with PayloadDirectory(folder, NBYTES) as files:
        assert [key in files for key in "abc"] == [True, False, False]
        assert files.stats()["evicted"] == 2
    assert sorted(os.listdir(folder)) == [file_name("a")]


def test_a_payload_that_is_larger_than_the_budget(folder: Path) -> None:
    with PayloadDirectory(folder, NBYTES) as files:
        assert write(files, tensors("a"))
        large = TensorTransferData("large", {"x": tensors("a")["a"].repeat(100, 1)})
        assert not write(files, large)
        assert "a" in files  # nothing was removed for it
        assert files.stats()["too_large"] == 1


def test_a_payload_without_digests_is_refused(files: PayloadDirectory) -> None:
    assert not write(files, tensors("a"), digests=False)
    assert "a" not in files
    assert files.stats()["write_failed"] == 1


def test_withdrawn_files(files: PayloadDirectory, folder: Path) -> None:
    write(files, tensors("a"))
    assert files.remove("a")
    assert not files.remove("a")
    assert "a" not in files
    assert files.stats()["withdrawn"] == 1
    assert files.stats()["nbytes"] == 0
    assert os.listdir(folder) == ["store.lock"]


def test_another_identity_of_a_name(files: PayloadDirectory) -> None:
    write(files, tensors("n@1"))
    assert files.has_other_identity("n@2")
    assert not files.has_other_identity("n@1")
    assert not files.has_other_identity("m@2")
    write(files, tensors("n@2"))
    assert files.has_other_identity("n@1")
    files.remove("n@2")
    assert not files.has_other_identity("n@1")


def test_a_full_disk_is_counted(small_disk: Path) -> None:
    with PayloadDirectory(small_disk, 1 << 30) as files:
        written = [number for number in range(40) if write(files, tensors(f"k{number}"))]
        assert 1 <= len(written) < 40
        stats = files.stats()
        assert stats["written"] == len(written) == stats["files"]
        assert stats["write_failed"] == 40 - len(written)
        assert "make room there" in files.last_error
        assert {*os.listdir(small_disk)} == {
            "store.lock",
            *(file_name(f"k{number}") for number in written),
        }
        for number in written:
            assert difference(files, tensors(f"k{number}")) == ""
        files.remove("k0")
        assert write(files, tensors("k39"))  # it goes on once there is room


def test_a_disk_that_becomes_readonly(small_disk: Path, tmp_path: Path) -> None:
    readonly = tmp_path / "readonly"
    readonly.mkdir()
    with PayloadDirectory(small_disk, 1 << 30) as files:
        write(files, tensors("a"))
        subprocess.run(["mount", "--bind", str(small_disk), str(readonly)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(readonly)], check=True)
            files.path = str(readonly)
            assert not write(files, tensors("b"))
            assert files.stats()["write_failed"] == 1
            assert difference(files, tensors("a")) == ""
            assert files.remove("a")  # it is not there any more, wherever its file is
            assert difference(files, tensors("a")) == "absent"
            with pytest.raises(ConnectorError, match="give another --directory"):
                PayloadDirectory(readonly / "other", 1 << 30)
        finally:
            subprocess.run(["umount", str(readonly)], check=True)


def test_a_limit_on_the_size_of_files(files: PayloadDirectory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES - 1, hard))
    try:
        assert not write(files, tensors("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.stats()["write_failed"] == 1
    assert "ulimit -f" in files.last_error
    assert os.listdir(files.path) == ["store.lock"]
    assert write(files, tensors("a"))


def test_two_stores_of_one_directory(files: PayloadDirectory, folder: Path) -> None:
    with pytest.raises(BusyError, match="another store uses this directory"):
        PayloadDirectory(folder, 1 << 20)
    files.close()
    PayloadDirectory(folder, 1 << 20).close()


def test_a_directory_to_which_others_may_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConnectorError, match="nobody else can write"):
        PayloadDirectory(folder, 1 << 20)


def test_foreign_files_stay(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("mine")
    (folder / file_name("a")).mkdir()
    os.symlink("/etc/passwd", folder / file_name("b"))
    with PayloadDirectory(folder, 0) as files:
        assert files.stats()["files"] == 0
        assert "b" not in files
    assert len(os.listdir(folder)) == 3


WRITER = """
import sys
from support.payloads.random_caches import bits
from support.payloads.small_payloads import bytes_of
from omni_kvlink import TensorTransferData
from omni_kvlink.kept.payload_directory import PayloadDirectory
from omni_kvlink.payload.manifest import Manifest
import torch
with PayloadDirectory(sys.argv[1], 1 << 30) as files:
    for number in range(int(sys.argv[2]), 100_000):
        data = TensorTransferData(f"k{number}", {"x": torch.full((50_000,), number)})
        payload = bytes_of(data)
        assert files.write(Manifest.decode(payload), payload)
        print(number, flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_writer_that_is_killed(seed: int, folder: Path) -> None:
    """What it had reported is there, what it was writing is there whole or not at all."""
    choose, first = random.Random(seed), 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(folder), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(choose.randrange(1, 10)):
                last = int(writer.stdout.readline())
            for _ in range(choose.randrange(100_000)):
                pass  # some part of the next write
            writer.send_signal(signal.SIGKILL)
            rest = [int(line) for line in writer.stdout.read().split()]
        last = max([last, *rest])
        with PayloadDirectory(folder, 1 << 30) as files:
            assert not [name for name in os.listdir(folder) if name.endswith(".part")]
            count = files.stats()["files"]
            assert last + 1 <= count <= last + 2
            for number in range(count):
                data = TensorTransferData(f"k{number}", {"x": torch.full((50_000,), number)})
                assert difference(files, data) == ""
            assert files.stats()["damaged"] == 0
        first = count
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
