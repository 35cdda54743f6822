"""`kvlink-bench copy`: every method moves all bytes, and is compared with its own run's copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_kvlink.bench import membench, report
from omni_kvlink.bench.commands import run
from omni_kvlink.bench.membench import CopyMethod, FirstTouchMethod, make_copy_methods
from omni_kvlink.bench.setups import CopySetup, Shape
from omni_kvlink.copier import Copier, NativeCopier
from omni_kvlink.memory.mapping import Mapping
from support.bench_document import bench_document

# Reaches into _copier: a method that copies wrongly is made of one that does not.
# Reaches into _untouched: the command prints seconds, which do not say whether its memory was new.

SHAPE = Shape(2, 300, 4, 128)
SMALL = ["copy", "--preset", "small", "--layers", "2", "--tokens", "300", "--rounds", "3"]
KEYS = [
    "plain_copy",
    "torch_copy",
    "gather_bare",
    "gather",
    "gather_auto_bare",
    "gather_auto",
    "gather_all_cores",
    "gather_paged",
    "gather_by_head",
    "scatter",
    "scatter_same_offset",
    "scatter_next_line",
    "scatter_by_head",
    "verify",
    "first_touch",
    "populated",
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("copy") / "result.json"
    return bench_document(path, *SMALL)


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
    assert max(len(line) for line in text.splitlines()) <= report.PIPED_WIDTH
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
