"""Transfers payloads between processes that meet random faults, and judges every receipt.

    python benchmarks/faults.py [--faults 100] [--seed 0] [--topology NAME …] [--connector NAME …]
                                [--feature NAME …] [--kind NAME …] [--run SEED] [--logs DIR]
                                [--json FILE]

The readers of `shm-contained` have PID, IPC and network namespaces of their own, as in containers.

A producer and two readers of each connector are killed and restarted, stopped for up to a second,
left without a free descriptor for a moment (not over zmq+ipc and ucx: libzmq and UCX end a process
that has none), or, by root, with so little memory that the kernel ends most, in random order. Over
zmq+tcp, all connections of both readers, lanes too, are cut. The processes use every feature of the
library, and leave on their own, too: a reader by an exception, a timeout, `break`, `release_unread`
or its death at any chunk, a producer by an exception in its block. Every
second process has an observer of its transfers, which raises.

Every reader compares the SHA-256 of the bytes that it got with that of the bytes that were put, and
the path of its ledger with the configured one, which both ends require, and so do receipts; it
writes down what it has seen before it leaves. The judge, `tests/support/network/evidence.py`, reads
the logs of all processes, also of those that were killed: what a receipt says was released, was
read by so many readers, each chunk of it; what a reader never had, a receipt denies; nothing hung;
no memory stayed in use; no descriptor, mapping or socket's file was left. Exit status 1 if not.

`--topology store` has `kvlink store` with a directory, two writers and two readers of it (over all
connectors but `shm-contained`) killed, stopped, and cut off over zmq+tcp. Writers put and withdraw
payloads of each incarnation's own bytes; readers compare all that they get, also what they held
while its store died. At the end the store is restarted, its writers being gone, and each key is
read again: what it had taken is bit-equal, or was evicted or withdrawn; each file is whole, each
miss is counted, and the store has let go of all that its clients had. Its judge is
`tests/support/network/store_evidence.py`.

Each problem is printed with its seed; `--run SEED --connector NAME --topology NAME` repeats that
campaign. No disk is filled: payloads of links are in memory that no disk holds. `inproc` has one
process: a fault of it is one of both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from omni_kvlink import UnavailableError  # noqa: E402
from omni_kvlink.bench import machine, report  # noqa: E402
from omni_kvlink.cli import terminal  # noqa: E402
from omni_kvlink.connectors.registry import backend  # noqa: E402
from support.network.campaign import PRODUCER, READERS, Campaign, address, lookup_addresses  # noqa: E402
from support.network.evidence import contradictions  # noqa: E402
from support.network.faulty_processes import (  # noqa: E402
    KINDS,
    PEER_PROCESS,
    Fault,
    FaultyProcesses,
    Forker,
    memory_controller,
)
from support.network.features import FEATURES, PLAIN, feature_of, runs_over  # noqa: E402
from support.network.store_campaign import (  # noqa: E402
    STORE_PEERS,
    VICTIMS,
    Budgets,
    StoreCampaign,
)
from support.network.store_evidence import store_contradictions, store_lines  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.network.evidence import Record

LINK, STORE = TOPOLOGIES = ("link", "store")
"""A producer and readers of its link; or a store with a directory, its writers and its readers."""
SCRIPTS = {LINK: PEER_PROCESS, STORE: STORE_PEERS}
STORE_KINDS = ("kill", "freeze", "cut")
"""Faults of a store's campaign."""
STORE_KEYS = 120
CONTAINED = "shm-contained"

CONNECTORS = (
    "shm",
    "shm-sealed",
    CONTAINED,
    "zmq+ipc",
    "zmq+tcp",
    "zmq+tcp-plain",
    "ucx",
    "auto",
)
NOT_RUN = {("zmq+ipc", "descriptors"), ("ucx", "descriptors")}
"""Kinds of faults that the library beneath a connector does not survive."""
REQUIRED = {"shm": "shm", "auto": "shm,encrypted", "zmq+ipc": "encrypted", "zmq+tcp": "encrypted"}
"""Requirements for the path of a connector, at both ends."""
FAULTS = 24
"""Of one campaign."""
KEYS = 120
LEAVES = 0.3
"""How often a reader leaves a payload unread."""
LOST = "lost: "
"""What is untrue also in a campaign that did not come to its end."""
TCP = ("zmq+tcp", "zmq+tcp-plain")
"""Connectors whose connections are cut: through a relay."""
POOR = ("descriptors", "memory")
"""Faults in which any call of a process may fail: it is asked for plain payloads only."""


