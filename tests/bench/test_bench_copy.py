"""`kvlink-bench copy`: every method moves all bytes, and is compared with its own run's copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink._native import host
from omni_kvlink.bench import membench, placements, report
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.membench import CopyMethod, FirstTouchMethod, make_copy_methods
from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.setups import CopySetup, Shape
from omni_kvlink.cli import terminal
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.memory.mapping import Mapping
from omni_kvlink.payload.paged import PagedTensor
from support.bench_document import bench_document

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reaches into _copier: a method that copies wrongly is made of one that does not.
# Reaches into _untouched: the command prints seconds, which do not say whether its memory was new.

SHAPE = Shape(2, 300, 4, 128)
SMALL = [
    "copy",
    "--preset",
    "small",
    "--layers",
    "2",
    "--tokens",
    "300",
    "--rounds",
    "3",
    "--quick",
]
KEYS = [
    "plain_copy",
    "torch_copy",
    "gather_bare",
    "gather",
    "gather_auto_bare",
    "gather_auto",
    "gather_all_cores",
    "gather_paged",
    "scatter",
    "verify",
    "first_touch",
    "populated",
]


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """The placements of a payload of two megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placements, "NBYTES", 2 << 20)
        yield


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, little_memory: None) -> dict[str, Any]:
    return bench_document(tmp_path_factory.mktemp("copy") / "result.json", *SMALL)


def test_the_document_keeps_its_shape(document: dict[str, Any]) -> None:
    assert list(document) == ["schema", "command", "machine", "setup", "results"]
    assert (document["schema"], document["command"]) == ("kvlink-bench/1", "copy")
    results = document["results"]
    assert list(results["rows"]) == KEYS
    assert results["payload_bytes"] == SHAPE.nbytes == 2 * 2 * 300 * 4 * 128 * 2
    assert results["rounds"] == 3
    assert document["setup"]["shape"]["tokens"] == 300


def test_every_row_is_compared_with_the_plain_copy(document: dict[str, Any]) -> None:
    results = document["results"]
    plain = results["rows"]["plain_copy"]["milliseconds"]["p50"]
    for row in results["rows"].values():
        times = row["milliseconds"]
        assert 0 < times["min"] <= times["p50"] <= times["max"]
        assert row["ratio"] == pytest.approx(times["p50"] / plain, rel=0.01)
        rate = results["payload_bytes"] / times["p50"] / 1e6
        assert row["gigabytes_per_second"] == pytest.approx(rate, rel=0.01)
    cost = results["rows"]["gather"]["ratio"] / results["rows"]["gather_bare"]["ratio"]
    assert results["digests_cost_percent"] == pytest.approx(100 * (cost - 1), abs=1)


def test_every_place_costs_processor_time(document: dict[str, Any]) -> None:
    found = document["results"]["placements"]
    assert list(found) == ["1 layers", "112 layers", "NHD", "HND", "MLA", "parts", "rows"]
    assert all(list(found[layers]) == list(placements.DISTANCES) for layers in list(found)[:2])
    assert all(
        0 < directions[direction]["min"] <= directions[direction]["p50"]
        for group in found.values()
        for directions in group.values()
        for direction in placements.DIRECTIONS
    )
    bars = {bar["bar"]: bar for bar in document["results"]["bars"]}
    assert bars["gather, worst by best offset"]["limit"] == 1.2
    worst = max(
        row["gather"]["p50"] for layers in list(found)[:2] for row in found[layers].values()
    )
    best = min(row["gather"]["p50"] for layers in list(found)[:2] for row in found[layers].values())
    assert bars["gather, worst by best offset"]["got"] == pytest.approx(worst / best, rel=1e-3)
    by_head = [found["HND"][row]["scatter"]["p50"] for row in found["HND"]]
    by_token = [found["NHD"][row]["scatter"]["p50"] for row in found["NHD"]]
    ratio = max(hnd / nhd for hnd, nhd in zip(by_head, by_token, strict=True))
    assert bars["scatter, HND by NHD"]["got"] == pytest.approx(ratio, rel=1e-3)


