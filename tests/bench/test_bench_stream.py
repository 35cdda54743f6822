"""`kvlink-bench stream`: every measurement is made, and its figures are plausible."""

from __future__ import annotations

from typing import Any

import pytest

from omni_kvlink.bench.commands import run
from omni_kvlink.bench.streaming import MEASUREMENTS
from support.bench_document import bench_document

SMALL = ["stream", "--layers", "3", "--tokens", "300", "--rounds", "4", "--warmup", "1"]


@pytest.fixture(scope="module", params=["shm", "inproc"])
def document(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("stream") / "result.json"
    return bench_document(path, *SMALL, "--connector", request.param)


def test_the_document_keeps_its_shape(document: dict[str, Any]) -> None:
    assert list(document) == ["schema", "command", "machine", "setup", "results"]
    results = document["results"]
    assert set(results["milliseconds"]) == set(MEASUREMENTS)
    assert results["rounds"] == 4
    assert results["payload_bytes"] == 3 * 2 * 300 * 4 * 128 * 2


def test_the_figures_make_sense(document: dict[str, Any]) -> None:
    results = document["results"]
    times = results["milliseconds"]
    assert all(0 < one["min"] <= one["p50"] <= one["max"] for one in times.values())
    ratio = times["streamed"]["p50"] / times["sequential"]["p50"]
    assert results["streamed_over_sequential"] == pytest.approx(ratio, rel=0.01)
    ratio = times["into"]["p50"] / times["plain_copy"]["p50"]
    assert results["into_over_plain_copy"] == pytest.approx(ratio, rel=0.01)
    assert times["first_layer"]["max"] <= times["streamed"]["max"]
    assert times["digest"]["min"] <= times["in_place"]["max"]


def test_the_text_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--connector", "inproc"]) == 0
    text = capsys.readouterr().out
    for name in MEASUREMENTS:
        assert name.replace("_", " ") in text
