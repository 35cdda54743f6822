"""vLLM-Omni's own manager at both ends: its SharedMemoryConnector beside ours, phase by phase.

    python benchmarks/vllm_omni_manager.py [--rounds 12] [--transports shm zmq+tcp] [--json FILE]

Two processes; every round alternates all connectors, so that each is compared with the others of
its own run. Each round has a receiver that waits, as a stage does, and one that requests a payload
that has been sent, which leaves out the cost of polling. Exit status: 0 done, 2 no vLLM-Omni here.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import multiprocessing
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal
from omni_kvlink.integrations.vllm_omni import register

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LAYERS, HEADS, DIM, BLOCK = 28, 4, 128, 16
WARMUP = 3
BAR = 15.0
THEIRS = "SharedMemoryConnector"
PHASES = {
    "extract": "the manager takes the blocks out of the pools",
    "serialise": "the manager packs them into bytes",
    "put": "the connector's put",
    "get": "put returned → the connector's get returned",
    "unpack": "the manager makes tensors of its own",
    "total": "start → received",
    "handover": "put called → get returned: put and get",
    "late": "put, then a get that need not wait: their sum",
}
Timestamps = dict[str, float]
Times = dict[str, dict[str, list[float]]]


class TimedManager:
    """A manager whose steps are timed on the machine's monotonic clock."""

    def __init__(self, role: str, config: dict[str, Any]):
        from vllm_omni.distributed.omni_connectors import kv_transfer_manager as module

        is_sender = role == "sender"
        self.manager = module.OmniKVTransferManager(
            module.OmniKVCacheConfig(
                connector_config={**config, "role": role},
                from_stage="0",
                to_stage="1",
                stage_id="0" if is_sender else "1",
                engine_input_source=["0"],
                need_send_cache=is_sender,
                need_recv_cache=not is_sender,
            )
        )
        self.timestamps: Timestamps = {}
        if is_sender:
            self._watch(self.manager, "_serialize_transfer_payload", "serialise")
            self._watch(self.manager.connector, "put", "put")
        else:
            self._watch(self.manager.connector, "get", "get")

    def _watch(self, owner: Any, name: str, step: str) -> None:
        """Record when the last call began and ended."""
        act = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            self.timestamps[f"{step} from"] = time.monotonic()
            result = act(*args, **options)
            self.timestamps[f"{step} to"] = time.monotonic()
            return result

        setattr(owner, name, watched)


def receive(pipe: Connection, configs: dict[str, dict[str, Any]]) -> None:
    """The receiving stage: receives each request that the pipe names, and sends its timestamps."""
    logging.disable(logging.CRITICAL)
    register()
    managers = {name: TimedManager("receiver", config) for name, config in configs.items()}
    pipe.send("ready")
    for name, request in iter(pipe.recv, None):
        watched = managers[name]
        pipe.send("requesting")
        data, nbytes = watched.manager.receive_kv_cache_for_request(request)
        watched.timestamps["received"] = time.monotonic()
        if data is None:
            raise RuntimeError(f"{name}: nothing came")
        last = data["layer_blocks"]["value_cache"][-1]
        pipe.send((watched.timestamps, nbytes, last[-1].float().sum().item()))
        del data, last
    for watched in managers.values():
        watched.manager.close()


class Bench:
    """The sending stage: pools, managers, and what was measured."""

    def __init__(self, tokens: int, configs: dict[str, dict[str, Any]], pipe: Connection):
        blocks = -(-tokens // BLOCK)
        shape = (2, blocks + blocks // 8, BLOCK, HEADS, DIM)
        self.pools = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS)]
        self.ids: list[int] = torch.randperm(shape[1])[:blocks].tolist()
        last = divmod(tokens - 1, BLOCK)
        self.check = self.pools[-1][1, self.ids[last[0]], last[1]].float().sum().item()
        self.tokens, self.pipe, self.nbytes = tokens, pipe, 0
        self.managers = {name: TimedManager("sender", config) for name, config in configs.items()}
        self.times: Times = {name: {phase: [] for phase in PHASES} for name in configs}

    def round(self, number: int, *, keep: bool) -> None:
        for name in self.managers:
            self.pipe.send((name, f"wait-{number}"))
            assert self.pipe.recv() == "requesting"
            time.sleep(random.uniform(0.2, 0.7))  # at any moment between two polls
            started = self._send(name, f"wait-{number}")
            timestamps = {**self.managers[name].timestamps, **self._received()}
            found = {
                "extract": timestamps["serialise from"] - started,
                "serialise": timestamps["serialise to"] - timestamps["serialise from"],
                "put": timestamps["put to"] - timestamps["put from"],
                "get": timestamps["get to"] - timestamps["put to"],
                "unpack": timestamps["received"] - timestamps["get to"],
                "total": timestamps["received"] - started,
                "handover": timestamps["get to"] - timestamps["put from"],
            }
            self._send(name, f"late-{number}")
            self.pipe.send((name, f"late-{number}"))
            assert self.pipe.recv() == "requesting"
            timestamps = {**self.managers[name].timestamps, **self._received()}
            found["late"] = sum(
                timestamps[f"{m} to"] - timestamps[f"{m} from"] for m in ("put", "get")
            )
            if keep:
                for phase, seconds in found.items():
                    self.times[name][phase].append(1e3 * seconds)

    def _send(self, name: str, request: str) -> float:
        finished = {request: {"block_ids": self.ids, "seq_len": self.tokens}}
        manager, started = self.managers[name].manager, time.monotonic()
        manager.handle_finished_requests_kv_transfer(finished, self.pools, BLOCK, "bfloat16")
        return started

    def _received(self) -> Timestamps:
        timestamps: Timestamps
        timestamps, self.nbytes, check = self.pipe.recv()
        if not math.isclose(check, self.check):
            raise RuntimeError("these are not the numbers that were sent")
        return timestamps


