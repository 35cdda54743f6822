"""Spans of transfers, made from records of what has ended; in one thread, see `RecordQueue`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import Link, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_kvlink.telemetry.observers import Recent
from omni_kvlink.telemetry.span_source import Phase, failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

    from omni_kvlink.telemetry.span_source import BegunPut, SpanSource


class EndRecord(NamedTuple):
    """All that a span needs of the `TransferEvent` of a put, a get, a layer or a copy.

    Attributes:
        scheme, key, nbytes, seconds, copies, layer, branch, trace: those of the event.
        layers: the number of layers of what has arrived.
        error: the class and the text of an error.
        ended: nanoseconds since 1970, in the thread of the transfer.
        context: the current one of that thread.
    """

    scheme: str
    key: str
    nbytes: int
    seconds: Mapping[str, float]
    copies: int
    layers: int
    error: tuple[str, str] | None
    ended: int
    trace: Mapping[str, str]
    context: Context | None
    layer: int = -1
    branch: str = ""

    @property
    def began(self) -> int:
        """Nanoseconds since 1970."""
        return self.ended - int(1e9 * sum(self.seconds.values()))


class SpanMaker:
    """Makes the spans; used by one thread."""

    def __init__(self, tracer: Tracer, source: SpanSource, *, phases: bool):
        self._tracer, self._source, self._has_phases = tracer, source, phases
        self._propagator = TraceContextTextMapPropagator()
        self.forget()

    def forget(self) -> None:
        """Forget what is under way, as a forked child: its parent has it."""
        self._streams = Recent()  # spans of those that arrive, by scheme and key
        self._gets = Recent()  # SpanContext by scheme and key: what may be copied out

    def put(self, put: BegunPut, end: EndRecord) -> None:
        """Make the span of a put that has ended, and those of its phases."""
        layers = len({(about["kvlink.branch"], about["kvlink.layer"]) for about, _ in put.layers})
        attributes = _attributes(end) | ({"kvlink.layers": layers} if layers else {})
        span = self._source.start(put, attributes)
        is_recording = span.is_recording()
        self._end_put(span, put, end, end.ended)
        if is_recording:
            self._add_phases(span.get_span_context(), end, put.began, bool(layers))

    def lost_put(self, put: BegunPut, ended: int) -> None:
        """Make the span of a put whose end was not seen."""
        self._end_put(self._source.start(put, {}), put, None, ended)

    def open(self, end: EndRecord) -> None:
        """Start the span of a stream that was announced."""
        span = self._start_get(end)
        for lost in self._streams.add((end.scheme, end.key), span):
            lost.end()
        if span.is_recording():
            self._add_phases(span.get_span_context(), end, end.began)

    def get(self, end: EndRecord) -> None:
        """Make the span of a get that has ended, and those of its phases."""
        stream = self._streams.pop((end.scheme, end.key))
        span = self._start_get(end) if stream is None else stream
        is_recording = span.is_recording()
        span.set_attributes(_attributes(end))
        _set_error(span, end)
        span.end(end.ended)
        if is_recording and stream is None:
            self._add_phases(span.get_span_context(), end, end.began)

    def copy(self, end: EndRecord) -> None:
        """Make a child of the get's span, also after that has ended."""
        parent = self._gets.get((end.scheme, end.key))
        if parent is not None and self._has_phases:
            about = layer_attributes(end.layer, end.branch) if end.layer >= 0 else {}
            about |= {} if end.error is None else {"error.type": end.error[0]}
            status = None if end.error is None else failed(end.error[1])
            for phase in phases(end.seconds, end.began):
                self._source.phase(parent, phase._replace(attributes=about, status=status))

    def close(self, ended: int) -> None:
        """End the spans of what is under way."""
        for span in self._streams.clear():
            span.end(ended)

    def _end_put(self, span: Span, put: BegunPut, end: EndRecord | None, ended: int) -> None:
        for about, at in put.layers:
            span.add_event("kvlink layer", about, at)
        if end is not None:
            _set_error(span, end)
        span.end(ended)

    def _start_get(self, end: EndRecord) -> Span:
        """Start the put's child; within a span of this process, that one's, with a link to the put.

        So OpenTelemetry's conventions for messages recommend it:
        https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/#consumer-spans
        """
        links: list[Link] = []
        context = self._propagator.extract(end.trace) if end.trace else end.context
        if trace.get_current_span(end.context).get_span_context().is_valid:
            if end.trace:
                links.append(Link(trace.get_current_span(context).get_span_context()))
            context = end.context
        span = self._tracer.start_span(
            "kvlink get",
            context=context,
            kind=SpanKind.CONSUMER,
            attributes={"kvlink.key": end.key, "kvlink.scheme": end.scheme},
            links=links,
            start_time=end.began,
        )
        if end.error is None and span.is_recording():
            self._gets.add((end.scheme, end.key), span.get_span_context())
        return span

    def _add_phases(
        self, parent: SpanContext, end: EndRecord, began: int, is_stream: bool = False
    ) -> None:
        for phase in phases(end.seconds, began) if self._has_phases else ():
            if not (is_stream and phase.name == "kvlink copy"):  # its layers' sum, which are events
                self._source.phase(parent, phase)


def layer_attributes(layer: int, branch: str) -> dict[str, Any]:
    """Return the attributes that name a layer."""
    return {"kvlink.layer": layer, "kvlink.branch": branch}


def phases(seconds: Mapping[str, float], began: int) -> Iterator[Phase]:
    """Each phase: one behind the other, as the ledger has them."""
    for name, spent in seconds.items():
        ended = began + int(1e9 * spent)
        if ended > began:
            yield Phase(f"kvlink {name}", began, ended, {})
        began = ended


def _attributes(end: EndRecord) -> dict[str, Any]:
    found: dict[str, Any] = {"kvlink.nbytes": end.nbytes, "kvlink.copies": end.copies}
    if end.layers:
        found["kvlink.layers"] = end.layers
    return found


def _set_error(span: Span, end: EndRecord) -> None:
    if end.error is not None:
        kind, text = end.error
        span.set_attribute("error.type", kind)
        span.set_status(failed(text))
