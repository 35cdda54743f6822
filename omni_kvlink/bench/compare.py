"""`kvlink-bench compare`: the rows of two documents of the same command, by their names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_kvlink.bench.report import BenchError
from omni_kvlink.bench.result import Result
from omni_kvlink.cli.terminal import Progress, progress, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink.bench.setups import CompareSetup

_SPREAD = ("min", "p50", "max")
_RATES = ("per_second", "a second")


def measure(setup: CompareSetup, progress: Progress = progress) -> Result:
    """Compare two documents; a row that is slower by more than `fail_over` percent has failed."""
    first, second = _read(setup.before), _read(setup.after)
    if first["command"] != second["command"]:
        names = f"{first['command']!r} and {second['command']!r}"
        raise BenchError(f"wanted two documents of one command, got those of {names}")
    rows = {name: dict(_rows(one["results"], "")) for name, one in (("a", first), ("b", second))}
    paired = [name for name in rows["a"] if name in rows["b"] and setup.row in name]
    if not paired:
        about = f" whose name has {setup.row!r} in it" if setup.row else ""
        raise BenchError(f"{setup.before} and {setup.after} have no row in common{about}")
    most = 1 + setup.fail_over / 100
    ratios = {name: _ratio(name, rows["a"][name], rows["b"][name]) for name in paired}
    slower = [name for name, ratio in ratios.items() if ratio["p50"] > most]
    unpaired = sorted(name for name in rows["a"].keys() ^ rows["b"].keys() if setup.row in name)
    cells = [
        [name, *(f"{ratio[key]:.2f}" for key in ("p50", "min", "max")), _verdict(name, slower)]
        for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]["p50"])
    ]
    return Result(
        figures={"ratios": ratios, "slower": slower, "unpaired": unpaired},
        head=[
            ("A", setup.before),
            ("B", setup.after),
            ("ratio", "B's median by A's; of rates A's by B's: above 1 B is slower"),
            ("min, max", "B's least by A's greatest, B's greatest by A's least"),
        ],
        tables=table(("row", "ratio", "min", "max", ""), cells),
        lines=[
            *(("unpaired", name) for name in unpaired),
            ("slower", f"{len(slower)} of {len(paired)} rows by more than {setup.fail_over:g} %"),
        ],
        failed=len(slower),
    )


def _verdict(name: str, slower: list[str]) -> str:
    return "slower" if name in slower else "–"


def _read(path: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text())
        if not isinstance(document["results"], dict) or not isinstance(document["command"], str):
            raise TypeError
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise BenchError(f"{path}: wanted a document of kvlink-bench --json") from None
    return document


def _rows(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The summaries of a document, with their dotted names; none that has been 0."""
    for key, value in values.items():
        if not isinstance(value, dict):
            continue
        if "p50" not in value:
            yield from _rows(value, f"{prefix}{key}.")
        elif all(value[name] > 0 for name in _SPREAD):
            yield f"{prefix}{key}", value


def _ratio(name: str, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The factor by which B takes longer: of the medians, and the least and greatest."""
    if any(unit in name for unit in _RATES):  # more is faster
        before, after = after, before
    spread = {"p50": ("p50", "p50"), "min": ("min", "max"), "max": ("max", "min")}
    ratios = {key: after[upper] / before[lower] for key, (upper, lower) in spread.items()}
    if not all(map(math.isfinite, ratios.values())):
        raise BenchError(f"{name} has a figure that is no number")
    return {key: round(value, 4) for key, value in ratios.items()}
