"""The cost of Prometheus metrics: round trips between two processes, with metrics and without.

    python benchmarks/metrics_cost.py [--rounds 60] [--url shm://cost]

A round trip is two transfers of one layer, there and back, each with its put, get and release. On
and off alternate in blocks within one pair of processes; a ratio is that of a pair's two blocks.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
from prometheus_client import CollectorRegistry

from omni_kvlink import KVCacheTransferData, KVConsumer, KVLink, KVProducer
from omni_kvlink.telemetry import metrics

TRIPS, TIMEOUT = 100, 60.0
REGISTRY = CollectorRegistry()


def cache(key: str) -> KVCacheTransferData:
    layers = {name: [torch.ones(1024, 1, 16)] for name in ("key_cache", "value_cache")}
    about = {"kv_lens": [1024], "ropes": [1024], "num_layers": 1}
    return KVCacheTransferData(key, layers, metadata=about)


def switch(is_on: bool) -> None:
    if is_on:
        metrics.enable(REGISTRY)
    else:
        metrics.disable()


def take(link: KVConsumer, key: str) -> None:
    with link.get(key, timeout=TIMEOUT):
        pass


def measure(out: KVProducer, back: KVConsumer, is_on: bool) -> float:
    """Seconds of a round trip, the median of a block's."""
    switch(is_on)
    times = []
    for number in range(TRIPS):
        key = f"{'on' if is_on else 'off'}-{number}"
        data, started = cache(key), time.perf_counter()
        out.put(data)
        take(back, key)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def answer(url: str, pairs: int) -> None:
    """Be the other process: send each payload back, with metrics as its key says."""
    with (
        KVLink.connect(f"{url}-out", timeout=TIMEOUT) as link,
        KVLink.serve(f"{url}-back") as back,
    ):
        receipt = None
        for number in range(pairs):
            for is_on in (number % 2 == 0, number % 2 == 1):
                switch(is_on)
                for trip in range(TRIPS):
                    key = f"{'on' if is_on else 'off'}-{trip}"
                    take(link, key)
                    receipt = back.put(cache(key))
        if receipt is not None:
            receipt.wait(timeout=TIMEOUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=60, help="pairs of blocks")
    parser.add_argument("--url", default="shm://cost", help="of the links, without their suffix")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.answer:
        answer(options.url, options.rounds)
        return
    command = [sys.executable, __file__, "--answer", f"--url={options.url}"]
    with KVLink.serve(f"{options.url}-out") as out:
        other = subprocess.Popen([*command, f"--rounds={options.rounds}"])
        ratios, off = [], []
        with KVLink.connect(f"{options.url}-back", timeout=TIMEOUT) as back:
            for number in range(options.rounds):
                order = (number % 2 == 0, number % 2 == 1)
                pair = {is_on: measure(out, back, is_on) for is_on in order}
                ratios.append(pair[True] / pair[False])
                off.append(pair[False])
            other.wait(timeout=TIMEOUT)
    low, middle, high = statistics.quantiles(ratios)
    print(f"round trip without metrics  {1e6 * statistics.median(off):.1f} us")
    print(f"with metrics, of that       {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
