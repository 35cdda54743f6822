"""Spans are made of records, in a thread of their own: none is lost unseen, none is another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.telemetry import observers, tracing
from omni_kvlink.telemetry.record_queue import RecordQueue

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, Sampler, SamplingResult

from support.telemetry.spans import Spans, children, is_child, named, tracing_to

# Reaches into _most: 4,096 records take longer.

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

TIMEOUT = 60


def transfer(keys: str, directory: str, name: str = "shm://recorded") -> list[dict[str, str]]:
    """Put and get payloads of these keys; return the trace contexts that they carried."""
    found = []
    with (
        KVLink.serve(name, directory=directory) as producer,
        KVLink.connect(name, timeout=TIMEOUT, directory=directory) as consumer,
    ):
        for key in keys:
            receipt = producer.put(TensorTransferData(key, {"h": torch.ones(4)}))
            with (received := consumer.get(key, timeout=TIMEOUT)):
                found.append(dict(received.manifest.producer))
            receipt.wait(timeout=TIMEOUT)
    return found


class HeldProcessor(SpanProcessor):
    """Holds up the thread that makes spans until it is opened; keeps the names of spans."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.names: list[str] = []
        self.threads: set[str] = set()

    def on_end(self, span: ReadableSpan) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT)
        self.names.append(span.name)
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def processor() -> Iterator[HeldProcessor]:
    processor, provider = HeldProcessor(), TracerProvider()
    provider.add_span_processor(processor)
    tracing.enable(provider)
    yield processor
    processor.opened.set()
    tracing.disable()


def test_a_transfer_waits_for_no_span(processor: HeldProcessor, sockets: str) -> None:
    transfer("abc", sockets)
    assert processor.names == []
    processor.opened.set()
    assert tracing.flush(TIMEOUT)
    assert processor.names.count("kvlink put") == processor.names.count("kvlink get") == 3
    assert processor.threads == {"kvlink-spans"}
    assert tracing.dropped() == 0


def test_flush_says_that_spans_are_not_made(processor: HeldProcessor, sockets: str) -> None:
    transfer("a", sockets)
    assert processor.reached.wait(TIMEOUT)
    assert not tracing.flush(timeout=0)


def test_the_span_has_the_context_that_the_header_carried(sockets: str) -> None:
    """Its trace id, its id and its flags; also as the child of another span, and as a root."""
    with tracing_to(Spans()) as spans:
        tracer = spans.provider.get_tracer("engine")
        carried = transfer("a", sockets)
        with tracer.start_as_current_span("step"):
            carried += transfer("b", sockets)
        puts, [step] = spans.named("kvlink put"), spans.named("step")
        read = [(put["context"]["trace_id"], put["context"]["span_id"]) for put in puts]
    headers = [tuple(each["traceparent"].split("-")[1:3]) for each in carried]
    assert [tuple(part.removeprefix("0x") for part in pair) for pair in read] == headers
    assert puts[0]["parent_id"] is None
    assert is_child(puts[1], step)


def test_spans_keep_the_ids_of_the_provider(sockets: str) -> None:
    """Its generator makes them, and the provider's own tracers still do as before."""
    made = set[int]()

    class Counting(RandomIdGenerator):
        def generate_span_id(self) -> int:
            made.add(number := super().generate_span_id())
            return number

    exporter, provider = InMemorySpanExporter(), TracerProvider(id_generator=Counting())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    transfer("a", sockets)
    provider.get_tracer("omni_kvlink", observers.__name__).start_span("other").end()
    tracing.disable()
    spans = exporter.get_finished_spans()
    assert len(spans) == 9
    assert {span.context.span_id for span in spans if span.context} == made


