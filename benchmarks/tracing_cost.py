"""The cost of tracing: rounds of put, get and release between two processes, off and on in turn.

    python benchmarks/tracing_cost.py [ROUNDS]

Each line: bytes, the mode, the median time of a transfer, and the median ratio to `off` of the same
round. "off again" is `off` once more: it shows the noise. Needs opentelemetry-sdk.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.telemetry import timeline, tracing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MODES = ("off", "off again", "trace", "trace without phases", "timeline")
TRANSFERS, WARM = 150, 10
TIMEOUT = 60.0


class Discard(SpanExporter):
    """Exports to nowhere."""

    def export(self, spans: Any) -> SpanExportResult:
        """Discard them."""
        return SpanExportResult.SUCCESS


def switch(mode: str, provider: TracerProvider, directory: str) -> None:
    """Have this process trace, record, or neither."""
    tracing.disable()
    timeline.stop()
    if mode.startswith("trace"):
        tracing.enable(provider, phases=mode == "trace")
    if mode == "timeline":
        timeline.record(directory)


def batching() -> TracerProvider:
    """Return a provider as services have it, but for the network."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Discard()))
    return provider


def read(url: str, orders: Connection, directory: str) -> None:
    """Get what the other process puts, in the mode that it orders."""
    provider = batching()
    with KVLink.connect(url, timeout=TIMEOUT) as consumer:
        while order := orders.recv():
            mode, prefix = order
            switch(mode, provider, directory)
            orders.send("ready")
            for number in range(TRANSFERS):
                consumer.get(f"{prefix}-{number}", timeout=TIMEOUT).release()


def main() -> None:
    """Print a line for each size and mode."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    torch.set_num_threads(1)
    here, there = multiprocessing.Pipe()
    url, provider = f"shm://tracing-cost-{os.getpid()}", batching()
    with tempfile.TemporaryDirectory() as directory, KVLink.serve(url) as producer:
        context = multiprocessing.get_context("spawn")
        reader = context.Process(target=read, args=(url, there, directory))
        reader.start()

        def transfers(mode: str, nbytes: int, turn: int) -> float:
            switch(mode, provider, directory)
            prefix, seconds = f"{nbytes}-{turn}-{MODES.index(mode)}", list[float]()
            tensor = torch.zeros(nbytes // 4)
            here.send((mode, prefix))
            here.recv()
            for number in range(TRANSFERS):
                data = TensorTransferData(f"{prefix}-{number}", {"x": tensor})
                started = time.perf_counter()
                producer.put(data).wait(timeout=TIMEOUT)
                seconds.append(time.perf_counter() - started)
            return median(seconds[WARM:])

        for nbytes in (1 << 10, 2 << 20):
            found = list[dict[str, float]]()
            for turn in range(rounds):
                order = MODES if turn % 2 else MODES[::-1]
                found.append({mode: transfers(mode, nbytes, turn) for mode in order})
            for mode in MODES:
                microseconds = 1e6 * median(each[mode] for each in found)
                ratio = median(each[mode] / each["off"] for each in found)
                print(f"{nbytes:>9} B  {mode:<21} {microseconds:8.1f} µs  {ratio:.3f}", flush=True)
        here.send(None)
        reader.join()


if __name__ == "__main__":
    main()
