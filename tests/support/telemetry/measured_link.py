"""A producer or a consumer with metrics at an HTTP port, which transfers until its input ends.

python -m support.telemetry.measured_link (producer|consumer) URL DIRECTORY PORT

Some of its transfers fail, in each way that an operator is told to watch for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING

import torch
from prometheus_client import CollectorRegistry, start_http_server

from omni_kvlink import ConnectorError, IntegrityError, KVLink, TensorTransferData
from omni_kvlink.lowlevel import begin_get
from omni_kvlink.telemetry import metrics

if TYPE_CHECKING:
    from omni_kvlink import KVConsumer, KVProducer

SIZES = (16, 1 << 16)
PAUSE = 0.005
"""Seconds between two transfers: a core is left to others."""


def payload(key: str, size: int) -> TensorTransferData:
    return TensorTransferData(key, {"h": torch.ones(size)})


def send(link: KVProducer, number: int) -> None:
    size = SIZES[number % len(SIZES)]
    receipt = link.put(payload(f"k{number}", size), digests=number % 5 > 0)
    with contextlib.suppress(ConnectorError):
        receipt.wait(timeout=60)
    link.put(payload(f"late-{number}", 16), ttl=1e-6)
    with contextlib.suppress(ConnectorError):
        link.put(payload("long", 1 << 26), timeout=0)


def receive(link: KVConsumer, number: int) -> None:
    with contextlib.suppress(ConnectorError, IntegrityError):
        received = link.get(f"k{number}", timeout=60, verify="full" if number % 5 == 0 else "auto")
        received.scatter([torch.empty(SIZES[number % len(SIZES)])])
        received.release()
    with contextlib.suppress(ConnectorError):
        link.get("none", timeout=0)
    lose_a_producer()


def lose_a_producer() -> None:
    """Let a get wait for a producer that closes its link."""
    with (
        KVLink.serve("inproc://lost") as lost,
        KVLink.connect("inproc://lost", timeout=60) as link,
    ):
        get = begin_get(link, "k", timeout=60)
        lost.close()
        with contextlib.suppress(ConnectorError):
            get.wait(timeout=60)


def knock(path: str) -> None:
    """Connect to a producer's socket, and leave without a Hello."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        sock.send(b"nothing of this protocol")


def wait_for_end(ended: threading.Event) -> None:
    os.read(0, 1)
    ended.set()


def run(role: str, url: str, directory: str, port: int) -> None:
    registry = CollectorRegistry()
    metrics.enable(registry)
    ended = threading.Event()
    reading = threading.Thread(target=wait_for_end, args=[ended], daemon=True)
    reading.start()
    start_http_server(port, addr="127.0.0.1", registry=registry)
    print("ready", flush=True)
    numbers = itertools.count()
    if role == "producer":
        with KVLink.serve(url, directory=directory, quota=1 << 26) as producer:
            while not ended.wait(PAUSE):
                send(producer, next(numbers))
                with contextlib.suppress(OSError):
                    knock(producer.stats()["socket"])
    else:
        with KVLink.connect(url, timeout=60, directory=directory) as consumer:
            while not ended.wait(PAUSE):
                receive(consumer, next(numbers))


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
