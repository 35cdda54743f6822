"""Draws docs/benchmarks.md's figures from benchmarks/results: `python docs/pictures/plot.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
AMD, XEON = "amd-epyc-2core", "intel-xeon-2core"
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
OURS, OTHER = "#a5b4fc", "#d1d5db"
FONT = "font-family='system-ui, sans-serif'"
LEFT, WIDTH, ROW = 300, 820, 30


class Row(NamedTuple):
    """A bar from 0 to `p50`, and a line from `least` to `most`."""

    label: str
    p50: float
    least: float
    most: float
    color: str = OURS


def read(machine: str, name: str) -> dict[str, Any]:
    """The results of one document."""
    found: dict[str, Any] = json.loads((RESULTS / machine / f"{name}.json").read_text())
    return found


def times(label: str, values: dict[str, float], color: str = OURS) -> Row:
    """A row of p50, min and max."""
    return Row(label, values["p50"], values["min"], values["max"], color)


def text(x: float, y: float, content: str, anchor: str, color: str = INK, weight: int = 400) -> str:
    """One line."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='13' font-weight='{weight}' "
        f"fill='{color}' text-anchor='{anchor}'>{content}</text>"
    )


def ticks(most: float) -> list[float]:
    """Five or fewer round numbers above 0."""
    step = next(
        step
        for power in (0.01, 0.1, 1, 10, 100, 1000)
        for step in (power, 2 * power, 5 * power)
        if most / step <= 5.5
    )
    return [step * n for n in range(1, int(most / step) + 1)]


def chart(name: str, title: str, unit: str, rows: list[Row], *, mark: float = 0.0) -> None:
    """Write horizontal bars with ranges; `mark` is a dashed line."""
    most = max(max(row.most for row in rows), mark) * 1.12
    scale, bottom = (WIDTH - LEFT - 30) / most, 56 + ROW * len(rows)
    parts = [text(20, 26, title, "start", weight=600)]
    for tick in ticks(most):
        x = LEFT + tick * scale
        parts.append(f"<line x1='{x:.1f}' y1='44' x2='{x:.1f}' y2='{bottom}' stroke='{GRID}'/>")
        parts.append(text(x, bottom + 18, f"{tick:g}", "middle", MUTED))
    for number, row in enumerate(rows):
        y = 50 + ROW * number
        least, most_x = LEFT + row.least * scale, LEFT + row.most * scale
        parts += [
            text(LEFT - 10, y + 14, row.label, "end"),
            f"<rect x='{LEFT}' y='{y}' width='{row.p50 * scale:.1f}' height='20' rx='3' "
            f"fill='{row.color}'/>",
            f"<line x1='{least:.1f}' y1='{y + 10}' x2='{most_x:.1f}' y2='{y + 10}' "
            f"stroke='{INK}' stroke-width='2'/>",
            text(max(most_x, LEFT + row.p50 * scale) + 6, y + 14, f"{row.p50:.3g}", "start", MUTED),
        ]
    if mark:
        x = LEFT + mark * scale
        parts.append(
            f"<line x1='{x:.1f}' y1='44' x2='{x:.1f}' y2='{bottom}' stroke='{INK}' "
            "stroke-dasharray='5 4'/>"
        )
    parts.append(text(WIDTH - 20, 26, unit, "end", MUTED))
    height = bottom + 30
    ground = f"<rect width='{WIDTH}' height='{height}' rx='12' fill='white'/>"
    opening = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>"
    body = "\n".join((opening, ground, *parts, "</svg>\n"))
    (HERE / f"bench_{name}.svg").write_text(body)


def ratios() -> None:
    """`latency`: each round's total by the same round's plain copy."""
    named = (
        (AMD, "bagel", "dense, native copier (EPYC)", OURS),
        (XEON, "bagel", "the same (Xeon)", OURS),
        (AMD, "nodigests", "without digests", OURS),
        (AMD, "branches", "three branches, two not sent again", OURS),
        (AMD, "paged", "from random blocks of 16 tokens", OURS),
        (AMD, "verify", "every byte verified by the reader", OURS),
        (AMD, "bagel-torch", "dense, torch copier", OTHER),
        (AMD, "paged-torch", "from blocks, torch copier", OTHER),
    )
    rows = [
        times(label, read(machine, name)["results"]["ratio_by_round"], color)
        for machine, name, label, color in named
    ]
    title = "Shared memory, 235 MB: from put to views, by a plain copy of the same bytes"
    chart("ratio", title, "× a plain copy", rows, mark=1.0)


def phases() -> None:
    """`latency`: where the time of one transfer goes."""
    found = read(AMD, "bagel")["results"]["milliseconds"]
    about = {
        "plain_copy": "a plain copy, one thread",
        "total": "the whole transfer",
        "prepare": "prepare: sizes, memory",
        "copy": "copy, with digests",
        "publish": "publish: the header",
        "wake": "wake: commit to the reader",
        "view": "view: header checked, tensors made",
    }
    rows = [
        times(label, found[key], OTHER if key == "plain_copy" else OURS)
        for key, label in about.items()
    ]
    chart("phases", "Shared memory, 235 MB: phases of one transfer (EPYC)", "ms", rows)


def network() -> None:
    """`latency` over loopback networks, beside the bare transport of the same run."""
    rows = []
    for machine, short in ((AMD, "EPYC"), (XEON, "Xeon")):
        found = read(machine, "zmq-tcp")["results"]
        rows += [
            times(f"one raw TCP connection ({short})", found["raw_tcp_ms"], OTHER),
            times(f"zmq+tcp ({short})", found["milliseconds"]["total"]),
        ]
    found = read(XEON, "ucx")["results"]
    rows += [
        times("bare ucxx, UCX's own settings (Xeon)", found["plain_ucx_ms"], OTHER),
        times("bare ucxx, the link's settings (Xeon)", found["bare_ucx_ms"], OTHER),
        times("ucx (Xeon)", found["milliseconds"]["total"]),
    ]
    chart("network", "Loopback, 235 MB: from put to views in the other process", "ms", rows)


def streams() -> None:
    """`stream`: until the reader has copied everything out."""
    rows = []
    for name, label in (("stream-bagel", "dense"), ("stream-paged", "blocks to blocks")):
        found = read(AMD, name)["results"]["milliseconds"]
        rows += [
            times(f"{label}: as a whole", found["sequential"], OTHER),
            times(f"{label}: layer by layer", found["streamed"]),
            times(f"{label}: until the first layer", found["first_layer"]),
            times(f"{label}: both copies at once, bare", found["at_once"], OTHER),
        ]
    chart("stream", "Streams, 235 MB: until the reader has copied all out (EPYC)", "ms", rows)


def copies() -> None:
    """`copy`: what the machine's memory allows."""
    found = read(AMD, "copy")["results"]
    nbytes = found["payload_bytes"]
    rows = []
    for name, row in found["rows"].items():
        values = row["milliseconds"]
        p50, least, most = (nbytes / 1e6 / values[key] for key in ("p50", "max", "min"))
        color = OTHER if name in ("plain_copy", "torch_copy") else OURS
        rows.append(Row(name.replace("_", " "), p50, least, most, color))
    chart("copy", "Copies within one process, 235 MB (EPYC)", "GB/s", rows)


if __name__ == "__main__":
    for draw in (ratios, phases, network, streams, copies):
        draw()
