"""The cost of metrics, traces and timelines: transfers between two processes, off and on in turn.

    python benchmarks/telemetry.py [--rounds 20] [--sizes SIZE …] [--modes MODE …] [--json FILE]

A transfer is a put, its get, and the wait for its receipt, over shared memory; one follows the
other at once. Each round has a block of transfers of every mode. Of a mode it prints the median of
the blocks' p50, its ratio to `off` of the same round, and the ratio of the CPU time of both
processes, all threads, spans included: medians, with quartiles. "off again" is `off` once more: it
shows the noise. Needs opentelemetry-sdk and prometheus-client.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from omni_kvlink import KVCacheTransferData, KVLink, TensorTransferData
from omni_kvlink.bench import machine, report
from omni_kvlink.telemetry import metrics, timeline, tracing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from omni_kvlink import KVProducer

MODES = ("off", "off again", "metrics", "traces", "traces without phases", "1 in 100", "timeline")
SIZES = {"small": (1 << 10, 200), "medium": (2 << 20, 100), "large": (235 << 20, 6)}
"""Bytes, and transfers of a block; the large one is a cache of 28 layers × 4096 tokens."""
WARM, TIMEOUT = 2, 120.0
REGISTRY = CollectorRegistry()


class Discard(SpanExporter):
    """Exports to nowhere."""

    def export(self, spans: Any) -> SpanExportResult:
        """Discard them."""
        return SpanExportResult.SUCCESS


def batching(**options: Any) -> TracerProvider:
    """Return a provider as services have it, but for the network."""
    provider = TracerProvider(**options)
    provider.add_span_processor(BatchSpanProcessor(Discard()))
    return provider


class Modes:
    """Has this process trace, count, record, or none of it; and its CPU time."""

    def __init__(self, directory: str):
        self._directory = directory
        self._all = batching()
        self._some = batching(sampler=ParentBased(TraceIdRatioBased(0.01)))
        self._began = 0.0

    def begin(self, mode: str) -> None:
        """Change to a mode."""
        if mode == "metrics":
            metrics.enable(REGISTRY)
        elif mode == "timeline":
            timeline.record(self._directory)
        elif mode == "1 in 100":
            tracing.enable(self._some)
        elif mode.startswith("traces"):
            tracing.enable(self._all, phases=mode == "traces")
        self._began = time.process_time()

    def end(self) -> float:
        """Do what is left of it; return the seconds of CPU since `begin`."""
        tracing.flush(TIMEOUT)
        spent = time.process_time() - self._began
        tracing.disable()
        metrics.disable()
        timeline.stop()
        return spent


def payload(size: str, key: str) -> KVCacheTransferData | TensorTransferData:
    """Return what is sent; its bytes are the same each time."""
    if size != "large":
        return TensorTransferData(key, {"x": torch.zeros(SIZES[size][0] // 4)})
    rows = [torch.zeros(4096, 4, 128, dtype=torch.bfloat16) for _ in range(28)]
    about = {"kv_lens": [4096], "ropes": [4096], "num_layers": 28}
    return KVCacheTransferData(key, {"key_cache": rows, "value_cache": rows}, metadata=about)


def read(url: str, orders: Connection, directory: str) -> None:
    """Get what the other process puts, in the mode that it orders."""
    torch.set_num_threads(1)
    modes = Modes(directory)
    with KVLink.connect(url, timeout=TIMEOUT) as consumer:
        while order := orders.recv():
            mode, prefix, count = order
            modes.begin(mode)
            orders.send("ready")
            for number in range(count):
                consumer.get(f"{prefix}-{number}", timeout=TIMEOUT).release()
            orders.send(modes.end())


def block(
    producer: KVProducer, orders: Connection, modes: Modes, mode: str, size: str, turn: int
) -> tuple[float, float]:
    """Transfer a block; return the median of its seconds, and both processes' CPU seconds."""
    prefix, seconds, count = f"{size}-{turn}-{MODES.index(mode)}", list[float](), SIZES[size][1]
    data = payload(size, prefix)
    orders.send((mode, prefix, count))
    orders.recv()
    modes.begin(mode)
    for number in range(count):
        data.request_id = f"{prefix}-{number}"
        started = time.perf_counter()
        producer.put(data).wait(timeout=TIMEOUT)
        seconds.append(time.perf_counter() - started)
    own = modes.end()
    return median(seconds[WARM:]), own + orders.recv()


def summary(found: list[dict[str, tuple[float, float]]], mode: str) -> dict[str, Any]:
    """Return the figures of one mode."""
    values: dict[str, Any] = {"p50_ms": 1e3 * median(each[mode][0] for each in found)}
    for name, index in (("latency", 0), ("cpu", 1)):
        ratios = [each[mode][index] / each["off"][index] for each in found]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        values[name] = {"p25": low, "p50": middle, "p75": high}
    return values


def line(size: str, mode: str, values: dict[str, Any]) -> str:
    """Return a mode's line."""
    ratios = ("  {p50:.3f} [{p25:.3f}..{p75:.3f}]".format(**values[x]) for x in ("latency", "cpu"))
    return f"{size:<7} {mode:<21} {values['p50_ms']:9.3f} ms" + "".join(ratios)


def main() -> None:
    """Print a line for each size and mode: p50, × off, × off in CPU time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each mode")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--note", default="", help="what else the machine does, for that file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [mode for mode in MODES if mode == "off" or mode in options.modes]
    about, rows = machine.describe(), list[dict[str, Any]]()
    load = os.getloadavg()[0]
    here, there = multiprocessing.Pipe()
    url = f"shm://telemetry-cost-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory, KVLink.serve(url) as producer:
        context = multiprocessing.get_context("spawn")
        reader = context.Process(target=read, args=(url, there, directory))
        reader.start()
        modes = Modes(directory)
        for size in options.sizes:
            block(producer, here, modes, "off", size, -1)  # warm
            found = list[dict[str, tuple[float, float]]]()
            for turn in range(options.rounds):
                order = chosen if turn % 2 else chosen[::-1]
                found.append(
                    {mode: block(producer, here, modes, mode, size, turn) for mode in order}
                )
            for mode in chosen:
                values = summary(found, mode)
                rows.append({"size": size, "nbytes": SIZES[size][0], "mode": mode, **values})
                print(line(size, mode, values), flush=True)
        here.send(None)
        reader.join()
    if options.json:
        figures = {"load": [load, os.getloadavg()[0]], "rows": rows}
        report.write_json(options.json, "telemetry", about, vars(options), figures)


if __name__ == "__main__":
    main()
