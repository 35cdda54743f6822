"""The connector's statistics, for vLLM's log and for Prometheus."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0]
BYTES = [float(1 << power) for power in range(14, 36, 2)]

SERIES = {
    "save_seconds": ("seconds to copy a prompt's cache into the link", SECONDS),
    "save_bytes": ("bytes of a cache that was sent", BYTES),
    "wait_seconds": ("seconds from requesting a cache to its first bytes", SECONDS),
    "load_seconds": (
        "seconds from its first bytes to its last one in the engine's blocks",
        SECONDS,
    ),
    "load_bytes": ("bytes of a cache that was received", BYTES),
}
"""Histograms, with one value per transfer."""

COUNTS = {
    "sent": "caches that every reader has released",
    "send_failed": "caches that could not be saved, or were rejected, aborted or lost",
    "send_expired": "caches that were not read before their time to live ended",
    "received": "caches that were loaded",
    "load_failed": "caches that were not loaded; their blocks are reported to the scheduler",
    "load_corrupt": "those of load_failed whose bytes differ from the committed ones",
    "pinned_bytes": "bytes copied between a device and page-locked memory of the host",
    "device_bytes": "bytes copied within a device, from or to the memory that UCX sends from",
    "pageable_bytes": "bytes copied by torch between a device and memory that is not page-locked",
    "dropped": "caches that were named and not needed: the request ended, or had them already",
}
"""Counters."""


class KVLinkStats(KVConnectorStats):
    """The statistics of one interval; `data` holds JSON values."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data=data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        """Clear all values."""
        self.data = {name: [] for name in SERIES} | dict.fromkeys(COUNTS, 0)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVLinkStats:
        """Add the values of another interval or worker; return self."""
        for name, value in other.data.items():
            self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Summarise for vLLM's log: counts, and means in ms and MB."""
        summary: dict[str, int | float] = {name: self.data[name] for name in COUNTS}
        for name in SERIES:
            values = self.data[name]
            scale, unit = (1e3, "ms") if name.endswith("seconds") else (1e-6, "MB")
            if values:
                label = f"{name.removesuffix('_seconds').removesuffix('_bytes')} {unit}"
                summary[label] = round(scale * sum(values) / len(values), 3)
        return summary


class Meter:
    """Collects the statistics of the current interval; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = KVLinkStats()
        self._copied: dict[str, Mapping[str, int]] = {}

    def count(self, name: str) -> None:
        """Increment one of `COUNTS`."""
        with self._lock:
            self._stats.data[name] += 1

    def copied(self, direction: str, totals: Mapping[str, int]) -> None:
        """Add what `Copier.device_copies` has grown by since the last call for a direction."""
        with self._lock:
            previous = self._copied.get(direction, {})
            for kind, nbytes in totals.items():
                self._stats.data[f"{kind}_bytes"] += nbytes - previous.get(kind, 0)
            self._copied[direction] = totals

    def observe(self, **values: float) -> None:
        """Append values to histograms of `SERIES`, by name."""
        with self._lock:
            for name, value in values.items():
                self._stats.data[name].append(value)

    def take(self) -> KVLinkStats | None:
        """Return the statistics since the last call and start anew; None if there are none."""
        with self._lock:
            taken, self._stats = self._stats, KVLinkStats()
        return None if taken.is_empty() else taken


class KVLinkPrometheus(KVConnectorPromMetrics):
    """The statistics as Prometheus metrics `vllm:omni_kvlink_…`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._series = {
            name: self._metric(self._histogram_cls, name, text, buckets=buckets)
            for name, (text, buckets) in SERIES.items()
        }
        self._counts = {
            name: self._metric(self._counter_cls, name, text) for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Feed one interval's `KVLinkStats.data` to the metrics of an engine."""
        for name, metric in self._series.items():
            for value in transfer_stats_data[name]:
                metric[engine_idx].observe(value)
        for name, metric in self._counts.items():
            metric[engine_idx].inc(transfer_stats_data[name])

    def _metric(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        """A metric of each engine, by the engine's index."""
        metric = kind(f"vllm:omni_kvlink_{name}", text, labelnames=self._labelnames, **options)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)
