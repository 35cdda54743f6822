"""Nested payloads through vLLM-Omni's SharedMemoryConnector and ours: put called → get returned.

    python benchmarks/vllm_omni_nested.py [--rounds 40] [--before DIR] [--json FILE]

Each connector has a sending and a receiving process of its own; every round alternates all of them
and all payloads. "polled": the receiver asks again each millisecond, as vLLM-Omni's loop does, from
before the put on. "among 64": so it does, and asks for the payloads of 63 other requests each time,
which do not come. "late": a put, then one get, the sum of both calls. `--before` adds the library
of another directory. Exit status: 0 done, 2 no vLLM-Omni here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import time
from typing import Any

import torch

from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal

WARMUP, WAITING = 4, 64
EDGE = ("0", "1")
THEIRS = "SharedMemoryConnector"
TOKENS, WIDTH = 2048, 3584


def payload(name: str) -> dict[str, Any]:
    """A chunk of 4 KB, or hidden states and embeddings of a prompt, 29 MB."""
    meta = {"finished": torch.tensor(False), "left_context_size": 3}
    if name == "chunk":
        return {"codes": {"audio": torch.arange(480)}, "meta": meta}
    rows = torch.randn(TOKENS, WIDTH).to(torch.bfloat16)
    return {
        "hidden_states": {"output": rows, "layers": {0: rows[:, :16]}},
        "embed": {"prefill": rows + 1},
        "ids": {"prompt": list(range(TOKENS))},
        "meta": meta,
    }


def check(data: dict[str, Any]) -> float:
    """A number that differs if other data arrived."""
    tensor = data["codes"]["audio"] if "codes" in data else data["embed"]["prefill"][-1]
    return float(tensor.float().sum())


def end(role: str, section: str) -> None:
    """One process: obeys lines of JSON on its standard input, answers with lines."""
    logging.disable(logging.CRITICAL)
    config = json.loads(section)
    connector: Any
    if config:
        from omni_kvlink.integrations.vllm_omni.connector import VllmOmniConnector

        connector = VllmOmniConnector(config)
    else:
        from vllm_omni.distributed.omni_connectors.connectors import shm_connector

        connector = shm_connector.SharedMemoryConnector(config)
    torch.manual_seed(1)
    payloads = {name: payload(name) for name in ("chunk", "hidden")}
    print("ready", flush=True)
    for line in sys.stdin:
        name, key, others = json.loads(line)
        if role == "receiver":
            print("asking", flush=True)
        started = time.monotonic()
        if role == "sender":
            done, nbytes, _ = connector.put(*EDGE, key, payloads[name])
            assert done
            print(json.dumps([started, time.monotonic(), nbytes]), flush=True)
            continue
        while (found := connector.get(*EDGE, key)) is None:
            for other in range(others):
                assert connector.get(*EDGE, f"{os.getpid()}-{other}_0_1") is None
            time.sleep(0.001)
            started = time.monotonic()
        ended = time.monotonic()
        assert check(found[0]) == check(payloads[name]), "other data arrived"
        print(json.dumps([started, ended]), flush=True)
    connector.close()


class Pair:
    """The two processes of one connector."""

    def __init__(self, config: dict[str, Any], path: str):
        environment = {**os.environ, "PYTHONPATH": path}
        self._ends = {
            role: subprocess.Popen(
                [sys.executable, __file__, "--end", role, "--section", json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            for role in ("sender", "receiver")
        }
        for role in self._ends:
            self._wait_for(role, "ready")

    def late(self, name: str, key: str) -> tuple[float, int]:
        """Seconds of a put and of a get that follows; the payload's bytes."""
        put, got, nbytes = self._put(name, key)
        self._send("receiver", name, key)
        self._wait_for("receiver", "asking")
        began, ended = self._answer("receiver")
        return got - put + ended - began, nbytes

    def polled(self, name: str, key: str, others: int = 0) -> float:
        """Seconds from a put to the end of the get that polls for it, and for others that wait."""
        self._send("receiver", name, key, others)
        self._wait_for("receiver", "asking")
        time.sleep(random.uniform(0.02, 0.03))
        put, _, _ = self._put(name, key)
        return float(self._answer("receiver")[1] - put)

    def close(self) -> None:
        for process in self._ends.values():
            process.communicate()

    def _put(self, name: str, key: str) -> Any:
        self._send("sender", name, key)
        return self._answer("sender")

    def _send(self, role: str, name: str, key: str, others: int = 0) -> None:
        stdin = self._ends[role].stdin
        assert stdin is not None
        stdin.write(json.dumps([name, key, others]) + "\n")
        stdin.flush()

    def _wait_for(self, role: str, line: str) -> None:
        while (found := self._line(role)) != line:  # vLLM-Omni prints at its import
            assert found, f"the {role} ended"

    def _answer(self, role: str) -> Any:
        return json.loads(self._line(role))

    def _line(self, role: str) -> str:
        stdout = self._ends[role].stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, f"the {role} ended"
        return line.rstrip("\n")


def measure(pairs: dict[str, Pair], rounds: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Milliseconds by payload, timing and connector; bytes by payload."""
    cases = [(name, timing) for name in ("chunk", "hidden") for timing in ("polled", "late")]
    cases.append(("chunk", f"among {WAITING}"))
    times: dict[str, Any] = {f"{n}, {w}": {pair: [] for pair in pairs} for n, w in cases}
    sizes: dict[str, int] = {}
    for number in range(WARMUP + rounds):
        for name, timing in cases:
            for which in random.sample(list(pairs), len(pairs)):
                key = f"{os.getpid()}-{number}-{name}-{timing}_0_0"
                if timing == "late":
                    seconds, sizes[name] = pairs[which].late(name, key)
                else:
                    others = 0 if timing == "polled" else WAITING - 1
                    seconds = pairs[which].polled(name, key, others)
                if number >= WARMUP:
                    times[f"{name}, {timing}"][which].append(1e3 * seconds)
    return times, sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", metavar="DIR", help="a directory with another omni_kvlink")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--end", choices=["sender", "receiver"], help=argparse.SUPPRESS)
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.end:
        end(args.end, args.section)
        return 0
    if importlib.util.find_spec("vllm_omni") is None:
        print("nothing was measured: vLLM-Omni is not installed", file=sys.stderr)
        return 2
    about = machine.describe()
    print(machine.one_line(about))
    here = os.environ.get("PYTHONPATH", "")
    name = f"bench-{os.getpid()}"
    pairs = {THEIRS: Pair({}, here), "kvlink shm": Pair({"kvlink": {"name": name}}, here)}
    if args.before:
        section = {"kvlink": {"name": f"{name}-before"}}
        pairs["before"] = Pair(section, os.path.abspath(args.before))
    times, sizes = measure(pairs, args.rounds)
    for pair in pairs.values():
        pair.close()
    found = {
        what: {which: Summary.of(values) for which, values in by.items()}
        for what, by in times.items()
    }
    rows = [
        [what, *(f"{s.p50:.2f} [{s.min:.2f}..{s.max:.2f}]" for s in by.values())]
        for what, by in found.items()
    ]
    print(f"bytes: {sizes}; ms, p50 [min..max]")
    print(terminal.table(["", *pairs], rows))
    if args.json:
        values = {w: {p: s.to_dict() for p, s in by.items()} for w, by in found.items()}
        results = {"nbytes": sizes, "ms": values}
        setup = {"rounds": args.rounds, "tokens": TOKENS, "width": WIDTH}
        report.write_json(args.json, "vllm_omni_nested", about, setup, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
