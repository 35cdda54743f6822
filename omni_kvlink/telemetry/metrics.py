"""Prometheus metrics of this process's links: `enable()` and `disable()`; docs/guides/metrics.md.

No label has a key, a request id or the address of a peer. Needs the extra `metrics`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from omni_kvlink import errors
from omni_kvlink.errors import KVLinkError, SchemaError, UnavailableError
from omni_kvlink.link.end import open_ends
from omni_kvlink.telemetry.observers import Observer, TransferEvent, add_observer, remove_observer

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise UnavailableError(
        f"metrics need prometheus-client ({error}): pip install 'omni-kvlink[metrics]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BYTES = tuple(float(1 << power) for power in range(10, 36, 2))
MOST_PENDING = 512
"""Events that wait to be counted: they take 0.2 MB."""

_enabling = threading.RLock()
_enabled: LinkMetrics | None = None


def enable(registry: CollectorRegistry | None = None) -> None:
    """Count what ends from now on, in `registry`, or in that of prometheus-client; idempotent.

    Raises:
        SchemaError: metrics are enabled in another registry: call `disable` first.
        ValueError: the registry has other metrics with these names.
    """
    global _enabled
    target = REGISTRY if registry is None else registry
    with _enabling:
        if _enabled is None:
            _enabled = LinkMetrics(target)
            add_observer(_enabled)
        elif _enabled.registry is not target:
            raise SchemaError("metrics are enabled in another registry: call disable() first")


def disable() -> None:
    """Count no more, and remove the metrics from their registry; does nothing without `enable`."""
    global _enabled
    with _enabling:
        if _enabled is not None:
            remove_observer(_enabled)
            _enabled.unregister()
            _enabled = None


TransferCount: TypeAlias = "tuple[str, str, str, int, Mapping[str, float], str]"
"""The role, scheme, outcome ("" if no transfer has ended), bytes, seconds by phase, and error of an
event; a NamedTuple takes twice as long to make."""


class LinkMetrics(Observer):
    """Counts events, and is the collector of one registry.

    A transfer only appends what it has to say; it is counted at the next scrape, or with
    `MOST_PENDING` others. With prometheus-client's multiprocess mode, whose scrapes are another
    process's, it is counted at once.
    """

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self._pending: deque[TransferCount] = deque()
        self._counting = threading.RLock()
        is_multiprocess = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self._limit = 1 if is_multiprocess else MOST_PENDING
        self._transfers = Counter(
            "kvlink_transfers",
            "Transfers that have ended: of a producer, payloads; of a consumer, gets.",
            ("role", "scheme", "outcome"),
            registry=None,
        )
        self._bytes = Histogram(
            "kvlink_transfer_bytes",
            "Bytes of each payload, header included, that was committed or has arrived.",
            ("role",),
            buckets=BYTES,
            registry=None,
        )
        self._seconds = Histogram(
            "kvlink_phase_seconds",
            "Seconds of each phase of a transfer.",
            ("role", "phase"),
            buckets=SECONDS,
            registry=None,
        )
        text, labels = "Errors that ended transfers, by their class.", ("role", "error")
        self._errors = Counter("kvlink_errors", text, labels, registry=None)
        registry.register(self)

    def unregister(self) -> None:
        """Remove the metrics from the registry."""
        self.registry.unregister(self)

    def describe(self) -> Iterator[Any]:
        """Yield the metrics without their values: to register them reads no link."""
        for metric in self._metrics:
            yield from metric.describe()
        yield from LinkTotals().metrics()

    def collect(self) -> Iterator[Any]:
        """Count what is pending, and yield the metrics; reads `stats()` of the open links."""
        self.count()
        for metric in self._metrics:
            yield from metric.collect()
        totals = LinkTotals()
        for end in open_ends():
            with contextlib.suppress(KVLinkError):  # it was closed meanwhile
                totals.add(end.url, end.stats())
        yield from totals.metrics()

    def on_put(self, event: TransferEvent) -> None:
        """Count a put that has failed; `on_receipt` counts the others."""
        if event.error is not None:
            self._add("producer", event, event.outcome)
        if len(self._pending) >= self._limit:
            self.count()

    def on_receipt(self, event: TransferEvent) -> None:
        """Count what was committed; the link may be locked, so that later calls add it up."""
        self._add("producer", event, event.outcome)
        if self._limit == 1:
            self.count()

    def on_get(self, event: TransferEvent) -> None:
        """Count a get."""
        self._add("consumer", event, event.outcome)
        if len(self._pending) >= self._limit:
            self.count()

    def on_copy(self, event: TransferEvent) -> None:
        """Count the seconds of a copy or a check, or the error that it has found."""
        self._add("consumer", event, "")
        if len(self._pending) >= self._limit:
            self.count()

    def count(self) -> None:
        """Add what is pending to the metrics."""
        pending, ends, failures = self._pending, Tally[Any](), Tally[Any]()
        nbytes, seconds = defaultdict[Any, list[float]](list), defaultdict[Any, list[float]](list)
        with self._counting:
            while pending:
                role, scheme, outcome, size, phases, error = pending.popleft()
                if outcome:
                    ends[role, scheme, outcome] += 1
                if error:
                    failures[role, error] += 1
                    continue
                if size:
                    nbytes[(role,)].append(size)
                for phase, spent in phases.items():
                    seconds[role, phase].append(spent)
            for counter, numbers in ((self._transfers, ends), (self._errors, failures)):
                for labels, number in numbers.items():
                    counter.labels(*labels).inc(number)
            for histogram, values in ((self._bytes, nbytes), (self._seconds, seconds)):
                for labels, observed in values.items():
                    observe_all(histogram.labels(*labels), observed)

    @property
    def _metrics(self) -> tuple[Any, ...]:
        return self._transfers, self._bytes, self._seconds, self._errors

    def _add(self, role: str, event: TransferEvent, outcome: str) -> None:
        # An error would keep frames, and is named. The cyclic collector tracks no dict of floats.
        scheme, _, _, nbytes, seconds, error, *_ = event
        failure = "" if error is None else error_name(error)
        self._pending.append((role, scheme, outcome, nbytes, seconds, failure))


def observe_all(histogram: Any, values: Sequence[float]) -> None:
    """Do what `observe` does for each value, with one change of each bucket."""
    buckets = Tally(map(partial(bisect_left, histogram._upper_bounds), values))
    histogram._sum.inc(sum(values))
    for bucket, number in buckets.items():
        histogram._buckets[bucket].inc(number)


class LinkTotals:
    """Sums over links of what `stats()` says."""

    def __init__(self) -> None:
        self._memory, self._paths, self._refused = Tally[Any](), Tally[Any](), Tally[Any]()
        self._numbers: Tally[str] = Tally()

    def add(self, url: str, stats: Mapping[str, Any]) -> None:
        """Add one link."""
        role, scheme = stats["role"], url.partition("://")[0]
        device = stats.get("device_path", "host")
        paths = stats.get("path") or {}  # a producer tells those of its readers
        for path in paths if isinstance(paths, list) else [paths]:
            encrypted = str(path.get("encrypted", "")).lower()
            self._paths[role, scheme, path.get("transport", ""), encrypted, device] += 1
        memory, transfers = stats.get("memory", {}), stats.get("transfers", {})
        for state in ("quota", "mapped", "used"):
            if state in memory:
                self._memory[role, state] += memory[state]
        self._numbers["blocked"] += memory.get("waiting", 0)
        for number in ("live", "leased", "pinned", "redelivered"):
            self._numbers[number] += transfers.get(number, 0)
        self._numbers["waiting"] += stats.get("waiting", 0)
        for listener in stats.get("listeners", [stats]):
            self._numbers["readers"] += listener.get("readers", 0)
            if "detached" in listener:
                self._memory[role, "pinned"] += sum(listener["detached"].values())
            self._refused.update(
                {(reason,): n for reason, n in listener.get("refused", {}).items()}
            )

    def metrics(self) -> Iterator[Any]:
        """Yield the metrics."""
        numbers = self._numbers
        yield _gauge("live_payloads", "Payloads that have not ended.", numbers["live"])
        yield _gauge("leased_payloads", "Gets that hold a payload.", numbers["leased"])
        text = "Payloads that a disconnected process may still read."
        yield _gauge("pinned_payloads", text, numbers["pinned"])
        yield _gauge("waiting_gets", "Gets of this process that wait.", numbers["waiting"])
        yield _gauge("waiting_puts", "Calls that wait for memory.", numbers["blocked"])
        yield _gauge("readers", "Consumers that are connected here.", numbers["readers"])
        yield _family(
            GaugeMetricFamily("kvlink_memory_bytes", "Memory of links.", labels=("role", "state")),
            self._memory,
        )
        labels = "role", "scheme", "path", "encrypted", "device_path"
        text = "Connections that are open, by the path of their payloads."
        yield _family(GaugeMetricFamily("kvlink_path_info", text, labels=labels), self._paths)
        text = "Leases that went back unread, of links that are open."
        yield CounterMetricFamily("kvlink_redelivered", text, value=numbers["redelivered"])
        text = "Connections and messages that were refused, of links that are open."
        refused = CounterMetricFamily("kvlink_refused", text, labels=("reason",))
        yield _family(refused, self._refused)


def error_name(error: BaseException) -> str:
    """Return the name of an error's class among those of `omni_kvlink.errors`, or "other"."""
    known = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return next((kind.__name__ for kind in known), "other")


def _gauge(name: str, text: str, value: int) -> Any:
    return GaugeMetricFamily(f"kvlink_{name}", text, value=value)


def _family(family: Any, values: Mapping[tuple[str, ...], int]) -> Any:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