def run(
    forker: Forker,
    connector: str,
    seed: str,
    kinds: list[str],
    count: int,
    features: list[str],
    keep: str | None,
) -> dict[str, Any]:
    """One campaign, which the seed decides; what was read, and what contradicts the promises.

    The logs of one that found a problem are copied into the directory `keep`.
    """
    rng, names = random.Random(seed), [PRODUCER, *READERS]
    faults: list[Fault] = [(rng.choice(kinds), rng.choice(names)) for _ in range(count)]
    is_poor = any(kind in POOR for kind, _ in faults)
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        scheme, _, mode = connector.partition("-")
        # Some kept payloads are evicted.
        options = {"quota": (12 if "kept" in features else 32) << 20}
        logs = Path(folder, "logs")
        logs.mkdir()
        campaign = Campaign(
            forker,
            logs,
            address(scheme, folder),
            options | link_options(connector, folder),
            KEYS,
            features=PLAIN if is_poor else features,
            leaves=0.0 if is_poor else LEAVES,
            seed=seed,
            lookups=lookup_addresses(scheme, folder),
            are_contained=mode == "contained",
        )
        problems = list[str]()
        try:
            records = campaign.run(rng, faults)
            problems += contradictions(campaign.orders, records)
            problems += [f"left: {name}" for name in os.listdir(folder) if name != "logs"]
        except AssertionError as error:
            records = campaign.records()
            problems.append(f"it hung, or a process ended: {error}")
            problems += (one for one in contradictions(campaign.orders, records) if LOST in one)
        finally:
            campaign.close()
        if keep and problems:
            shutil.copytree(logs, Path(keep, connector, seed), dirs_exist_ok=True)
    transfers = Counter(map(feature_of, campaign.orders))
    return summary(connector, seed, faults, campaign, records, transfers, problems)