def ratios(found: dict[str, dict[str, Summary]]) -> dict[str, dict[str, float]]:
    """How many times faster than their connector, by medians."""
    return {
        name: {
            what: round(found[THEIRS][what].p50 / phases[what].p50, 2)
            for what in ("total", "handover", "late")
        }
        for name, phases in found.items()
        if name != THEIRS
    }


def text(found: dict[str, dict[str, Summary]], nbytes: int) -> str:
    rows = [
        [phase, *(_figures(phases[phase]) for phases in found.values()), meaning]
        for phase, meaning in PHASES.items()
    ]
    lines = [
        f"{nbytes / 1e6:.0f} MB; ms, p50 [min..max]",
        terminal.table(["", *found, "what"], rows),
    ]
    for name, times in ratios(found).items():
        phases = found[name]
        theirs = sum(phases[phase].p50 for phase in ("extract", "serialise", "unpack"))
        met = "met" if times["total"] >= BAR else "missed"
        lines.append(
            f"{name}: start → received {times['total']:.1f} × faster (bar: {BAR:g}, {met}), "
            f"put → got {times['handover']:.1f} ×, late {times['late']:.1f} ×; "
            f"{theirs / phases['total'].p50:.0%} of its total is the manager's own work"
        )
    best = min(sum(f[p].p50 for p in ("extract", "serialise", "unpack")) for f in found.values())
    most = found[THEIRS]["total"].p50 / best
    lines.append(f"a connector that takes no time at all would be {most:.1f} × faster in total")
    return "\n".join(lines)


def _figures(summary: Summary) -> str:
    return f"{summary.p50:.1f} [{summary.min:.1f}..{summary.max:.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--transports", nargs="+", default=["shm", "zmq+ipc"])
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    if importlib.util.find_spec("vllm_omni") is None:
        print("nothing was measured: vLLM-Omni is not installed", file=sys.stderr)
        return 2
    logging.disable(logging.CRITICAL)
    register()
    name = f"bench-{os.getpid()}"
    configs: dict[str, dict[str, Any]] = {THEIRS: {"type": THEIRS}}
    for transport in args.transports:
        kvlink = {"transport": transport, "name": name}
        configs[f"kvlink {transport}"] = {"type": "OmniKVLinkConnector", "kvlink": kvlink}
    about = machine.describe()
    print(machine.one_line(about))
    spawn = multiprocessing.get_context("spawn")
    mine, other = spawn.Pipe()
    reader = spawn.Process(target=receive, args=(other, configs), daemon=True)
    reader.start()
    other.close()
    assert mine.recv() == "ready"
    bench = Bench(args.tokens, configs, mine)
    for number in range(WARMUP + args.rounds):
        bench.round(number, keep=number >= WARMUP)
    mine.send(None)
    reader.join()
    for watched in bench.managers.values():
        watched.manager.close()
    found = {
        name: {phase: Summary.of(values) for phase, values in phases.items()}
        for name, phases in bench.times.items()
    }
    print(text(found, bench.nbytes))
    if args.json:
        setup = {**vars(args), "layers": LAYERS, "heads": HEADS, "head_dim": DIM, "block": BLOCK}
        times = {n: {p: s.to_dict() for p, s in phases.items()} for n, phases in found.items()}
        results = {"nbytes": bench.nbytes, "ms": times, "times_faster": ratios(found)}
        report.write_json(args.json, "vllm_omni_manager", about, setup, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
