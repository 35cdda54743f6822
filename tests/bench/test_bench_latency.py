"""`kvlink-bench latency`, end to end: two real processes over shared memory, one for inproc."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink.bench import latency
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.latency import OTHER_TIMES, PHASES

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--layers", "2", "--tokens", "300", "--rounds", "4", "--warmup", "1"]


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _document(tmp_path_factory, ["--paged", "--branches", "3", "--verify", "full"])


@pytest.fixture(scope="module")
def inproc(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _document(
        tmp_path_factory,
        ["--connector", "inproc", "--no-digests", "--verify", "off", "--idle", "0.2"],
    )


@pytest.fixture(params=["shm", "inproc"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


def test_the_document_keeps_its_shape(document: dict[str, Any]) -> None:
    assert list(document) == ["schema", "command", "machine", "setup", "results"]
    assert (document["schema"], document["command"]) == ("kvlink-bench/1", "latency")
    results = document["results"]
    required = {"ratio", "ratio_by_round", "milliseconds", "minor_faults", "plain_copy", "bars"}
    assert required <= set(results)
    assert set(results["milliseconds"]) == {*PHASES, *OTHER_TIMES}
    assert all(
        set(summary) == {"p50", "p90", "p99", "min", "max"}
        for summary in results["milliseconds"].values()
    )
    assert results["rounds"] == 4


def test_the_figures_make_sense(document: dict[str, Any]) -> None:
    results = document["results"]
    times = results["milliseconds"]
    assert isinstance(results["ratio"], float)
    assert results["ratio"] == pytest.approx(
        times["total"]["p50"] / times["plain_copy"]["p50"], rel=0.01
    )
    assert results["payload_bytes"] == 2 * 2 * 300 * 4 * 128 * 2
    for name in ("prepare", "copy", "publish", "wake", "view", "total", "plain_copy"):
        assert times[name]["min"] > 0, name
    phases = [name for name in PHASES if name != "total"]
    assert sum(times[name]["min"] for name in phases) <= times["total"]["max"]
    assert sum(times[name]["max"] for name in phases) >= times["total"]["min"]


def test_the_options_take_effect(shm: dict[str, Any], inproc: dict[str, Any]) -> None:
    assert shm["setup"]["paged"]
    assert shm["results"]["digests"] == "crc32c"
    assert shm["results"]["milliseconds"]["verify"]["min"] > 0
    assert shm["results"]["not_sent_bytes"] == shm["results"]["payload_bytes"] * 3 // 2
    assert any("random order" in note for note in shm["results"]["notes"])
    assert inproc["results"]["digests"] == "off"
    assert inproc["results"]["milliseconds"]["verify"]["max"] == 0
    assert inproc["results"]["idle_cpu_percent"]["both"] < 50


def test_a_busy_producer(capsys: pytest.CaptureFixture[str]) -> None:
    """It has put other payloads, which nobody has; the one that is measured arrives as ever."""
    command = ["latency", "--connector", "inproc", "--preset", "tiny", "--rounds", "3", "--busy"]
    seen = list[dict[str, Any]]()

    def watched(pair: Any, *rest: Any) -> Any:
        found = measured(pair, *rest)
        seen.append(pair.link.stats()["transfers"])
        return found

    # What one round does to the link shows in no result of the command.
    measured = latency._round
    with pytest.MonkeyPatch.context() as patch:
        # As above.
        patch.setattr(latency, "_round", watched)
        assert run(command) == 0
    assert "busy: just before each put" in " ".join(capsys.readouterr().out.split())
    assert [one["failed"] for one in seen] == [3, 6, 9, 12, 15, 18]
    assert seen[-1]["released"] == 6


def test_the_report_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["latency", "--connector", "inproc", "--preset", "tiny", "--rounds", "3"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "digests crc32c" in text
    assert "× a plain copy" in text
    assert "wake" in text


def _document(folder: pytest.TempPathFactory, options: list[str]) -> dict[str, Any]:
    path: Path = folder.mktemp("latency") / "result.json"
    assert run(["latency", *SMALL, *options, "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document
