"""`kvlink inspect`, in this process and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from omni_kvlink.cli.commands import run
from omni_kvlink.errors import IntegrityError
from omni_kvlink.payload.manifest import Manifest
from omni_kvlink.testing.caches import Recipe
from support.payloads.broken_headers import CASES
from support.payloads.payload_files import flip, saved
from support.payloads.small_payloads import bundle, metadata_alone, nested

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from omni_kvlink.payload.bundle import Payload

Captured = pytest.CaptureFixture[str]


def kvlink(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_kvlink.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_bundle_is_shown_as_a_table(tmp_path: Path, capsys: Captured) -> None:
    saved(bundle("req-1"), tmp_path / "a.safetensors")
    assert run(["inspect", str(tmp_path / "a.safetensors")]) == 0
    printed = capsys.readouterr().out
    for text in ("KVCacheBundle 'req-1'", "gen ", "[3, 2, 4]", "NHD", "float32", "2 of gen", "1.0"):
        assert text in printed, text
    assert "4 tensors, 4 digests: every byte is as it was committed" in printed
    assert max(map(len, printed.splitlines())) <= max(80, len(str(tmp_path)) + 16)


@pytest.mark.parametrize("data", [nested(), metadata_alone()], ids=["nested", "no tensors"])
def test_other_payloads_are_shown(data: Payload, tmp_path: Path, capsys: Captured) -> None:
    saved(data, tmp_path / "a.safetensors")
    assert run(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert "every byte is as it was committed" in capsys.readouterr().out


def test_json_has_the_header(tmp_path: Path, capsys: Captured) -> None:
    manifest = saved(bundle("req-1"), tmp_path / "a.safetensors")
    assert run(["inspect", "--json", str(tmp_path / "a.safetensors")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["request_id"] == "req-1"
    assert document["nbytes"] == manifest.nbytes
    assert [tensor["digest"] for tensor in document["tensors"]] == manifest.digests
    assert [branch["ropes"] for branch in document["branches"]] == [[3], [2]]
    assert document["producer"] == manifest.producer
    assert document["faults"] == []


@pytest.mark.parametrize("latent", [False, True])
def test_a_flipped_bit_is_located(latent: bool, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a.safetensors"
    data = Recipe("r", tokens=3000, heads=4, dim=128, latent=latent).make()
    spec = saved(data, path).tensors[-1]
    offset = spec.nbytes - 700
    where = path.stat().st_size - 700
    flip(path, where, 1 << 6)
    assert run(["inspect", str(path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{spec.where()}: tokens" in printed
    element = "token 2999, head 1, dim 34" if not latent else "token 2997, dim 34"
    assert f"it is bit 6 of byte {offset}: {element}; byte {where} of the file" in printed


def test_another_file_names_each_byte(tmp_path: Path, capsys: Captured) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for path in (good, bad):
        header = saved(Recipe("r", tokens=8).make(), path).header_nbytes
    flip(bad, header + 3, 0xFF)
    flip(bad, header + 40, 0x81)
    assert run(["inspect", str(bad), "--against", str(good)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "more than one bit was changed" in printed
    assert f"2 bytes differ from {good}, the first is byte 3: token 0, head 0, dim 1" in printed
    assert run(["inspect", str(bad), "--against", str(good), "--json"]) == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert [byte["offset"] for byte in fault["differing"]] == [3, 40]
    assert fault["one_bit"] is None
    assert fault["differing_bytes"] == 2


def test_a_chunk_that_differs_as_a_whole_is_counted(tmp_path: Path, capsys: Captured) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for path in (good, bad):
        manifest = saved(Recipe("r", tokens=1000).make(), path)
    spec = manifest.tensors[1]
    for offset in range(spec.start, spec.stop):
        flip(bad, manifest.header_nbytes + offset, 0xFF)
    assert run(["inspect", str(bad), "--against", str(good), "--json"]) == 1
    [fault] = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["tensor"], fault["differing_bytes"]) == (spec.name, spec.nbytes)
    assert len(fault["differing"]) == 256


def test_a_file_that_is_no_better_says_so(tmp_path: Path, capsys: Captured) -> None:
    bad, other = tmp_path / "bad", tmp_path / "other"
    header = saved(Recipe("r").make(), bad).header_nbytes
    saved(Recipe("r", seed=1).make(), other)
    flip(bad, header, 1)
    assert run(["inspect", str(bad), "--against", str(other)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{other} does not have the bytes that were committed here" in printed


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, _, make in CASES])
def test_a_hostile_file_gives_one_line(
    make: Callable[[], bytes], tmp_path: Path, capsys: Captured
) -> None:
    path = tmp_path / "hostile"
    payload = make()
    path.write_bytes(payload)
    try:
        Manifest.decode(payload)
        raise AssertionError("it is a payload")
    except IntegrityError:
        status = 1  # its header is as a payload's, with changed bytes
    except Exception:
        status = 2
    assert run(["inspect", str(path)]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_flipped_bit_of_the_header_is_located(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "a"
    header = saved(bundle("req-1"), path).header_nbytes
    intact = path.read_bytes()
    located = 0
    for offset in range(8, header, 5):
        path.write_bytes(intact)
        flip(path, offset, 1 << offset % 8)
        status = run(["inspect", str(path)])
        printed = capsys.readouterr().err
        assert status in (1, 2)
        assert len(printed.splitlines()) == 1
        if f"it is bit {offset % 8} of byte {offset} of the file" in printed:
            located += 1
        else:
            assert status == 2 or "one bit" not in printed
    assert located > 20


def test_what_is_no_file_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"\x7fELF" + bytes(5000))
    for path in (tmp_path, tmp_path / "none", tmp_path / "foreign", "/dev/null"):
        done = kvlink("inspect", path)
        assert done.returncode == 2, done
        assert len(done.stderr.splitlines()) == 1, done
        assert done.stdout == ""
