"""`kvlink-bench peers`: other systems on the same blocks, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_kvlink.bench import peers
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.environments import System
from omni_kvlink.bench.peers.end import End
from omni_kvlink.bench.report import BenchError

SMALL = ["peers", "--layers", "2", "--tokens", "64", "--rounds", "3", "--warmup", "1"]
GEOMETRY = {"tensors": 2, "blocks": 5, "tokens": 16, "nbytes": 64, "seed": 3}
RAW_TCP = Path(peers.__path__[0]) / "raw_tcp.py"
STRAY = """
_receiver = receiver


@contextlib.contextmanager
def receiver(end):
    def receive():
        moment = move()
        end.memory[BYTE] ^= 1
        return moment

    with _receiver(end) as move:
        yield receive
"""
"""Replaces a system's receiver by one that harms a byte of the target's memory."""


def test_systems_in_turn_and_one_that_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peers.json"
    systems = ["pyzmq", "torch_multiprocessing", "nixl"]
    options = [part for name in systems for part in ("--peer", name)]
    options += ["--python", f"nixl={tmp_path}/none", "--json", str(path), "--paged"]
    assert run([*SMALL, *options]) == 0
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    rows = results["peers"]
    assert set(rows) == set(systems)
    assert results["plain_copy_ms"]["min"] > 0
    for name in systems[:2]:
        row = rows[name]
        assert (row["reason"], row["wrong"], row["verifies"]) == ("", 0, "nothing")
        assert 0 < row["arrived_ms"]["p50"] <= row["scattered_ms"]["p50"]
        assert row["ratio"]["min"] > 0
        assert all(used["p50"] > 0 for used in row["cpu_seconds_per_gigabyte"].values())
    assert rows["nixl"]["scattered_ms"] is None
    assert "No such file" in rows["nixl"]["reason"]
    assert "not run   nixl: " in capsys.readouterr().out


def test_a_module_that_is_missing_is_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--peer", "nixl", "--python", f"nixl={sys.executable}"]) == 0
    assert "not run   nixl: ModuleNotFoundError: No module named 'nixl'" in capsys.readouterr().out


def test_this_library_is_a_system_like_others(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    options = ["--peer", "omni_kvlink", "--peer", "omni_kvlink_into", "--json", str(path)]
    assert run([*SMALL, *options, "--paged", "--rounds", "1"]) == 0
    rows = json.loads(path.read_text())["results"]["peers"]
    assert all((row["reason"], row["wrong"]) == ("", 0) for row in rows.values())
    assert rows["omni_kvlink"]["arrived_ms"]["p50"] < rows["omni_kvlink"]["scattered_ms"]["p50"]


@pytest.mark.parametrize(
    ("byte", "paged", "text"),
    [
        ("0, 0, 5", False, "1 bytes outside the target blocks were written"),
        ("-1, -1, -1", True, "1 bytes outside the target blocks were written"),
        ("0, end.ids[1], 0", True, "1 blocks have other bytes"),
    ],
)
def test_a_byte_that_a_system_harms_is_seen(
    byte: str,
    paged: bool,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harmful = tmp_path / "raw_tcp.py"
    harmful.write_text(RAW_TCP.read_text() + STRAY.replace("BYTE", byte))
    monkeypatch.setattr(System, "path", harmful)
    assert run([*SMALL, "--peer", "raw_tcp", *["--paged"] * paged]) == 1
    assert f"WRONG     raw_tcp: {text}" in capsys.readouterr().out


@pytest.mark.parametrize("paged", [False, True])
def test_each_transfer_has_other_bytes(paged: bool, tmp_path: Path) -> None:
    """Bytes that are still there of the transfer before are no transfer."""
    os.mkfifo(tmp_path / "fifo")
    geometry = {**GEOMETRY, "paged": paged}
    source, target = (
        End(is_sender=side, folder=str(tmp_path), geometry=geometry) for side in (True, False)
    )
    assert target.errors(0) == "10 blocks have other bytes"
    for number in (0, 1):
        source.fill(number)
        flat = source.flat()
        source.gather(flat)
        assert target.errors(number) == "10 blocks have other bytes"
        target.scatter(flat)
        assert target.errors(number) == source.errors(number) == ""
    assert len(source.extents()) == (10 if paged else 2)
    assert not paged or source.ids.tolist() != target.ids.tolist()


def test_what_cannot_be_installed_has_the_reason_of_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = (("--no-index", "kvlink-no-such-distribution"),)
    monkeypatch.setattr(System, "fact", lambda *_: requires)
    with pytest.raises(BenchError, match="not installed: ERROR: No matching distribution"):
        System("nixl").python(tmp_path, {})


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    system, (run_of_pip,) = System("nixl"), System("nixl").fact("REQUIRES")
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "installed.txt").write_text(" ".join(run_of_pip))
    assert system.python(tmp_path, {}) == str(tmp_path / "nixl" / "bin" / "python")
    assert os.listdir(tmp_path / "nixl") == ["installed.txt"]
    assert System("pyzmq").python(tmp_path, {}) == sys.executable


@pytest.mark.parametrize("option", ["nixl", "nixl=", "others=/bin/python"])
def test_a_wrong_interpreter_is_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["peers", "--python", option])
    error = capsys.readouterr().err
    assert "wanted NAME=PATH" in error
    assert error.count("\n") == 1
