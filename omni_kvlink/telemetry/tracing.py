"""One trace over both processes of a transfer, by OpenTelemetry.

A put is a PRODUCER span, a get a CONSUMER span; the payload's header carries the put's context in
its `producer` (docs/wire.md). The phases that a `Ledger` knows are children of both. A transfer
decides the context of its put's span and appends a record: `SpanMaker` makes the spans of it in a
thread of their own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from omni_kvlink._version import __version__
from omni_kvlink.errors import UnavailableError
from omni_kvlink.telemetry import observers
from omni_kvlink.telemetry.record_queue import RecordQueue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Tracer, TracerProvider

    from omni_kvlink.telemetry.observers import TransferEvent
    from omni_kvlink.telemetry.span_source import SpanSource

TIMEOUT = 30.0
"""Seconds for which `flush` and `disable` wait, unless they are told otherwise."""
_tracer: TransferTracer | None = None
_changing = threading.Lock()
_is_registered = False


def enable(tracer_provider: TracerProvider | None = None, *, phases: bool = True) -> None:
    """Trace every transfer of this process from now on, in links that are open, too.

    Without a `tracer_provider` the global one of OpenTelemetry is used, which is to be set before.
    A second call replaces the provider, and blocks as `disable`. With `phases=False` puts and gets
    have no children. UnavailableError if `opentelemetry-api` is not installed (extra "tracing").
    """
    global _tracer
    try:
        new = TransferTracer(tracer_provider, phases=phases)
    except ImportError as error:
        text = f"tracing needs opentelemetry-api: pip install 'omni-kvlink[tracing]' ({error})"
        raise UnavailableError(text) from error
    _register()
    with _changing:
        previous, _tracer = _tracer, new
        if previous is not None:
            observers.remove_observer(previous)
        observers.add_observer(new)
    if previous is not None:
        previous.close(TIMEOUT)


def disable(timeout: float = TIMEOUT) -> bool:
    """Trace nothing more; spans of transfers under way end now. Idempotent.

    Blocks until the spans of all transfers that have ended are made: False if that has not happened
    after `timeout` seconds. Python calls it at the interpreter's exit.
    """
    global _tracer
    with _changing:
        previous, _tracer = _tracer, None
        if previous is not None:
            observers.remove_observer(previous)
    return previous is None or previous.close(timeout)


def flush(timeout: float = TIMEOUT) -> bool:
    """Block until the provider has the spans of all transfers that have ended.

    False if that has not happened after `timeout` seconds. True without a trace.
    """
    tracer = _tracer
    return tracer is None or tracer.queue.flush(timeout)


def dropped() -> int:
    """Return how many records were dropped since `enable`: each has the spans of one event.

    They were more than `record_queue.MOST_WAITING`, and came faster than spans are made.
    """
    tracer = _tracer
    return 0 if tracer is None else tracer.queue.dropped


class TransferTracer(observers.Observer):
    """Records what spans are made of; thread-safe."""

    def __init__(self, provider: TracerProvider | None, *, phases: bool):
        from opentelemetry import context, trace

        from omni_kvlink.telemetry.span_maker import EndRecord, SpanMaker, layer_attributes
        from omni_kvlink.telemetry.span_source import BegunPut

        tracer = trace.get_tracer("omni_kvlink", __version__, provider)
        self._current_context = context.get_current
        self._begun_put, self._end_record, self._layer = BegunPut, EndRecord, layer_attributes
        self._span_source = _span_source(tracer)
        self._maker = SpanMaker(tracer, self._span_source, phases=phases)
        self.queue = RecordQueue("spans", linger=1.0)
        self._puts = observers.Recent()  # BegunPut, by traceparent

    def close(self, timeout: float) -> bool:
        """Make all spans, those of transfers under way, too; False after `timeout` seconds."""
        ended, maker = time.time_ns(), self._maker
        lost = [(maker.lost_put, put, ended) for put in self._puts.clear()]
        return self.queue.close(timeout, *lost, (maker.close, ended))

    def forget(self) -> None:
        """Forget what the parent of this forked child has recorded."""
        self._puts = observers.Recent()
        self._maker.forget()
        self.queue.reset()

    def on_begin(self, scheme: str, key: str, started: float) -> Mapping[str, str]:
        """See `Observer.on_begin`: the context of the put's span, a child of the current one."""
        now = time.time_ns()
        put = self._begun_put(scheme, key, now - int(1e9 * (time.perf_counter() - started)))
        context, is_recorded = self._span_source.begin(put)
        if not context.is_valid:  # there is no SDK, or no provider
            return {}
        flags = context.trace_flags
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        if is_recorded:
            for lost in self._puts.add(parent, put):
                self.queue.add(self._maker.lost_put, lost, now)
        state = context.trace_state
        return {"traceparent": parent} | ({"tracestate": state.to_header()} if state else {})

    def on_put(self, event: TransferEvent) -> None:
        """See `Observer.on_put`."""
        put = self._puts.pop(event.trace.get("traceparent"))
        if put is not None:  # else it began before tracing did, or is not sampled
            self.queue.add(self._maker.put, put, self._end(event))

    def on_layer(self, event: TransferEvent) -> None:
        """See `Observer.on_layer`: an event of the put's span, or a child of the get's."""
        if event.outcome != "written":
            self.on_copy(event)
            return
        put = self._puts.get(event.trace.get("traceparent"))
        if put is not None:
            about = self._layer(event.layer, event.branch) | {"kvlink.seconds": event.total}
            put.layers.append((about, time.time_ns()))

    def on_open(self, event: TransferEvent) -> None:
        """See `Observer.on_open`."""
        self.queue.add(self._maker.open, self._end(event))

    def on_get(self, event: TransferEvent) -> None:
        """See `Observer.on_get`."""
        self.queue.add(self._maker.get, self._end(event))

    def on_copy(self, event: TransferEvent) -> None:
        """See `Observer.on_copy`: a child of the get's span, also after that has ended."""
        self.queue.add(self._maker.copy, self._end(event))

    def _end(self, event: TransferEvent) -> Any:
        scheme, key, _, nbytes, seconds, error, data, trace, copies, layer, branch = event
        return self._end_record(
            *(scheme, key, nbytes, dict(seconds), copies),
            0 if data is None else observers.layers_of(data),
            None if error is None else (type(error).__name__, str(error)),
            *(time.time_ns(), trace, self._current_context(), layer, branch),
        )


def _span_source(tracer: Tracer) -> SpanSource:
    """Spans of the SDK's tracers are made later; another tracer's start where the put begins."""
    from omni_kvlink.telemetry.span_source import SpanSource

    try:
        from opentelemetry.sdk.trace import Tracer as SdkTracer

        from omni_kvlink.telemetry.sdk_span_source import SdkSpanSource
    except ImportError:  # there is no SDK
        return SpanSource(tracer)
    return SdkSpanSource(tracer) if type(tracer) is SdkTracer else SpanSource(tracer)


def _register() -> None:
    """Have the interpreter's exit make the spans, after providers that exist; and forks forget."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(disable)
        os.register_at_fork(after_in_child=_leave_parent)


def _leave_parent() -> None:
    global _changing
    _changing = threading.Lock()
    if _tracer is not None:
        _tracer.forget()
