"""Spans by OpenTelemetry's SDK, made when all is known; a put's has the context of its header."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, TraceFlags

from omni_kvlink._version import __version__
from omni_kvlink.telemetry.span_source import PUT, BegunPut, SpanSource

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Tracer
    from opentelemetry.trace import Span

    from omni_kvlink.telemetry.span_source import Phase

_RANDOM = getattr(TraceFlags, "RANDOM_TRACE_ID", 0)
"""The flag of W3C's second version; 0 in releases that do not know it."""


class DecidedContext(NamedTuple):
    """A span's context, and the sampler's result."""

    context: SpanContext
    result: SamplingResult


class SdkSpanSource(SpanSource):
    """Decides with the tracer's own sampler and generator, once; a copy of it repeats the result.

    So a sampler that counts is called once for each put, in the put's thread.
    """

    def __init__(self, tracer: Tracer):
        super().__init__(tracer)
        self._ids, self._sampler = tracer.id_generator, tracer.sampler
        self._resource, self._processor = tracer.resource, tracer.span_processor
        self._scope = InstrumentationScope("omni_kvlink", __version__)
        self._unset = Status()
        self._repeated = Repeated(self._ids)
        self._later = copy.copy(tracer)
        self._later.id_generator = self._repeated
        self._later.sampler = RepeatedResult(self._repeated)

    def begin(self, put: BegunPut) -> tuple[SpanContext, bool]:
        """See `SpanSource.begin`."""
        put.parent = current = context.get_current()
        parent = trace.get_current_span(current).get_span_context()
        ids, is_root = self._ids, not parent.is_valid
        trace_id = ids.generate_trace_id() if is_root else parent.trace_id
        about = put.attributes
        result = self._sampler.should_sample(current, trace_id, PUT, SpanKind.PRODUCER, about, ())
        is_random = _is_random(ids) if is_root else parent.trace_flags & _RANDOM
        flags = TraceFlags(
            (result.decision is Decision.RECORD_AND_SAMPLE) | (_RANDOM if is_random else 0)
        )
        own = SpanContext(trace_id, ids.generate_span_id(), False, flags, result.trace_state)
        put.decided = DecidedContext(own, result)
        return own, result.decision is not Decision.DROP

    def start(self, put: BegunPut, attributes: dict[str, Any]) -> Span:
        """See `SpanSource.start`."""
        self._repeated.decided, about = put.decided, put.attributes | attributes
        try:
            return self._later.start_span(
                PUT, put.parent, SpanKind.PRODUCER, about, start_time=put.began
            )
        finally:
            self._repeated.decided = None

    def phase(self, parent: SpanContext, phase: Phase) -> None:
        """See `SpanSource.phase`: a processor sees its end alone, at a quarter of the cost."""
        flags, state = parent.trace_flags, parent.trace_state
        own = SpanContext(parent.trace_id, self._ids.generate_span_id(), False, flags, state)
        span = ReadableSpan(
            phase.name,
            own,
            parent,
            self._resource,
            phase.attributes,
            status=phase.status or self._unset,
            start_time=phase.began,
            end_time=phase.ended,
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)


class Repeated(IdGenerator):
    """Returns the ids that were decided; used by one thread."""

    def __init__(self, ids: IdGenerator):
        self._ids = ids
        self.decided: DecidedContext | None = None

    def generate_span_id(self) -> int:
        """Return the id of the span."""
        return self._ids.generate_span_id() if self.decided is None else self.decided[0].span_id

    def generate_trace_id(self) -> int:
        """Return the id of the trace."""
        return self._ids.generate_trace_id() if self.decided is None else self.decided[0].trace_id

    def is_trace_id_random(self) -> bool:
        """Whether the ids of traces are random, as the provider's generator says."""
        return _is_random(self._ids)


class RepeatedResult(Sampler):
    """Returns what the sampler has said, and the attributes that have become known since."""

    def __init__(self, repeated: Repeated):
        self._repeated = repeated

    def should_sample(
        self,
        parent_context: Any,
        trace_id: int,
        name: str,
        kind: Any = None,
        attributes: Any = None,
        links: Any = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        """Repeat the result."""
        assert self._repeated.decided is not None
        result = self._repeated.decided.result
        known = {**(result.attributes or {}), **(attributes or {})}
        return SamplingResult(result.decision, known, result.trace_state)

    def get_description(self) -> str:
        """Name it."""
        return "repeats a result"


def _is_random(ids: IdGenerator) -> bool:
    is_random = getattr(ids, "is_trace_id_random", None)
    return bool(is_random is not None and is_random())
