"""Measures what readers that flood a producer cost an honest reader, and the producer's close.

    python benchmarks/flood.py [--seconds 20] [--flooders 3] [--connector NAME …] [--json FILE]

Each flooder is a process with a greeted connection that sends 256 Gets and 256 Cancels of them
without a pause (over shm in two batches); one that is disconnected connects again. An honest reader
in a process of its own gets small payloads, first alone, then beside the flooders. Printed are the
median and the 99th percentile of its gets, from the put to the receipt, in milliseconds, and the
seconds that `close` takes while the flood goes on. Exit status 1 if the 99th percentile beside the
flooders is more than 10 times the one alone, `close` takes more than 1 s, or a get fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import zmq

from omni_kvlink import KVLink, KVLinkError, KVProducer, TensorTransferData
from omni_kvlink.bench.stats import Summary
from omni_kvlink.connectors.control.security import Credentials
from omni_kvlink.connectors.protocol.messages import (
    MAX_BATCH,
    MAX_MESSAGE,
    Cancel,
    Get,
    Message,
    encode,
    encode_all,
    own_hello,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTORS = ("shm", "zmq+ipc", "zmq+tcp")
RATIO, CLOSE_SECONDS = 10.0, 1.0
PATIENCE = 60.0
GETS: list[Message] = [Get(i, f"void-{i}") for i in range(1, MAX_BATCH + 1)]
CANCELS: list[Message] = [Cancel(i) for i in range(1, MAX_BATCH + 1)]


def spawn(run: Callable[[], object]) -> int:
    """Run a function in a forked child, which ends with it; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                run()
        finally:
            os._exit(0)
    return pid


def flood_shm(path: str) -> None:
    """Send batches to a socket of `shm` until it hangs up."""
    parts = [*encode_all(GETS), *encode_all(CANCELS)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        sock.send(encode(own_hello()))
        sock.recv(MAX_MESSAGE)
        while True:
            for part in parts:
                sock.send(part)


def flood_zmq(url: str) -> None:
    """Send messages to a socket of `zmq` until it disconnects."""
    parts = [encode(message) for message in (*GETS, *CANCELS)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 10_000)
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.setsockopt(zmq.SNDTIMEO, 1000)
        if url.startswith("zmq+tcp"):
            Credentials().secure_client(sock)
        sock.connect(url.removeprefix("zmq+"))
        sock.send(encode(own_hello()))
        if not sock.poll(1000):
            return
        sock.recv()
        while True:  # zmq.Again is raised once it is disconnected
            for part in parts:
                sock.send(part)


def flood(connect: Callable[[], None]) -> None:
    while True:
        with contextlib.suppress(OSError, zmq.ZMQError):
            connect()
        time.sleep(0.01)  # as a connection that is refused is tried again


def read(url: str, directory: str) -> None:
    """Get `k0`, `k1`, … until one is missing."""
    options = {"directory": directory} if url.startswith("shm") else {}
    with KVLink.connect(url, timeout=PATIENCE, **options) as link:  # type: ignore[arg-type]
        number = 0
        while True:
            with contextlib.suppress(KVLinkError):
                link.get(f"k{number}", timeout=PATIENCE).release()
            number += 1


class Transfers:
    """Puts numbered payloads and waits for their receipts."""

    def __init__(self, link: KVProducer):
        self._link, self._number, self.failed = link, 0, list[str]()

    def run(self, seconds: float) -> Summary:
        """Transfer for so long; return the milliseconds of each."""
        until, times = time.monotonic() + seconds, list[float]()
        while time.monotonic() < until or not times:
            payload = TensorTransferData(f"k{self._number}", {"ids": torch.arange(5)})
            began = time.monotonic()
            try:
                self._link.put(payload, timeout=PATIENCE).wait(timeout=PATIENCE)
            except KVLinkError as error:
                self.failed.append(repr(error))
            times.append(1e3 * (time.monotonic() - began))
            self._number += 1
            time.sleep(0.001)
        return Summary.of(times)


def measure(connector: str, seconds: float, flooders: int) -> dict[str, Any]:
    """Return the figures of one connector."""
    with tempfile.TemporaryDirectory() as directory:
        if connector == "shm":
            link = KVLink.serve("shm://flood", directory=directory)
        elif connector == "zmq+ipc":
            link = KVLink.serve(f"zmq+ipc://{directory}/flood.sock")
        else:
            link = KVLink.serve("zmq+tcp://127.0.0.1:0")
        url = link.url
        path = link.stats().get("socket", "")
        pids = list[int]()
        try:
            pids.append(spawn(lambda: read(url, directory)))
            transfers = Transfers(link)
            transfers.run(1.0)
            alone = transfers.run(min(seconds, 5.0))
            connect = (lambda: flood_shm(path)) if connector == "shm" else lambda: flood_zmq(url)
            pids += [spawn(lambda: flood(connect)) for _ in range(flooders)]
            beside = transfers.run(seconds)
            stats = link.stats()
            began = time.monotonic()
            link.close()
            closed = time.monotonic() - began
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return {
        "connector": connector,
        "alone": alone.to_dict(),
        "beside": beside.to_dict(),
        "ratio": beside.p99 / alone.p99,
        "close_s": closed,
        "throttled": sum(stats["throttled"].values()),
        "refused": stats["refused"],
        "failed": transfers.failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--flooders", type=int, default=3)
    parser.add_argument("--connector", action="append", choices=CONNECTORS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for connector in options.connector or CONNECTORS:
        row = measure(connector, options.seconds, options.flooders)
        rows.append(row)
        print(
            f"{connector:8} alone {row['alone']['p50']:.2f} / {row['alone']['p99']:.2f} ms, "
            f"beside {row['beside']['p50']:.2f} / {row['beside']['p99']:.2f} ms (p50 / p99), "
            f"ratio {row['ratio']:.1f}, close {row['close_s']:.2f} s, "
            f"throttled {row['throttled']}, refused {row['refused']}, failed {len(row['failed'])}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = any(
        row["ratio"] > RATIO or row["close_s"] > CLOSE_SECONDS or row["failed"] for row in rows
    )
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
