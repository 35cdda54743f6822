"""One trace over both processes of a transfer, by OpenTelemetry.

A put is a PRODUCER span, a get a CONSUMER span; the payload's header carries the put's context in
its `producer` (docs/wire.md). The phases that a `Ledger` knows are children of both.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_kvlink._version import __version__
from omni_kvlink.errors import UnavailableError
from omni_kvlink.telemetry import observers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.trace import Link, Span, SpanContext, TracerProvider

    from omni_kvlink.telemetry.observers import TransferEvent

_tracer: TransferTracer | None = None
_changing = threading.Lock()


def enable(tracer_provider: TracerProvider | None = None, *, phases: bool = True) -> None:
    """Trace every transfer of this process from now on, in links that are open, too.

    Without a `tracer_provider` the global one of OpenTelemetry is used. A second call replaces the
    provider. With `phases=False` puts and gets have no children, at a third of the cost.
    UnavailableError if `opentelemetry-api` is not installed (extra "tracing").
    """
    global _tracer
    try:
        new = TransferTracer(tracer_provider, phases=phases)
    except ImportError as error:
        text = f"tracing needs opentelemetry-api: pip install 'omni-kvlink[tracing]' ({error})"
        raise UnavailableError(text) from error
    with _changing:
        previous, _tracer = _tracer, new
        _stop(previous)
        observers.add_observer(new)


def disable() -> None:
    """Trace nothing more; spans of transfers under way end now. Idempotent."""
    global _tracer
    with _changing:
        previous, _tracer = _tracer, None
        _stop(previous)


def _stop(tracer: TransferTracer | None) -> None:
    if tracer is not None:
        observers.remove_observer(tracer)
        tracer.close()


class OpenSpan(NamedTuple):
    """A span that has not ended; `layers` has those that were written so far."""

    span: Span
    layers: set[tuple[str, int]]
    started: int

    def end(self) -> None:
        """End it as it is."""
        self.span.end()


class TransferTracer(observers.Observer):
    """Makes spans of transfers; thread-safe."""

    def __init__(self, provider: TracerProvider | None, *, phases: bool):
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api, self._has_phases = trace, phases
        self._tracer = trace.get_tracer("omni_kvlink", __version__, provider)
        self._propagator = TraceContextTextMapPropagator()
        self._puts = observers.Recent()  # OpenSpan, by traceparent
        self._streams = observers.Recent()  # OpenSpan of those that arrive, by scheme and key
        self._gets = observers.Recent()  # SpanContext by scheme and key: what may be copied out

    def close(self) -> None:
        """End the spans of transfers that are under way."""
        for table in (self._puts, self._streams):
            for span in table.clear():
                span.end()

    def on_begin(self, scheme: str, key: str, started: float) -> Mapping[str, str]:
        """See `Observer.on_begin`: the put's span, of the caller's current one, begins."""
        began = time.time_ns() - int(1e9 * (time.perf_counter() - started))
        carrier = dict[str, str]()
        span = self._tracer.start_span(
            "kvlink put",
            kind=self._api.SpanKind.PRODUCER,
            attributes=_about(scheme, key),
            start_time=began,
        )
        self._propagator.inject(carrier, self._api.set_span_in_context(span))
        if carrier:  # else there is no SDK, or no provider
            for lost in self._puts.add(carrier["traceparent"], OpenSpan(span, set(), began)):
                lost.end()
        return carrier

    def on_put(self, event: TransferEvent) -> None:
        """See `Observer.on_put`."""
        put = self._puts.pop(event.trace.get("traceparent"))
        if put is None:  # it began before tracing did
            return
        if put.layers:
            put.span.set_attribute("kvlink.layers", len(put.layers))
        self._end(put.span, event)
        self._add_phases(put.span.get_span_context(), event, put.started, bool(put.layers))

    def on_layer(self, event: TransferEvent) -> None:
        """See `Observer.on_layer`: an event of the put's span, or a child of the get's."""
        if event.outcome == "written":
            put = self._puts.get(event.trace.get("traceparent"))
            if put is not None:
                put.layers.add((event.branch, event.layer))
                put.span.add_event("kvlink layer", {**_layer(event), "kvlink.seconds": event.total})
        else:
            self.on_copy(event)

    def on_open(self, event: TransferEvent) -> None:
        """See `Observer.on_open`."""
        started = time.time_ns() - int(1e9 * event.total)
        span = self._start_get(event, started)
        self._add_phases(span.get_span_context(), event, started)
        for lost in self._streams.add(_name(event), OpenSpan(span, set(), started)):
            lost.end()

    def on_get(self, event: TransferEvent) -> None:
        """See `Observer.on_get`."""
        stream, ended = self._streams.pop(_name(event)), time.time_ns()
        if stream is not None:
            self._end(stream.span, event)
            return
        started = ended - int(1e9 * event.total)
        span = self._start_get(event, started)
        self._end(span, event, ended)
        self._add_phases(span.get_span_context(), event, started)

    def on_copy(self, event: TransferEvent) -> None:
        """See `Observer.on_copy`: a child of the get's span, also after that has ended."""
        parent = self._gets.get(_name(event))
        if parent is None or not self._has_phases:
            return
        for name, started, ended in _phases(event, time.time_ns() - int(1e9 * event.total)):
            span = self._start_child(name, parent, started)
            if event.layer >= 0:
                span.set_attributes(_layer(event))
            self._set_error(span, event)
            span.end(ended)

    def _start_get(self, event: TransferEvent, started: int) -> Span:
        """Start the put's child; within a span of this process, that one's, with a link to the put.

        So OpenTelemetry's conventions for messages recommend it:
        https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/#consumer-spans
        """
        links: list[Link] = []
        context = self._propagator.extract(event.trace) if event.trace else None
        if self._api.get_current_span().get_span_context().is_valid:
            if context is not None:
                put = self._api.get_current_span(context).get_span_context()
                links.append(self._api.Link(put))
            context = None
        span = self._tracer.start_span(
            "kvlink get",
            context=context,
            kind=self._api.SpanKind.CONSUMER,
            attributes=_about(event.scheme, event.key),
            links=links,
            start_time=started,
        )
        if event.error is None:
            self._gets.add(_name(event), span.get_span_context())
        return span

    def _add_phases(
        self, parent: SpanContext, event: TransferEvent, started: int, is_stream: bool = False
    ) -> None:
        for name, begin, end in _phases(event, started) if self._has_phases else ():
            if not (is_stream and name == "copy"):  # the sum of its layers, which are events
                self._start_child(name, parent, begin).end(end)

    def _start_child(self, name: str, parent: SpanContext, started: int) -> Span:
        context = self._api.set_span_in_context(self._api.NonRecordingSpan(parent))
        return self._tracer.start_span(f"kvlink {name}", context=context, start_time=started)

    def _end(self, span: Span, event: TransferEvent, ended: int | None = None) -> None:
        span.set_attributes({"kvlink.nbytes": event.nbytes, "kvlink.copies": event.copies})
        layers = observers.layers_of(event.data)
        if layers:
            span.set_attribute("kvlink.layers", layers)
        self._set_error(span, event)
        span.end(ended)

    def _set_error(self, span: Span, event: TransferEvent) -> None:
        if event.error is not None:
            span.set_attribute("error.type", type(event.error).__name__)
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(event.error)))


def _about(scheme: str, key: str) -> dict[str, str]:
    return {"kvlink.key": key, "kvlink.scheme": scheme}


def _layer(event: TransferEvent) -> dict[str, Any]:
    return {"kvlink.layer": event.layer, "kvlink.branch": event.branch}


def _name(event: TransferEvent) -> tuple[str, str]:
    return event.scheme, event.key


def _phases(event: TransferEvent, started: int) -> Iterator[tuple[str, int, int]]:
    """Each phase with its begin and end, in ns: one behind the other, as the ledger has them."""
    for name, seconds in event.seconds.items():
        ended = started + int(1e9 * seconds)
        if ended > started:
            yield name, started, ended
        started = ended
