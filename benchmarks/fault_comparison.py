"""The same random faults for this library, vLLM-Omni's SharedMemoryConnector and bare ZMQ.

    python benchmarks/fault_comparison.py [--faults 40] [--seed 0] [--system NAME …] [--json FILE]

A producer and two readers are killed and restarted, or stopped for up to a second, in random order;
each system gets the same order. A restarted producer puts again what no reader has. Every reader
compares the SHA-256 of what it got with what was put. A payload is *lost* if its reader waited 5 s
in vain and nobody was told: neither a receipt nor a `put` said no. What is *left* are the files in
/dev/shm after all processes have ended.

vLLM-Omni must be installed: `make .venv-vllm-omni/.ready`, and that environment's Python. Exit
status: 0 done, 1 if this library lost, changed or left anything.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path.insert(0, str(TESTS))

from omni_kvlink.bench import machine, report  # noqa: E402
from omni_kvlink.cli import terminal  # noqa: E402
from support.network.campaign import PRODUCER, READERS, Campaign, address  # noqa: E402
from support.network.faulty_processes import Fault, Forker  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from support.network.evidence import Record

OURS = {"omni_kvlink shm": "shm", "omni_kvlink zmq": "zmq+ipc"}
THEIRS = ("vllm-omni shm", "bare zmq")
KINDS = ("kill", "freeze")
FAULTS, KEYS, PATIENCE = 8, 120, 5.0
"""Of one campaign; seconds that a reader waits for each key."""
SHM = Path("/dev/shm")


def run(forker: Forker, system: str, seed: str, faults: list[Fault]) -> dict[str, Any]:
    """One campaign of a system, and what became of its payloads."""
    before = set(os.listdir(SHM))
    prefix = f"kvl-{os.getpid()}-{seed.replace('/', '-')}-"
    hung = ""
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        options: dict[str, Any] = {"system": system, "prefix": prefix}
        url = f"ipc://{folder}/bare.sock"
        if system in OURS:
            url = address(OURS[system], folder)
            options = {"quota": 32 << 20}
            options |= {"directory": folder} if OURS[system] == "shm" else {}
        campaign = Campaign(
            forker, Path(folder), url, options, KEYS, shared=False, patience=PATIENCE
        )
        try:
            campaign.run(random.Random(seed), faults)
        except AssertionError as error:
            hung = str(error)
        finally:
            campaign.close()
        found = outcome(campaign.orders, campaign.records())
    left = [SHM / name for name in os.listdir(SHM) if name not in before and prefix in name]
    found["left"] = len(left)
    found["left_nbytes"] = sum(path.stat().st_size for path in left)
    for path in left:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return {"system": system, "seed": seed, "faults": faults, "hung": hung, **found}


def outcome(orders: Mapping[str, Sequence[str]], records: Sequence[Record]) -> Counter[str]:
    """How many payloads were read, lost, wrong or read again; judged by the logs alone."""
    events = Counter(entry.event for record in records for entry in record.entries)
    had = {(record.peer, key) for record in records for key, _ in record.reads}
    completed = Counter((record.peer, key) for record in records for key, _ in record.completed)
    said_no = {
        entry.key
        for record in records
        for entry in record.entries
        if entry.event in ("failed", "expired", "refused")
    }
    ordered = [(name, key) for key, names in orders.items() for name in names]
    return Counter(
        killed=sum(record.killed for record in records),
        put=events["put"],
        read=len(had),
        lost=sum(each not in had and each[1] not in said_no for each in ordered),
        denied=sum(each not in had and each[1] in said_no for each in ordered),
        wrong=events["WRONG"],
        again=sum(times > 1 for times in completed.values()),
        broke=events["BROKE"],
    )


COLUMNS = ("killed", "put", "read", "lost", "denied", "wrong", "again", "broke", "left")


def total(results: list[dict[str, Any]], system: str) -> list[str]:
    """The line of a system."""
    mine = [result for result in results if result["system"] == system]
    cells = [str(sum(len(result["faults"]) for result in mine))]
    cells += [str(sum(result[column] for result in mine)) for column in COLUMNS]
    mib = sum(result["left_nbytes"] for result in mine) / (1 << 20)
    return [*cells, f"{mib:.1f}", str(sum(bool(result["hung"]) for result in mine)), system]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=40, help="of each system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", action="append", choices=(*OURS, *THEIRS))
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    about = machine.describe()
    print(machine.one_line(about))
    systems = list(args.system or (*OURS, *THEIRS))
    if "vllm-omni shm" in systems and importlib.util.find_spec("vllm_omni") is None:
        systems.remove("vllm-omni shm")
        print("vllm-omni shm: not run: make .venv-vllm-omni/.ready, and use its Python")
    rng, results, left = random.Random(args.seed), list[dict[str, Any]](), args.faults
    forkers = {True: Forker(), False: Forker(HERE / "neighbour_peer.py")}
    try:
        while left > 0:
            names = [PRODUCER, *READERS]
            faults = [(rng.choice(KINDS), rng.choice(names)) for _ in range(min(FAULTS, left))]
            left -= len(faults)
            seed = f"{args.seed}/{left}"
            for system in systems:
                results.append(run(forkers[system in OURS], system, seed, faults))
    finally:
        for forker in forkers.values():
            forker.close()
    head = ["faults", *COLUMNS, "MiB left", "hung", "system"]
    print(terminal.table(head, [total(results, system) for system in systems]))
    if args.json:
        report.write_json(args.json, "fault comparison", about, vars(args), {"runs": results})
    bad = ("lost", "wrong", "again", "broke", "left", "hung")
    return int(any(result[each] for result in results for each in bad if result["system"] in OURS))


if __name__ == "__main__":
    sys.exit(main())
