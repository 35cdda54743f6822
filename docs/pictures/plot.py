"""Draws the pages' figures from benchmarks/results: `python docs/pictures/plot.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
sys.path += [str(HERE.parents[1] / "examples"), str(RESULTS.parent)]

from chart import OTHER, OURS, BarRow, times  # noqa: E402
from chart import chart as svg  # noqa: E402

AMD, XEON = "amd-epyc-2core", "intel-xeon-2core"
H200 = "nvidia-h200"


def read(machine: str, name: str) -> dict[str, Any]:
    """The results of one document."""
    found: dict[str, Any] = json.loads((RESULTS / machine / f"{name}.json").read_text())
    return found


def chart(name: str, title: str, unit: str, rows: list[BarRow], *, mark: float = 0.0) -> None:
    """Write one picture."""
    (HERE / f"bench_{name}.svg").write_text(svg(title, unit, rows, mark=mark))


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


def growing() -> None:
    """`append-stream`: the CPU of each side, all threads, for one chunk."""
    rows = []
    paces = {
        "growing": "asked for 50/s each",
        "growing-10": "asked for 10/s each",
        "growing-steps": "64 in one chunk, 50/s",
    }
    for name, pace in paces.items():
        found = read(AMD, name)["results"]["cpu_us_per_chunk"]
        rows += [
            BarRow(f"{kind}, {side}, {pace}", cost, cost, cost, color)
            for kind, color in (("link", OURS), ("pipe", OTHER))
            for side, cost in found[kind].items()
        ]
    chart("growing", "64 streams of 4 KB chunks, shm: CPU for one chunk (EPYC)", "µs", rows)


def many() -> None:
    """`many`: the CPU of each side, all threads, for one payload."""
    found = read(AMD, "many")["results"]["cpu_us_per_transfer"]
    about = {"single": "put, begin_get", "batched": "put_many, get_many", "pipe": "a bare pipe"}
    rows = [
        times(f"{label}: {side}", values, OTHER if kind == "pipe" else OURS)
        for kind, label in about.items()
        for side, values in found[kind].items()
    ]
    chart("many", "Payloads of 4 KB at a rate, shm: CPU for one (EPYC)", "µs", rows)


def copies() -> None:
    """`copy`: what the machine's memory allows."""
    found = read(AMD, "copy")["results"]
    nbytes = found["payload_bytes"]
    rows = []
    for name, row in found["rows"].items():
        values = row["milliseconds"]
        p50, least, most = (nbytes / 1e6 / values[key] for key in ("p50", "max", "min"))
        color = OTHER if name in ("plain_copy", "torch_copy") else OURS
        rows.append(BarRow(name.replace("_", " "), p50, least, most, color))
    chart("copy", "Copies within one process, 235 MB (EPYC)", "GB/s", rows)


def device() -> None:
    """`gpu_extraction`: a cache out of an H200, alone and beside a forward pass."""
    found = read(H200, "gpu_extraction")["results"]
    rows = []
    for kind, label in (("dense", "dense"), ("paged", "from blocks")):
        ms = found[f"28 layers × 4096 tokens, {kind}"]["ms"]
        rows += [
            times(f"{label}: one plain copy out", ms["plain out"], OTHER),
            times(f"{label}: gather, with digests", ms["gather"]),
            times(f"{label}: the forward pass alone", ms["pass"], OTHER),
            times(f"{label}: the pass, the cache taken out meanwhile", ms["pass, streamed"]),
            times(f"{label}: until the last digest is there", ms["streamed"]),
            times(f"{label}: the pass, then gather", ms["one after the other"], OTHER),
        ]
    chart("device", "Out of an H200, 235 MB: alone, and beside a forward pass", "ms", rows)


def peers() -> None:
    """`peers`: the same blocks by several systems in one run, into the target blocks."""
    for name, picture, about in (
        ("peers", "peers", "dense tensors"),
        ("peers-paged", "peers_paged", "random blocks of 16 tokens"),
    ):
        found = read(AMD, name)["results"]
        rows = [times("a plain copy, one thread", found["plain_copy_ms"], OTHER)]
        rows += [
            times(
                f"{system} ({row['verifies']})",
                row["scattered_ms"],
                OURS if system.startswith("omni_kvlink") else OTHER,
            )
            for system, row in found["peers"].items()
            if row["scattered_ms"]
        ]
        title = f"235 MB, {about}: send to target blocks, and what is verified (EPYC)"
        chart(picture, title, "ms", rows)


def thinker_talker() -> None:
    """`examples/thinker_talker.py`: when each step ran."""
    from timeline import Row, Span, timeline

    found = read(AMD, "thinker-talker")["ms"]
    rows = [Row(label, [Span(*span) for span in spans]) for label, spans in found]
    (HERE / "thinker_talker.svg").write_text(timeline("ms", rows))


if __name__ == "__main__":
    for draw in (
        *(ratios, phases, network, streams, growing),
        *(many, copies, device, peers, thinker_talker),
    ):
        draw()
