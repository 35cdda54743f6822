"""Transfers payloads between processes that meet random faults, and judges what each of them saw.

    python benchmarks/faults.py [--faults 100] [--seed 0] [--connector NAME …] [--json FILE]

A producer and two readers of each connector are killed and restarted, stopped for up to a second,
left without a free descriptor for a moment (not over zmq+ipc and ucx: libzmq and UCX end a process
that has none), or, by root, with so little memory that the kernel ends most, in random order. Every
reader compares the SHA-256 of the bytes that it got with that of the bytes that were put. The
judge, in `tests/network/evidence.py`, reads the logs of all processes, also of those that were
killed: each payload was read by each of its readers once, or its receipt says no; nothing hung; no
memory stayed in use; no descriptor, mapping or socket's file was left. Exit status 1 if not.

No disk is filled: payloads are in memory that no disk holds. `inproc` has one process: a fault of
it is one of both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "network"), str(TESTS)]

from campaign import (  # noqa: E402
    KINDS,
    PRODUCER,
    READERS,
    Campaign,
    Fault,
    Forker,
    address,
    memory_controller,
)
from evidence import contradictions  # noqa: E402

from omni_kvlink import UnavailableError  # noqa: E402
from omni_kvlink.bench import machine, report  # noqa: E402
from omni_kvlink.connectors.registry import backend  # noqa: E402

CONNECTORS = ("shm", "shm-sealed", "zmq+ipc", "zmq+tcp", "ucx", "auto")
NOT_RUN = {("zmq+ipc", "descriptors"), ("ucx", "descriptors")}
"""Kinds of faults that the library beneath a connector does not survive."""
FAULTS = 8
"""Of one campaign."""
KEYS = 120


def run(forker: Forker, connector: str, seed: str, faults: list[Fault]) -> dict[str, Any]:
    """One campaign; what was read, and what contradicts the promises."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        scheme, _, mode = connector.partition("-")
        options: dict[str, Any] = {"quota": 32 << 20}
        options |= {"directory": folder} if scheme in ("shm", "auto") else {}
        options |= {"mode": mode} if mode else {}
        logs = Path(folder, "logs")
        logs.mkdir()
        campaign = Campaign(forker, logs, address(scheme, folder), options, KEYS)
        problems = list[str]()
        try:
            records = campaign.run(random.Random(seed), faults)
            problems += contradictions(campaign.orders, records)
            problems += [f"left: {name}" for name in os.listdir(folder) if name != "logs"]
        except AssertionError as error:
            records = campaign.records()
            problems.append(f"it hung, or a process ended: {error}")
        finally:
            campaign.close()
        events = Counter(entry.event for record in records for entry in record.entries)
        events["killed"] = sum(record.killed for record in records)
    return {
        "connector": connector,
        "seed": seed,
        "faults": faults,
        "events": dict(events),
        "problems": problems,
    }


def total(results: list[dict[str, Any]], connector: str) -> list[str]:
    """The line of a connector."""
    mine = [result for result in results if result["connector"] == connector]
    kinds = Counter(kind for result in mine for kind, _ in result["faults"])
    events: Counter[str] = Counter()
    for result in mine:
        events.update(result["events"])
    ends = ("killed", "put", "read", "released", "failed", "expired", "LEAK", "WRONG")
    cells = [str(len(mine)), *(str(kinds[kind]) for kind in KINDS), *(str(events[e]) for e in ends)]
    return [*cells, str(sum(len(result["problems"]) for result in mine)), connector]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="over all connectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connector", action="append", choices=CONNECTORS)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    about = machine.describe()
    print(machine.one_line(about))
    connectors, results = list[str](), list[dict[str, Any]]()
    for connector in args.connector or CONNECTORS:
        try:
            backend(connector.partition("-")[0])
            connectors.append(connector)
        except UnavailableError as error:  # noqa: PERF203 (a handful)
            print(f"{connector}: not run: {error}")
    kinds = list[str](args.kind or KINDS)
    if "memory" in kinds and memory_controller() is None:
        kinds.remove("memory")
        print("memory: not run: no control group can be made here")
    rng, left, forker = random.Random(args.seed), args.faults, Forker()
    try:
        while left > 0 and connectors:
            for connector in connectors:
                names = [PRODUCER, *READERS]
                mine = [kind for kind in kinds if (connector, kind) not in NOT_RUN]
                if not mine:
                    continue
                faults = [(rng.choice(mine), rng.choice(names)) for _ in range(min(FAULTS, left))]
                left -= len(faults)
                if faults:
                    seed = f"{args.seed}/{len(results)}"
                    results.append(run(forker, connector, seed, faults))
                    for problem in results[-1]["problems"]:
                        print(f"{connector}, seed {seed}: {problem}", flush=True)
    finally:
        forker.close()
    head = [
        "runs",
        *KINDS,
        "killed",
        "put",
        "read",
        "released",
        "failed",
        "expired",
        "leaks",
        "wrong",
    ]
    print(report.table([*head, "problems", "connector"], [total(results, c) for c in connectors]))
    if args.json:
        report.write_json(args.json, "faults", about, vars(args), {"runs": results})
    return 1 if not results or any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
