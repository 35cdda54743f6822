"""Prefill and decode in different processes, with transformers: tokens and logits of one process.

A random Qwen2 is made on the spot. Producers prefill prompts into stores; consumers look the
longest prefix of their prompts up, compute only what is missing, and decode. At the end every token
and every bit of every logit is compared with a single process; the exit status says whether all are
equal.

    python examples/pd_transformers.py                                  # one prompt, 32 tokens
    python examples/pd_transformers.py --url zmq+tcp://127.0.0.1:0
    python examples/pd_transformers.py --url 'ucx://127.0.0.1:0?trusted_network=1'
    python examples/pd_transformers.py --prompts 200 --producers 2 --consumers 2 --steps 8
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from pd_engine import Engine, make_prompts, run_consumer, run_producer
from safetensors.torch import load_file

from omni_kvlink.lookup import Match
from omni_kvlink.payload.views import same_bytes

Facts = dict[str, Any]


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # the same number everywhere, for the same sums
    if args.stage:
        run_stage(args)
        return 0
    print(
        f"Qwen2 of random weights, {args.dtype}: {args.prompts} prompts, {args.producers} "
        f"producers, {args.consumers} consumers over {args.url}\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        args.scratch = scratch
        done, stores = run_stages(args)
        return 0 if verdict(args, done, stores) else 1


def run_stage(args: argparse.Namespace) -> None:
    engine, prompts = Engine(args.dtype), make_prompts(args.prompts)
    if args.stage.startswith("P"):
        run_producer(engine, args.url, prompts, int(args.budget * 2**20))
    else:
        scratch = Path(args.scratch)
        run_consumer(engine, args.url, prompts, args.steps, args.timeout, scratch)


class Stage:
    """A stage's process, and the messages to and from it."""

    def __init__(self, args: argparse.Namespace, name: str):
        is_tcp = args.url.partition("?")[0].endswith(":0")
        url = args.url if is_tcp else f"{args.url}-{name}"
        own = {"stage": name, "url": url}
        options = {name: value for name, value in {**vars(args), **own}.items() if value}
        arguments = [
            argument for name, value in options.items() for argument in (f"--{name}", str(value))
        ]
        command = [sys.executable, __file__, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._lock = threading.Lock()

    def call(self, job: Facts) -> Facts:
        """Send a job and wait for its result; one at a time."""
        with self._lock:
            self.send(job)
            return self.receive()

    def send(self, job: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Facts:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a stage ended with status {self.process.wait()}")
        facts: Facts = json.loads(line)
        return facts

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()


def run_stages(args: argparse.Namespace) -> tuple[dict[int, Facts], list[Facts]]:
    """Run all prompts through the stages; return their results and the counters of each store."""
    producers = [Stage(args, f"P{number}") for number in range(args.producers)]
    consumers = [Stage(args, f"D{number}") for number in range(args.consumers)]
    try:
        urls = {stage: stage.receive()["url"] for stage in (*producers, *consumers)}
        for stages, others in ((producers, consumers), (consumers, producers)):
            for stage in stages:
                stage.send([urls[other] for other in others])
        done: dict[int, Facts] = {}
        threads = [
            threading.Thread(target=serve, args=(args, number, consumers, producers, done))
            for number in range(len(consumers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stage in (*producers, *consumers):
            stage.close()
        return done, [producer.receive() for producer in producers]
    finally:
        for stage in (*producers, *consumers):
            stage.close()
            stage.process.terminate() if sys.exc_info()[0] else stage.process.wait(args.timeout)


def serve(
    args: argparse.Namespace,
    mine: int,
    consumers: list[Stage],
    producers: list[Stage],
    done: dict[int, Facts],
) -> None:
    """Run one consumer's part of the prompts: prefill first, decode first, or no prefill."""
    rng, consumer = random.Random(mine), consumers[mine]
    for number in range(mine, args.prompts, len(consumers)):
        producer = rng.choice(producers)
        sequence = "decode first" if args.prompts == 1 else rng.choice(ORDERS)
        if sequence == "prefill first":
            producer.call({"prompt": number})
        consumer.send({"prompt": number, "wait": sequence == "decode first"})
        if sequence == "decode first":
            producer.call({"prompt": number})
        done[number] = {**consumer.receive(), "order": sequence}


ORDERS = ("prefill first", "prefill first", "decode first", "nobody prefills", "nobody prefills")


def verdict(args: argparse.Namespace, done: dict[int, Facts], stores: list[Facts]) -> bool:
    """Run the same prompts in this process alone and compare."""
    engine, prompts = Engine(args.dtype), make_prompts(args.prompts)
    engine.forward(prompts[0], None)  # the first pass is slower
    same_tokens = same_logits = 0
    for number, prompt in enumerate(prompts):
        began = time.perf_counter()
        state = engine.read(prompt, number, Match(len(prompt)))
        engine.logits(state.hidden)
        done[number]["alone"] = time.perf_counter() - began
        tokens, logits = engine.write(state, args.steps)
        pieces = done[number]["pieces"]
        if pieces != [[number, 0, len(prompt)]]:  # other sums, rounded elsewhere
            _, logits = engine.write(engine.replay(prompts, pieces), args.steps)
        there = load_file(Path(args.scratch) / f"{number}.safetensors")["logits"]
        same_tokens += tokens == done[number]["tokens"]
        same_logits += same_bytes(there, logits)
    report(args, done, stores)
    for what, same in (("tokens", same_tokens), ("logits", same_logits)):
        argument = "identical" if same == len(prompts) else "DIFFERENT"
        print(f"  {what}  {argument}: {same} of {len(prompts)} are the single process's")
    return len(done) == len(prompts) == same_tokens == same_logits


def report(args: argparse.Namespace, done: dict[int, Facts], stores: list[Facts]) -> None:
    complete = sum(facts["complete"] for facts in done.values())
    missed = sum(not facts["found"] for facts in done.values())
    found, requested = (sum(facts[name] for facts in done.values()) for name in ("found", "asked"))
    moved, answers, evicted = (
        sum(store[name] for store in stores) for name in ("nbytes", "answered", "evicted")
    )
    ready = [facts for facts in done.values() if facts["order"] != "decode first"]
    alone, select, compute = (
        1e3 * sum(facts[name] for facts in ready) for name in ("alone", "select", "compute")
    )
    print(
        f"  found   {found} of {requested} tokens, {100 * found / requested:.0f} %: {complete} "
        f"prompts complete, {len(done) - complete - missed} in part, {missed} missed"
    )
    print(f"  evicted {evicted} prompts from {args.producers} stores of {args.budget:g} MiB")
    print(f"  copied  {moved:,} bytes for {answers} answers")
    if ready:
        print(
            f"  first tokens of {len(ready)} prompts that waited for nobody: {alone:.0f} ms alone; "
            f"{select:.0f} ms to look up + {compute:.0f} ms to compute = "
            f"{alone - select - compute:.0f} ms saved"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--url", "--connector", default="shm://pd", help="URL that the links' are made of"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", default=1, type=int)
    parser.add_argument("--producers", default=1, type=int)
    parser.add_argument("--consumers", default=1, type=int)
    parser.add_argument("--steps", default=32, type=int, help="tokens to decode of each prompt")
    parser.add_argument("--budget", default=16.0, type=float, help="MiB of each producer's store")
    parser.add_argument("--timeout", default=60.0, type=float, help="seconds for each wait")
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