def test_tensors_lie_where_the_name_says() -> None:
    shape, payload = Shape(1, 8, 4, 128), 3 << 12 | 256
    tensors = [placements.at(name)(shape, payload) for name in placements.DISTANCES]
    starts = [tensor.data_ptr() % 4096 for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert starts == [0, 64, 256, 320, 2304]
    latent = placements.between(3, 5)(Shape(1, 40, 0, 66), 0)
    assert isinstance(latent, torch.Tensor)
    assert latent.stride() == (74, 1)
    paged = placements.in_blocks(by_head=True)(shape, 0)
    assert isinstance(paged, PagedTensor)
    pool = paged.pool
    assert pool.shape[1:] == (16, 4, 128)
    assert pool.stride()[1:] == (128, 16 * 128, 1)


@pytest.mark.parametrize("direction", placements.DIRECTIONS)
def test_a_place_without_its_bytes_is_no_result(direction: str) -> None:
    region = Mapping.shared("t", 1 << 20).region
    shape = Shape(1, 40, 4, 66)
    copy = placements.PlacedCopy(
        "NHD", "132 bytes", shape, placements.in_blocks(by_head=False), region
    )
    copier = NativeCopier(threads=1)
    copy.prove(copier)
    digests = [spec.digest for spec in copy.manifest.tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, direction, lambda *_: digests)
        with pytest.raises(BenchError, match=f"{direction} of NHD, 132 bytes"):
            copy.prove(copier)


def test_the_instruction_set_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(
        monkeypatch,
        *(Scripted(key, [0.1]) for key in ("plain_copy", "gather", "gather_bare")),
    )
    try:
        setup = CopySetup(SHAPE, rounds=1, features="portable")
        assert membench.measure(setup).to_dict()["instructions"] == "portable"
    finally:
        host.select("auto")


class Scripted(CopyMethod):
    """Takes the seconds of a script."""

    ran: list[str]

    def __init__(self, key: str, seconds: list[float], *, true: bool = True):
        super().__init__(key, "", lambda _: None)
        self._seconds, self._true = seconds, true

    def run(self) -> object:
        raise NotImplementedError

    def moves_all_bytes(self) -> bool:
        return self._true

    def seconds(self) -> float:
        self.ran.append(self.key)
        return self._seconds.pop(0)


def scripted(monkeypatch: pytest.MonkeyPatch, *made: Scripted) -> None:
    Scripted.ran = []
    monkeypatch.setattr(membench, "make_copy_methods", lambda shape, threads: list(made))
    monkeypatch.setattr(membench, "measure_placements", lambda **_: placements.Placements([]))


def test_rounds_alternate_and_ratios_are_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(
        monkeypatch,
        Scripted("plain_copy", [0.1, 0.2, 0.3]),
        Scripted("gather", [0.5, 0.6, 0.7]),
        Scripted("gather_bare", [0.5, 0.5, 0.5]),
    )
    result = membench.measure(CopySetup(SHAPE, rounds=3))
    rounds = [Scripted.ran[start : start + 3] for start in (0, 3, 6)]
    assert [sorted(one) for one in rounds] == [["gather", "gather_bare", "plain_copy"]] * 3
    row = result.to_dict()["rows"]["gather"]
    assert row["ratio"] == pytest.approx(3)
    assert row["ratio_by_round"]["max"] == pytest.approx(5)
    assert row["gigabytes_per_second"] == pytest.approx(SHAPE.nbytes / 0.6 / 1e9, abs=1e-3)
    assert result.to_dict()["digests_cost_percent"] == pytest.approx(20)


def test_a_method_that_moves_nothing_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, Scripted("plain_copy", [0.1]), Scripted("gather", [0.1], true=False))
    assert run([*SMALL, "--rounds", "1"]) == 2
    assert "BenchError: gather: not all bytes are there" in capsys.readouterr().err
    assert Scripted.ran == []


class Nothing(Copier):
    """Moves nothing, and raises nothing."""

    name = "nothing"

    def gather(self, *_: Any, **options: Any) -> list[str]:
        return []

    def digest(self, *_: Any, **options: Any) -> list[str]:
        return []

    def scatter(self, *_: object) -> None:
        pass

    def verify(self, *_: object) -> None:
        pass


class AllButOne(NativeCopier):
    """Leaves the last byte of the last tensor as it was."""

    def gather(self, sources: Any, manifest: Any, region: Any, **options: float) -> list[str]:
        last = region.view()[manifest.header_nbytes + manifest.tensors[-1].stop - 1 :][:1]
        before = bytes(last)
        digests = super().gather(sources, manifest, region, **options)
        last[:] = before
        return digests


@pytest.fixture(scope="module")
def methods() -> list[CopyMethod]:
    return make_copy_methods(SHAPE, threads=1)


@pytest.mark.parametrize("key", KEYS)
def test_every_method_moves_the_bytes(methods: list[CopyMethod], key: str) -> None:
    """And a method that does nothing is noticed."""
    method = methods[KEYS.index(key)]
    assert method.key == key
    assert method.moves_all_bytes()
    with pytest.MonkeyPatch.context() as patch:
        if method._copier is not None:
            patch.setattr(method, "_copier", Nothing())
        else:
            patch.setattr(method, "run", lambda: None)
        assert not method.moves_all_bytes()
    assert method.moves_all_bytes()
    assert method.seconds() > 0


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith(("gather", "first"))])
def test_one_missing_byte_is_seen(methods: list[CopyMethod], key: str) -> None:
    method = methods[KEYS.index(key)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "_copier", AllButOne(threads=1))
        assert not method.moves_all_bytes()


def test_memory_is_fresh_each_time(methods: list[CopyMethod]) -> None:
    touches = [method for method in methods if isinstance(method, FirstTouchMethod)]
    assert len(touches) == 2
    for method in touches:
        first, second = method.run(), method.run()
        assert first.fd != second.fd
        assert first.region.address != second.region.address


def test_only_the_second_is_populated_before() -> None:
    untouched = membench._untouched("t", 1 << 20)
    assert _resident(untouched.fd) == 0
    assert _resident(Mapping.shared("t", 1 << 20).fd) == 1 << 20


def _resident(fd: int) -> int:
    return 512 * Path(f"/proc/self/fd/{fd}").stat().st_blocks


def test_the_report_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= terminal.PIPED_WIDTH
    assert all(f"\n{key.replace('_', ' ')} " in text for key in KEYS)
    columns = [line for line in text.splitlines() if line.startswith(("plain copy", "gather all"))]
    assert len({line.rindex("  ") for line in columns}) == 1, "the last column stands left"
    assert "× plain" in text
    assert "memmove" in text or "numpy.copyto" in text


def test_bars_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    report.draw({"a": 1.0, "b": 2.0}, "GB/s")
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report.draw({"a": 1.0, "b": 2.0}, "GB/s")
    first, second = capsys.readouterr().out.strip().splitlines()
    assert second.count("█") == pytest.approx(2 * first.count("█"), abs=1)
    assert "2.0 GB/s" in second


def test_help_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["copy", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "{small,bagel,bagel36}" in text
    assert "what this machine's memory allows" in text
