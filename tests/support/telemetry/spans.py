"""Spans of OpenTelemetry, as tests of traces look at them: in this process, or of others."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from omni_kvlink.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Span = dict[str, Any]


class Spans:
    """The spans of a process, in the order of their starts, as OpenTelemetry writes them."""

    def __init__(self) -> None:
        self.provider, self._exporter = TracerProvider(), InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> list[Span]:
        """Every span that has ended, of transfers that have ended by now, too."""
        tracing.flush()
        spans = self._exporter.get_finished_spans()
        found: list[Span] = [json.loads(span.to_json()) for span in spans]
        return sorted(found, key=lambda span: str(span["start_time"]))

    def named(self, name: str) -> list[Span]:
        return named(self.all(), name)


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span["name"] == name]


def children(spans: Sequence[Span], parent: Span) -> list[str]:
    """The names of a span's children, without their prefix."""
    return [span["name"].removeprefix("kvlink ") for span in spans if is_child(span, parent)]


def is_child(span: Span, parent: Span) -> bool:
    is_same = span["context"]["trace_id"] == parent["context"]["trace_id"]
    return bool(is_same and span["parent_id"] == parent["context"]["span_id"])


@contextlib.contextmanager
def tracing_to(spans: Spans) -> Iterator[Spans]:
    """Trace what a block does."""
    tracing.enable(spans.provider)
    try:
        yield spans
    finally:
        tracing.disable()


def main() -> None:
    """Run `python SCRIPT ARGUMENTS` traced; its spans go to a file of the first argument."""
    directory, _, script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    with tracing_to(Spans()) as spans:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            name = sys.argv[sys.argv.index("--stage") + 1]
            Path(directory, f"{name}.json").write_text(json.dumps(spans.all()))


if __name__ == "__main__":
    main()