def run_store(
    forker: Forker, connector: str, seed: str, kinds: list[str], count: int, keep: str | None
) -> dict[str, Any]:
    """One campaign of a store, which the seed decides; as `run`."""
    rng = random.Random(seed)
    faults: list[Fault] = [(rng.choice(kinds), rng.choice(VICTIMS)) for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        logs, scheme = Path(folder, "logs"), connector.partition("-")[0]
        logs.mkdir()
        options = link_options(connector, folder)
        budgets = Budgets.drawn(rng)
        campaign = StoreCampaign(forker, logs, scheme, folder, options, STORE_KEYS, budgets, seed)
        problems = list[str]()
        try:
            records = campaign.run(rng, faults)
            owners, directory = campaign.owners, campaign.directory
            problems += store_contradictions(owners, records, budgets, directory)
            left = set(os.listdir(folder)) - {"logs", directory.name}
            problems += [f"left: {name}" for name in left]
        except AssertionError as error:
            records = campaign.records()
            problems.append(f"it hung, or a process ended: {error}")
        finally:
            campaign.close()
        lines = [line for path in logs.glob("*.out") for line in path.read_text().splitlines()]
        problems += store_lines(lines)
        if keep and problems:
            shutil.copytree(logs, Path(keep, connector, seed), dirs_exist_ok=True)
    transfers: Counter[str] = Counter({"store writer": len(campaign.owners)})
    found = summary(connector, seed, faults, campaign, records, transfers, problems)
    return {**found, "topology": STORE, "budgets": budgets._asdict()}


def link_options(connector: str, folder: str) -> dict[str, Any]:
    """The options of all links of a campaign."""
    scheme, _, mode = connector.partition("-")
    options: dict[str, Any] = {"directory": folder} if scheme in ("shm", "auto") else {}
    # Over TCP with keys, bytes of large payloads travel by lanes; without, if lanes= says so.
    options |= {"insecure": True, "lanes": 2} if mode == "plain" else {}
    options |= {"mode": mode} if mode == "sealed" else {}
    options |= {"require": REQUIRED[scheme]} if scheme in REQUIRED and mode != "plain" else {}
    return options


def summary(
    connector: str,
    seed: str,
    faults: list[Fault],
    campaign: FaultyProcesses,
    records: Sequence[Record],
    transfers: Counter[str],
    problems: list[str],
) -> dict[str, Any]:
    """What is written down of a campaign."""
    events = Counter(entry.event for record in records for entry in record.entries)
    events["killed"] = sum(record.killed for record in records)
    return {
        "connector": connector,
        "topology": LINK,
        "seed": seed,
        "faults": faults,
        "hits": campaign.hits,
        "transfers": dict(transfers),
        "events": dict(events),
        "problems": problems,
    }


ENDS = (
    *("killed", "put", "read", "chunk", "ended", "back", "released", "failed", "expired"),
    *("again", "missing", "withdrawn", "evicted", "kept", "found"),
)
"""Events of a campaign that the table counts."""


def name_of(result: dict[str, Any]) -> str:
    """The connector of a campaign, and its topology."""
    return f"{result['connector']}{', store' if result['topology'] == STORE else ''}"


def by_connector(results: list[dict[str, Any]]) -> str:
    """The table of what happened over each connector."""
    rows = []
    for name in dict.fromkeys(map(name_of, results)):
        mine = [result for result in results if name_of(result) == name]
        events: Counter[str] = Counter()
        for result in mine:
            events.update(result["events"])
        problems = sum(len(result["problems"]) for result in mine)
        cells = [len(mine), *(events[end] for end in ENDS), problems]
        rows.append([*map(str, cells), name])
    return terminal.table(["runs", *ENDS, "problems", "connector"], rows)


def by_feature(results: list[dict[str, Any]]) -> str:
    """The table of what a process was busy with when a fault hit it."""
    hits = Counter((kind, feature) for result in results for kind, feature in result["hits"])
    transfers: Counter[str] = Counter()
    for result in results:
        transfers.update(result["transfers"])
    kinds = [*KINDS, "death"]
    rows = [
        [str(transfers[feature]), *(str(hits[kind, feature]) for kind in kinds), feature]
        for feature in (*FEATURES, "start", "store", "store writer", "store reader")
        if transfers[feature] or any(hits[kind, feature] for kind in kinds)
    ]
    of_kind = Counter(kind for result in results for kind, _ in result["hits"])
    total = [str(sum(transfers.values())), *(str(of_kind[kind]) for kind in kinds)]
    return terminal.table(["payloads", *kinds, "feature"], [*rows, [*total, "all"]])


def available(chosen: list[str] | None) -> list[str]:
    """The connectors that run here."""
    found = list[str]()
    for connector in chosen or CONNECTORS:
        try:
            backend(connector.partition("-")[0])
            if connector == CONTAINED and os.geteuid():
                raise UnavailableError("namespaces need root")
            found.append(connector)
        except UnavailableError as error:  # noqa: PERF203 (a handful)
            print(f"{connector}: not run: {error}")
    return found


def campaigns(
    args: argparse.Namespace, connectors: list[str], kinds: list[str], topologies: Sequence[str]
) -> Iterator[tuple[str, str, list[str], int]]:
    """The connector, topology, kinds and number of faults of each campaign."""
    left = args.faults
    while left > 0 and connectors:
        for connector in connectors:
            for topology in topologies:
                mine = [kind for kind in kinds if (connector, kind) not in NOT_RUN]
                mine = [kind for kind in mine if kind != "cut" or connector in TCP]
                if topology == STORE:
                    mine = [kind for kind in mine if kind in STORE_KINDS]
                scheme, count = connector.partition("-")[0], min(FAULTS, left)
                is_run = any(runs_over(feature, scheme) for feature in args.feature or FEATURES)
                left -= count
                if count and mine and is_run and (topology, connector) != (STORE, CONTAINED):
                    yield connector, topology, mine, count


class Forkers(dict[str, Forker]):
    """The processes that fork those of each topology, started when they are needed."""

    def __enter__(self) -> Forkers:
        return self

    def __exit__(self, *exception: object) -> None:
        for forker in self.values():
            forker.close()

    def __missing__(self, topology: str) -> Forker:
        self[topology] = Forker(SCRIPTS[topology])
        return self[topology]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="over all connectors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", metavar="SEED", help="repeat one campaign, such as 0/7")
    parser.add_argument("--connector", action="append", choices=CONNECTORS)
    parser.add_argument("--topology", action="append", choices=TOPOLOGIES)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--feature", action="append", choices=FEATURES)
    parser.add_argument("--logs", metavar="DIR", help="copy the logs of each problem's run there")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    about = machine.describe()
    print(machine.one_line(about))
    connectors, results = available(args.connector), list[dict[str, Any]]()
    kinds = list[str](args.kind or KINDS)
    if "memory" in kinds and memory_controller() is None:
        kinds.remove("memory")
        print("memory: not run: no control group can be made here")
    topologies = args.topology or (LINK,) if args.feature else args.topology or TOPOLOGIES
    with Forkers() as forkers:
        for connector, topology, mine, count in campaigns(args, connectors, kinds, topologies):
            seed = args.run or f"{args.seed}/{len(results)}"
            forker = forkers[topology]
            if topology == STORE:
                found = run_store(forker, connector, seed, mine, count, args.logs)
            else:
                scheme = connector.partition("-")[0]
                features = [f for f in args.feature or FEATURES if runs_over(f, scheme)]
                found = run(forker, connector, seed, mine, count, features, args.logs)
            results.append(found)
            for problem in found["problems"]:
                print(f"{connector}, --topology {topology} --run {seed}: {problem}", flush=True)
    print(by_connector(results), by_feature(results), sep="\n\n")
    if args.json:
        report.write_json(args.json, "faults", about, vars(args), {"runs": results})
    return 1 if not results or any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
