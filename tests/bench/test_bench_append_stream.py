"""`kvlink-bench append-stream`: every chunk is compared, and the figures are plausible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench.append_stream import KINDS, TIMES
from omni_kvlink.bench.chunks import ChunkBytes
from omni_kvlink.bench.commands import run as bench
from omni_kvlink.bench.payloads import bytes_of
from omni_kvlink.bench.setups import Paced
from support.bench_document import bench_document

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["append-stream", "--streams", "5", "--rate", "40", "--seconds", "0.5", "--rounds", "2"]
CHUNKS = 2 * 5 * 10
"""Of each kind: rounds × streams × chunks."""
CASES = {
    "shm": ["--connector", "shm"],
    "asyncio": ["--connector", "shm", "--reader", "asyncio", "--together"],
    "steps": ["--connector", "shm", "--reader", "steps"],
    "inline": ["--connector", "zmq+ipc", "--inline", "--no-digests", "--hidden", "300"],
    "inproc": ["--connector", "inproc", "--tokens", "3"],
}


def run(path: Path, *arguments: str) -> dict[str, Any]:
    return bench_document(path, *SMALL, *arguments)


@pytest.fixture(scope="module", params=CASES)
def document(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("append-stream") / "result.json", *CASES[request.param])


def test_the_document_keeps_its_shape(document: dict[str, Any]) -> None:
    setup, results = document["setup"], document["results"]
    assert set(results["milliseconds"]) == set(TIMES)
    assert results["chunks"] == CHUNKS
    assert results["wrong"] == 0
    assert results["chunk_bytes"] == 2 * setup["tokens"] * setup["hidden"]
    sides = ["both"] if setup["connector"] == "inproc" else ["producer", "reader"]
    for kind in KINDS:
        assert list(results["cores"][kind]) == list(results["cpu_us_per_chunk"][kind]) == sides


def test_the_figures_make_sense(document: dict[str, Any]) -> None:
    results = document["results"]
    times = results["milliseconds"]
    for name in ("link", "pipe", "append", "write"):
        one = times[name]
        assert 0 < one["min"] <= one["p50"] <= one["p90"] <= one["p99"] <= one["max"]
    assert all(times[f"{kind}_late"]["min"] >= 0 for kind in KINDS)
    link, pipe = times["link"], times["pipe"]
    assert results["ratios"]["latency p50"] == pytest.approx(link["p50"] / pipe["p50"], rel=0.01)
    for kind in KINDS:
        assert results["chunks_per_second"][kind]["min"] > 0
        assert all(cost > 0 for cost in results["cpu_us_per_chunk"][kind].values())


def test_the_text_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([*SMALL, "--connector", "inproc"]) == 0
    text = capsys.readouterr().out
    for name in TIMES:
        assert name.replace("_", " ") in text
    assert f"all {2 * CHUNKS} equal" in text
    assert max(map(len, text.splitlines())) <= 96


@pytest.mark.parametrize("reader", ["callbacks", "steps"])
def test_a_wrong_byte_is_found(reader: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench([*SMALL, "--reader", reader, "--corrupt", "7"]) == 1
    assert f"2 of {2 * CHUNKS} chunks WRONG" in capsys.readouterr().out  # one a round of the link


def test_every_chunk_is_another_one() -> None:
    paced = Paced(streams=4, chunks=6, tokens=2, hidden=64)
    data, again = ChunkBytes(paced), ChunkBytes(paced)
    found = {data.raw(stream, number) for stream in range(4) for number in range(6)}
    assert len(found) == 24
    tensor = again.tensor(3, 5)
    assert tensor.shape == (2, 64)
    assert bytes_of(tensor).tobytes() == data.raw(3, 5)
    assert bytes_of(again.flip(3, 5)).tobytes() != data.raw(3, 5)