def test_times_are_those_of_the_transfer(processor: HeldProcessor, sockets: str) -> None:
    """Not those at which the thread came to make the spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(processor)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    began = time.time_ns()
    transfer("ab", sockets)
    ended = time.time_ns()
    processor.opened.set()
    assert tracing.flush(TIMEOUT)
    spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
    raw = exporter.get_finished_spans()
    assert len(named(spans, "kvlink put")) == 2
    for span in raw:
        assert span.start_time is not None
        assert span.end_time is not None
        assert began <= span.start_time <= span.end_time <= ended
    for put in named(spans, "kvlink put"):
        parts = [each for each in spans if is_child(each, put) and each["name"] != "kvlink get"]
        assert [part["end_time"] for part in parts[:-1]] == [p["start_time"] for p in parts[1:]]
        assert put["start_time"] == parts[0]["start_time"]


def test_records_that_come_too_fast_are_dropped_and_counted() -> None:
    """None waits for the thread; those that were taken are made in their order."""
    queue, opened, made = RecordQueue("test", 0.0, most=3), threading.Event(), list[int]()
    began = threading.Event()

    def work(number: int) -> None:
        began.set()
        assert opened.wait(TIMEOUT)
        made.append(number)

    queue.add(work, 0)
    assert began.wait(TIMEOUT)  # it has left the queue
    for number in range(1, 9):
        queue.add(work, number)
    assert queue.dropped == 5
    opened.set()
    assert queue.flush(TIMEOUT)
    assert made == [0, 1, 2, 3]
    queue.add(work, 9)
    assert queue.close(TIMEOUT, (work, 10))
    assert made == [0, 1, 2, 3, 9, 10]
    queue.add(work, 11)
    assert (made[-1], queue.dropped) == (10, 6)


def test_a_trace_counts_what_it_drops(
    processor: HeldProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    [tracer] = observers.registered
    assert isinstance(tracer, tracing.TransferTracer)
    monkeypatch.setattr(tracer.queue, "_most", 2)
    observers.received("shm", "k", 1, {"wait": 1e-6}, None)
    assert processor.reached.wait(TIMEOUT)
    for _ in range(5):
        observers.received("shm", "k", 1, {"wait": 1e-6}, None)
    assert tracing.dropped() == 3
    processor.opened.set()
    assert tracing.flush(TIMEOUT)
    assert processor.names.count("kvlink get") == 3


def test_a_record_that_fails_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    queue, made = RecordQueue("test", 0.0), list[int]()

    def work(number: int) -> None:
        made.append(number)
        raise RuntimeError(f"of record {number}")

    for number in range(3):
        queue.add(work, number)
    assert queue.close(TIMEOUT)
    assert made == [0, 1, 2]
    assert [record.message.count("of record 0") for record in caplog.records] == [1]


class Third(Sampler):
    """Samples every third put, and counts how often it is requested for one."""

    requested = 0

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
        if name != "kvlink put":
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
        self.requested += 1
        is_sampled = self.requested % 3 == 0
        decision = Decision.RECORD_AND_SAMPLE if is_sampled else Decision.DROP
        return SamplingResult(decision, {**attributes, "of": "the sampler"})

    def get_description(self) -> str:
        return "every third"


def test_the_sampler_decides_once_where_the_put_begins(sockets: str) -> None:
    exporter, sampler = InMemorySpanExporter(), Third()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    carried = transfer("abcdef", sockets)
    tracing.disable()
    flags = [int(each["traceparent"][-2:], 16) & 1 for each in carried]
    assert flags == [0, 0, 1, 0, 0, 1]
    assert sampler.requested == 6
    puts = [s for s in exporter.get_finished_spans() if s.name == "kvlink put"]
    assert [(put.attributes or {})["kvlink.key"] for put in puts] == ["c", "f"]
    assert [(put.attributes or {})["of"] for put in puts] == ["the sampler"] * 2


def test_a_parent_that_is_not_sampled_makes_no_span(sockets: str) -> None:
    """Of the put, the get and the phases; the header says so to the reader."""
    off = TracerProvider(sampler=ALWAYS_OFF)
    ended = HeldProcessor()
    ended.opened.set()
    with tracing_to(Spans()) as spans:
        spans.provider.add_span_processor(ended)
        with off.get_tracer("engine").start_as_current_span("step"):
            [carried] = transfer("a", sockets)
        assert spans.all() == []
    assert ended.names == []
    assert int(carried["traceparent"][-2:], 16) & 1 == 0


EXITING = """
import sys, torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from omni_kvlink import KVLink, TensorTransferData
from omni_kvlink.telemetry import tracing
provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracing.enable(provider)
with KVLink.serve("inproc://m") as producer, KVLink.connect("inproc://m", timeout=60) as consumer:
    producer.put(TensorTransferData("a", {"h": torch.ones(4)}))
    consumer.get("a", timeout=60).release()
"""


def test_the_interpreters_exit_makes_what_is_left() -> None:
    run = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    names = run.stdout.split("\n")
    assert names.count("kvlink put") == names.count("kvlink get") == 1
    assert names.count("kvlink publish") == names.count("kvlink view") == 1


def test_a_forked_child_makes_its_own_spans_alone(processor: HeldProcessor, sockets: str) -> None:
    """Those of its parent's records are the parent's; it has a thread of its own."""
    transfer("parent", sockets)  # a key each letter
    assert processor.reached.wait(TIMEOUT)
    here, there = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            processor.opened, processor.names = threading.Event(), []
            processor.opened.set()
            transfer("c", sockets, "shm://child")
            is_made = tracing.flush(TIMEOUT)
            os.write(there, json.dumps([is_made, sorted(processor.names)]).encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    is_made, names = json.loads(os.read(here, 1 << 16))
    os.close(here)
    os.close(there)
    assert is_made
    expected = ["put", "plan", "reserve", "copy", "publish", "get", "wait", "view"]
    assert set(names) <= {f"kvlink {name}" for name in expected}
    assert (names.count("kvlink put"), names.count("kvlink get")) == (1, 1)
    processor.opened.set()
    assert tracing.flush(TIMEOUT)
    assert processor.names.count("kvlink put") == len("parent")


def test_a_put_without_an_end_has_a_span_when_the_trace_ends() -> None:
    with tracing_to(Spans()) as spans:
        observers.begin("shm", "a", time.perf_counter())
    [put] = spans.named("kvlink put")
    assert put["attributes"] == {"kvlink.key": "a", "kvlink.scheme": "shm"}
    assert children(spans.all(), put) == []


def test_there_is_no_thread_before_a_transfer_or_after_the_trace(sockets: str) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "spans" in thread.name]

    with tracing_to(Spans()):
        assert names() == []
        transfer("a", sockets)
        assert names() == ["kvlink-spans"]
        [thread] = [each for each in threading.enumerate() if each.name == "kvlink-spans"]
    thread.join(TIMEOUT)
    assert names() == []
