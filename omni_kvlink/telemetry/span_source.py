"""Spans by a tracer: a put's context is decided where the put begins, for its header."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanKind, Status, StatusCode

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, Tracer

PUT = "kvlink put"


class BegunPut:
    """A put that has not ended.

    Attributes:
        began: nanoseconds since 1970.
        layers: of a stream, attributes and time of each layer that was written.
        span: its span, if that had to be started at once.
        parent: the context of its caller, if the span is started later.
        decided: the span's own context then, and what the sampler has said.
    """

    __slots__ = ("began", "decided", "key", "layers", "parent", "scheme", "span")

    def __init__(self, scheme: str, key: str, began: int):
        self.scheme, self.key, self.began = scheme, key, began
        self.layers: list[tuple[dict[str, Any], int]] = []
        self.span: Span | None = None
        self.parent: Context | None = None
        self.decided: Any = None

    @property
    def attributes(self) -> dict[str, Any]:
        """All that is known of it from its beginning."""
        return {"kvlink.key": self.key, "kvlink.scheme": self.scheme}


class Phase(NamedTuple):
    """A part of a put or get, by when it began and ended, in nanoseconds since 1970."""

    name: str
    began: int
    ended: int
    attributes: dict[str, Any]
    status: Status | None = None


class SpanSource:
    """Starts spans at once, by any tracer of OpenTelemetry's API."""

    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    def begin(self, put: BegunPut) -> tuple[SpanContext, bool]:
        """Decide the context of a put's span, and whether there is to be one; in the put's thread.

        A child of the caller's current span.
        """
        put.span = span = self._tracer.start_span(
            PUT, kind=SpanKind.PRODUCER, attributes=put.attributes, start_time=put.began
        )
        return span.get_span_context(), span.is_recording()

    def start(self, put: BegunPut, attributes: dict[str, Any]) -> Span:
        """Return the span, with these attributes; in the thread that makes spans."""
        assert put.span is not None
        put.span.set_attributes(attributes)
        return put.span

    def phase(self, parent: SpanContext, phase: Phase) -> None:
        """Make the span of a phase that has ended, a child of its put's or get's."""
        context = trace.set_span_in_context(NonRecordingSpan(parent))
        name, attributes = phase.name, phase.attributes
        span = self._tracer.start_span(
            name, context=context, attributes=attributes, start_time=phase.began
        )
        if phase.status is not None:
            span.set_status(phase.status)
        span.end(phase.ended)


def failed(text: str) -> Status:
    """Return the status of what has failed."""
    return Status(StatusCode.ERROR, text)
