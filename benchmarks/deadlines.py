"""By how much each blocking call exceeds its timeout.

    python benchmarks/deadlines.py [--url URL …] [--timeout 0.1] [--rounds 30] [--json FILE]

Each call waits for what never comes: a producer, a payload, memory, a reader. Producer and consumer
are in this process, over their connector. The bar is the promise of docs/operations.md: 0.25 s, on
an idle machine. CPU use of a waiting `get`: `kvlink-bench latency --idle 5`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from omni_kvlink import (
    CapacityError,
    KVConsumer,
    KVLink,
    KVProducer,
    TensorTransferData,
    UnavailableError,
)
from omni_kvlink.bench import machine, report
from omni_kvlink.bench.stats import Summary
from omni_kvlink.cli import terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUOTA = 1 << 26
BAR = 0.25
HOUR = 3600.0


def urls(directory: str) -> list[str]:
    """A URL of every connector; its sockets are in `directory`."""
    name = f"deadlines-{os.getpid()}"
    local = [f"shm://{name}?directory={directory}", f"inproc://{name}"]
    remote = ["zmq+tcp://127.0.0.1:0", "ucx://127.0.0.1:0?trusted_network=1"]
    return [*local, f"zmq+ipc://{directory}/control", *remote]


def payload(key: str, nbytes: int) -> TensorTransferData:
    """One tensor of so many bytes."""
    return TensorTransferData(key, {"bytes": torch.zeros(nbytes, dtype=torch.uint8)})


def overshoot(call: Callable[[], object], timeout: float) -> float:
    """Seconds that a call took beyond its timeout; it must time out."""
    began = time.monotonic()
    try:
        call()
    except (TimeoutError, CapacityError):
        return time.monotonic() - began - timeout
    raise report.BenchError("a call that should have timed out returned")


@contextlib.contextmanager
def link(url: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    """Both ends of a link; a payload that takes most of its memory is there."""
    with (
        KVLink.serve(url, quota=QUOTA) as producer,
        KVLink.connect(producer.url, timeout=30) as consumer,
    ):
        producer.put(payload("large", QUOTA * 3 // 4), ttl=HOUR)
        yield producer, consumer


def calls(
    producer: KVProducer, consumer: KVConsumer, timeout: float
) -> dict[str, Callable[[], object]]:
    """Calls that time out, by name; `put (direct)` only where the connector has it."""
    large, tiny = payload("more", QUOTA // 2), payload("direct", 1 << 16)
    receipt = producer.put(payload("unread", 1 << 16), ttl=HOUR)
    every: dict[str, Callable[[], object]] = {
        "connect": lambda: KVLink.connect(absent(producer.url), timeout=timeout),
        "get": lambda: consumer.get("never", timeout=timeout),
        "stream_get": lambda: consumer.stream_get("never", timeout=timeout),
        "put, no memory": lambda: producer.put(large, timeout=timeout),
        "Receipt.wait": lambda: receipt.wait(timeout=timeout),
    }
    if not producer.url.startswith(("shm:", "inproc:")):
        every["put, direct"] = lambda: producer.put(tiny, direct=True, timeout=timeout)
    return every


def absent(url: str) -> str:
    """The URL of a producer that is not there, like this one."""
    address, mark, options = url.partition("?")
    head, _, port = address.rpartition(":")
    other = f"{head}:1" if port.isdigit() else f"{address}-absent"
    return f"{other}{mark}{options}"


def measure(url: str, timeout: float, rounds: int) -> list[dict[str, Any]]:
    """One result for each call of a connector, in milliseconds; none if it cannot run here."""
    times: dict[str, list[float]] = {}
    try:
        with link(url) as ends:
            for _ in range(rounds):
                for name, call in calls(*ends, timeout).items():
                    times.setdefault(name, []).append(1e3 * overshoot(call, timeout))
                ends[0].abort("unread")
    except UnavailableError as error:
        print(f"{url.partition(':')[0]}: not measured: {error}")
    connector = url.partition(":")[0]
    return [
        {"connector": connector, "call": name, "excess_ms": Summary.of(values).to_dict()}
        for name, values in times.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", action="append", help="serve this URL instead of every connector")
    parser.add_argument("--timeout", type=float, default=0.1, help="seconds, of each call")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    about = machine.describe()
    print(machine.one_line(about))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvl-") as directory:
        for url in args.url or urls(directory):
            results += measure(url, args.timeout, args.rounds)
    if not results:
        return 2
    names = ("p50", "p99", "max")
    rows = [
        report.row(one["call"], (one["excess_ms"][name] for name in names), one["connector"])
        for one in results
    ]
    print(terminal.table(["call", "p50 ms", "p99 ms", "max ms", "connector"], rows))
    worst = max(one["excess_ms"]["max"] for one in results) / 1e3
    bar = report.bar("the longest excess over a timeout, in seconds", worst, BAR)
    print(report.bar_line(bar))
    if args.json:
        document = {"rows": results, "bars": [bar]}
        report.write_json(args.json, "deadlines", about, vars(args), document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
