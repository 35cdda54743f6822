"""Sends requests through vllm-router to vLLM servers that are killed, and judges every answer.

    python benchmarks/fleet_faults.py [--requests 200] [--faults 20] [--seed 0] [--json FILE]

Needs the environment of `make test-vllm`. A fault is a client that leaves at a random token, or a
server, of prefill or of decode, that is killed with its engine at a random token of a request, and
started again. Each answer is compared with that of one engine alone. Exit status 1 if a token is
wrong, a request has no end, or a block of either engine stays in use.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from omni_kvlink.testing.rig import until  # noqa: E402
from support.vllm.engine_process import PATIENCE, EngineProcess, prompt  # noqa: E402
from support.vllm.fleet import DECODE, PREFILL, ROUTER, Completion, Fleet, complete, stream  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

AT_ONCE = 4
"""Requests in flight."""
TOKENS = 16
"""Of each answer."""
KINDS = (*["abort"] * 5, f"kill {PREFILL}", f"kill {DECODE}")


class Fault(NamedTuple):
    """What happens to a request: `kind` when `tokens` of its answer have come."""

    kind: str
    tokens: int


def plan(rng: random.Random, requests: int, faults: int) -> dict[int, Fault]:
    """Faults by the number of the request; each kind is as frequent as in `KINDS`."""
    numbers = rng.sample(range(requests), faults)
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    return {
        number: Fault(kind, rng.randrange(TOKENS))
        for number, kind in zip(numbers, kinds, strict=True)
    }


def make_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Different prompts, of less than a block up to many."""
    return [prompt(rng.choice((5, 33, 96, 169, 300)), seed=seed) for seed in range(count)]


def answers(model: Path, directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine alone says to each prompt."""
    alone = EngineProcess(model, directory / "alone.log", None, enable_prefix_caching=False)
    try:
        return [alone.generate(tokens, tokens=TOKENS)["tokens"] for tokens in prompts]
    finally:
        alone.close()


class Campaign:
    """Requests to a fleet, some with a fault; counts how each of them ended."""

    def __init__(self, fleet: Fleet, prompts: list[list[int]], expected: list[list[int]]):
        self._fleet, self._prompts, self._expected = fleet, prompts, expected
        self._serving = threading.Event()
        self._outage = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.outages: list[float] = []

    def run(self, faults: dict[int, Fault]) -> None:
        """Send all requests, then one more, and wait until all blocks are free."""
        self._serving.set()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ends = list(pool.map(lambda n: self._send(n, faults.get(n)), range(len(self._prompts))))
        self.ends.update(ends)
        waits: list[Callable[[], None]] = [
            lambda: until(self._serves, "a request is answered", PATIENCE),
            self._fleet.servers[PREFILL].until_all_blocks_are_free,
            self._fleet.servers[DECODE].until_all_blocks_are_free,
        ]
        for wait in waits:
            try:
                wait()
            except AssertionError as error:  # noqa: PERF203 (three)
                self.problems.append(f"after the faults: {error}")

    def _serves(self) -> bool:
        last = complete(self._fleet.servers[ROUTER].port, self._prompts[0], TOKENS)
        return last.tokens == self._expected[0]

    def _send(self, number: int, fault: Fault | None) -> str:
        """Send a request, with its fault; how it ended, for its user."""
        self._serving.wait()
        port = self._fleet.servers[ROUTER].port
        last = Completion()
        try:
            with closing(stream(port, self._prompts[number], TOKENS)) as states:
                for last in states:
                    if fault is None or len(last.tokens) < fault.tokens:
                        continue
                    self.faults[fault.kind] += 1
                    if fault.kind == "abort":
                        break
                    self._kill(fault.kind, number)
                    fault = None
            if fault is not None and fault.kind != "abort":  # the request has failed before
                self.faults[fault.kind] += 1
                self._kill(fault.kind, number)
        except TimeoutError as error:
            self.problems.append(f"HUNG: request {number}: {error}")
            return "HUNG"
        return self._judge(number, last)

    def _judge(self, number: int, last: Completion) -> str:
        expected = self._expected[number]
        if last.tokens != expected[: len(last.tokens)]:
            self.problems.append(f"WRONG: request {number}: {last}, not {expected}")
            return "WRONG"
        if last.reason == "length" and len(last.tokens) == TOKENS:
            return "right"
        if last.reason == "length":
            self.problems.append(f"SHORT: request {number}: {last}")
            return "SHORT"
        return "error" if last.error or last.reason else "left"

    def _kill(self, kind: str, number: int) -> None:
        """Kill a server, ask something meanwhile, and start it again."""
        side = kind.removeprefix("kill ")
        with self._outage:
            self._serving.clear()
            began = time.monotonic()
            self._fleet.servers[side].kill()
            port = self._fleet.servers[ROUTER].port
            try:
                meanwhile = complete(port, self._prompts[number], TOKENS)
                if meanwhile.tokens not in ([], self._expected[number]):
                    self.problems.append(f"WRONG: without {side}: {meanwhile}")
            except TimeoutError as error:
                self.problems.append(f"HUNG: without {side}: {error}")
            self._fleet.start(side)
            try:
                until(self._serves, "a request is answered", PATIENCE)
            except AssertionError as error:
                self.problems.append(f"after the end of {side}: {error}")
            self.outages.append(round(time.monotonic() - began, 1))
            self._serving.set()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    faults, prompts = plan(rng, args.requests, args.faults), make_prompts(rng, args.requests)
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        directory, model = Path(folder), Path(folder, "model")
        runpy.run_path(str(ROOT / "examples" / "pd_vllm.py"))["make_model"](model)
        expected = answers(model, directory, prompts)
        fleet = Fleet(model, directory, ttl=10.0)
        try:
            fleet.start(PREFILL, DECODE)
            fleet.start(ROUTER)
            campaign = Campaign(fleet, prompts, expected)
            campaign.run(faults)
            received = fleet.servers[DECODE].metric("vllm:omni_kvlink_received_total")
        finally:
            fleet.close()
    result: dict[str, Any] = {
        "requests": args.requests,
        "seed": args.seed,
        "faults": dict(campaign.faults),
        "ends": dict(campaign.ends),
        "received by the last decode engine": received,
        "seconds without a server": campaign.outages,
        "problems": campaign.problems,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
