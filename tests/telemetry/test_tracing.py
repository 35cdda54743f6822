"""One trace over both sides of a transfer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_kvlink import (
    DuplicateKeyError,
    IntegrityError,
    KVCacheTransferData,
    KVLink,
    SchemaError,
    TensorTransferData,
    TransferFailed,
    TransferTimeout,
    UnavailableError,
)
from omni_kvlink.aio import AsyncKVLink
from omni_kvlink.lowlevel import BackgroundGet, begin_get
from omni_kvlink.telemetry import tracing
from omni_kvlink.testing.rig import until

pytest.importorskip("opentelemetry.sdk")

from support.telemetry.spans import Spans, children, is_child, named, tracing_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omni_kvlink import KVConsumer, KVProducer

LAYERS, TOKENS = 3, 8
LARGE = 1 << 18
"""Elements of a payload that no message holds."""


@pytest.fixture
def spans() -> Iterator[Spans]:
    with tracing_to(Spans()) as spans:
        yield spans


@pytest.fixture(params=["shm://traced", "zmq+ipc://{sockets}/traced.sock"])
def ends(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = request.param.format(sockets=sockets)
    with (
        KVLink.serve(url, directory=sockets) as producer,
        KVLink.connect(url, timeout=60, directory=sockets) as consumer,
    ):
        yield producer, consumer


def payload(key: str, size: int = 4) -> TensorTransferData:
    return TensorTransferData(key, {"h": torch.ones(size)})


def cache(key: str) -> KVCacheTransferData:
    rows = [torch.full((TOKENS, 2, 4), float(layer)) for layer in range(LAYERS)]
    about = {"kv_lens": [TOKENS], "ropes": [TOKENS], "num_layers": LAYERS}
    return KVCacheTransferData(key, {"key_cache": rows, "value_cache": rows}, metadata=about)


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    """Those of this library, without their prefix."""
    return {name.removeprefix("kvlink."): v for name, v in span["attributes"].items()}


def by_key(spans: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {attributes(span)["key"]: span for span in spans}


@pytest.mark.parametrize("size", [4, LARGE])
def test_put_and_get_are_one_trace(
    ends: tuple[KVProducer, KVConsumer], spans: Spans, size: int
) -> None:
    producer, consumer = ends
    for key in ("a", "b", "c"):  # the first one's header is decoded, the others' are compared
        receipt = producer.put(payload(key, size))
        with consumer.get(key, timeout=60) as data:
            assert data.request_id == key
        receipt.wait(timeout=60)
    puts, gets = spans.named("kvlink put"), spans.named("kvlink get")
    assert len(puts) == len(gets) == 3
    assert len({put["context"]["trace_id"] for put in puts}) == 3
    for key, put, get in zip("abc", puts, gets, strict=True):
        assert (put["kind"], get["kind"]) == ("SpanKind.PRODUCER", "SpanKind.CONSUMER")
        assert put["parent_id"] is None
        assert is_child(get, put)
        assert children(spans.all(), put)[-1] == "get"
        assert {*children(spans.all(), put)} == {"plan", "reserve", "copy", "publish", "get"}
        assert children(spans.all(), get) == ["wait", "view"]
        about = attributes(put)
        nbytes = receipt.ledger.nbytes
        scheme = producer.url.partition("://")[0]
        assert about == {"key": key, "scheme": scheme, "nbytes": nbytes, "copies": 1}
        assert attributes(get)["nbytes"] == nbytes
        assert put["start_time"] <= put["end_time"]
        assert get["end_time"] >= put["start_time"]


def test_spans_of_the_caller(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    """The put is a child of the caller's; so is a get, and its link names the put."""
    producer, consumer = ends
    tracer = spans.provider.get_tracer("engine")
    with tracer.start_as_current_span("prefill"):
        producer.put(payload("a"))
    with tracer.start_as_current_span("decode"), consumer.get("a", timeout=60):
        pass
    [prefill], [decode] = spans.named("prefill"), spans.named("decode")
    [put], [get] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(put, prefill)
    assert is_child(get, decode)
    assert [link["context"]["span_id"] for link in get["links"]] == [put["context"]["span_id"]]


def test_many(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    producer.put_many([payload("a"), payload("b", LARGE)])
    with consumer.get_many(["a", "b"], timeout=60) as got:
        assert len(got) == 2
    puts, gets = by_key(spans.named("kvlink put")), by_key(spans.named("kvlink get"))
    assert set(puts) == set(gets) == {"a", "b"}
    assert all(is_child(gets[key], puts[key]) for key in puts)


def test_what_is_checked_and_copied_out(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    producer.put(payload("a", LARGE), direct=False)
    with (received := consumer.get("a", timeout=60, verify="full")):
        received.verify()
        received.scatter([torch.empty(LARGE)])
    [get] = spans.named("kvlink get")
    assert children(spans.all(), get)[-2:] == ["verify", "scatter"]


def test_memory_of_the_link(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    allocation = producer.allocate(payload("b", LARGE))
    producer.put(TensorTransferData("b", {"h": allocation.data["h"]}))
    with consumer.get("b", timeout=60):
        pass
    [put], [get] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(get, put)
    assert attributes(put)["copies"] == 0


def test_failures(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    producer.put(payload("a"))
    with pytest.raises(DuplicateKeyError):
        producer.put(payload("a"))
    with pytest.raises(DuplicateKeyError):
        producer.put_many([payload("b"), payload("b")])
    with pytest.raises(TransferTimeout):
        consumer.get("none", timeout=0)
    puts, gets = spans.named("kvlink put"), spans.named("kvlink get")
    duplicate = "DuplicateKeyError"
    assert [put["attributes"].get("error.type") for put in puts] == [None, duplicate, duplicate]
    assert [put["status"]["status_code"] for put in puts] == ["UNSET", "ERROR", "ERROR"]
    assert [get["attributes"]["error.type"] for get in gets] == ["TransferTimeout"]
    assert gets[0]["status"]["status_code"] == "ERROR"
    assert "none" in gets[0]["status"]["description"]


def test_a_payload_without_digests_that_is_to_be_checked(
    ends: tuple[KVProducer, KVConsumer], spans: Spans
) -> None:
    """It has arrived, so that its get is in the trace of its put."""
    producer, consumer = ends
    producer.put(payload("a"), digests=False)
    with pytest.raises(IntegrityError):
        consumer.get("a", timeout=60, verify="full")
    [put], [get] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(get, put)
    assert get["attributes"]["error.type"] == "IntegrityError"


def test_a_stream(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    data = cache("a")
    keys, values = data.layer_blocks["key_cache"], data.layer_blocks["value_cache"]
    with producer.stream_put(data) as out:
        stream = consumer.stream_get("a", timeout=60)
        for layer in range(LAYERS):
            out.write_layer(layer, keys[layer], values[layer])  # type: ignore[arg-type]
            targets = torch.empty(TOKENS, 2, 4), torch.empty(TOKENS, 2, 4)
            stream.wait_for_layer(layer).scatter(*targets)
    stream.release()
    [put], [get] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(get, put)
    written = [event["attributes"]["kvlink.layer"] for event in put["events"]]
    assert written == list(range(LAYERS))
    assert attributes(put)["layers"] == attributes(get)["layers"] == LAYERS
    assert "copy" not in children(spans.all(), put)
    assert children(spans.all(), get) == ["wait", *["wait", "scatter"] * LAYERS]
    scattered = spans.named("kvlink scatter")
    assert [attributes(span)["layer"] for span in scattered] == list(range(LAYERS))


def test_a_stream_that_fails(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    data = cache("a")
    keys = data.layer_blocks["key_cache"]
    out = producer.stream_put(data)
    stream = consumer.stream_get("a", timeout=60)
    out.write_layer(0, keys[0], keys[0])  # type: ignore[arg-type]
    out.fail("out of tokens")
    with pytest.raises(TransferFailed):
        stream.wait()
    [put], [get] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(get, put)
    for span in (put, get):
        assert span["attributes"]["error.type"] == "TransferFailed"
        assert "out of tokens" in span["status"]["description"]


def test_a_stream_that_is_left(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    producer.put(cache("a"))
    with consumer.stream_get("a", timeout=60) as stream:
        stream.wait_for_layer(0)
    [get] = spans.named("kvlink get")
    assert get["attributes"]["error.type"] == "ClosedError"


def test_an_append_stream(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    """Its head and each chunk are puts; each chunk that is received is a get."""
    producer, consumer = ends
    with (
        producer.open_stream("a", {"h": torch.ones(0, 2)}) as out,
        consumer.read_stream("a", timeout=60) as stream,
    ):
        for number in range(3):
            out.append({"h": torch.full((2, 2), float(number))})
            chunk = stream.receive(timeout=60)
            assert chunk is not None
            assert chunk.data["h"][0, 0] == number
            del chunk
        out.commit()
        assert stream.receive(timeout=60) is None
    puts, gets = spans.named("kvlink put"), spans.named("kvlink get")
    chunks = [put for put in puts if any(is_child(get, put) for get in gets)]
    assert len(puts) == 4
    assert len(chunks) == len(gets) == 3


def test_asyncio(ends: tuple[KVProducer, KVConsumer], sockets: str, spans: Spans) -> None:
    """The current span of each task counts, though all are of one thread."""
    producer, _ = ends
    tracer = spans.provider.get_tracer("engine")

    async def decode(consumer: Any, key: str) -> None:
        with tracer.start_as_current_span(f"decode {key}"):
            (await consumer.get(key, timeout=60)).release()

    async def run() -> None:
        async with await AsyncKVLink.connect(
            producer.url, timeout=60, directory=sockets
        ) as consumer:
            await asyncio.gather(*(decode(consumer, key) for key in ("a", "b")))
            with await consumer.get_many(["c"], timeout=60):
                pass
            with await consumer.stream_get("d", timeout=60) as stream:
                await stream.wait()

    for key in ("a", "b", "c"):
        producer.put(payload(key))
    producer.put(cache("d"))
    asyncio.run(run())
    puts, gets = by_key(spans.named("kvlink put")), by_key(spans.named("kvlink get"))
    for key in ("a", "b"):
        assert is_child(gets[key], spans.named(f"decode {key}")[0])
    for key in ("c", "d"):
        assert is_child(gets[key], puts[key])


def test_a_background_get(ends: tuple[KVProducer, KVConsumer], spans: Spans) -> None:
    producer, consumer = ends
    rows = [torch.empty(TOKENS, 2, 4) for _ in range(2 * LAYERS)]
    outcomes: list[Any] = []

    def connect(timeout: float) -> KVConsumer:
        return consumer

    def begin(link: KVConsumer, key: str, timeout: float) -> Any:
        return begin_get(link, key, timeout=timeout, streamed=True)

    with ThreadPoolExecutor(1) as pool:
        get = BackgroundGet(
            "a",
            connect,
            begin,
            60.0,
            submit=pool.submit,
            copy=outcomes.append,
            fail=outcomes.append,
            into=rows,
        )
        get.request()
        producer.put(cache("a"))
        until(lambda: bool(outcomes), "the copy has ended")
    assert torch.equal(rows[-1], torch.full_like(rows[-1], LAYERS - 1.0)), outcomes
    [put], [span] = spans.named("kvlink put"), spans.named("kvlink get")
    assert is_child(span, put)
    assert "scatter" in children(spans.all(), span)


def test_direct(sockets: str, spans: Spans) -> None:
    url = f"zmq+ipc://{sockets}/direct.sock"
    with KVLink.serve(url) as producer, KVLink.connect(url, timeout=60) as consumer:
        get = BackgroundGet("a", lambda timeout: consumer, begin_get, 60.0, copy=print)
        get.request()
        producer.put(payload("a", LARGE), direct=True, timeout=60)
        until(lambda: bool(spans.named("kvlink put")), "it was sent")
        with pytest.raises(SchemaError):
            producer.put(TensorTransferData("b", {"h": torch.ones(4, 4).T}), direct=True)
    sent, refused = spans.named("kvlink put")
    assert "error.type" not in sent["attributes"]
    assert refused["attributes"]["error.type"] == "SchemaError"


def test_off(ends: tuple[KVProducer, KVConsumer]) -> None:
    """Nothing of a trace is in a payload, before it is turned on and after it was turned off."""
    producer, consumer = ends
    keys = iter("abc")

    def is_traced() -> bool:
        key = next(keys)
        producer.put(payload(key))
        with (received := consumer.get(key, timeout=60)):
            return "traceparent" in received.manifest.producer

    assert not is_traced()
    with tracing_to(Spans()) as spans:
        assert is_traced()
    assert not is_traced()
    assert len(spans.named("kvlink put")) == len(spans.named("kvlink get")) == 1


def test_what_is_under_way_ends_with_the_trace(ends: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = ends
    data = cache("a")
    with tracing_to(Spans()) as spans:
        out, stream = producer.stream_put(data), consumer.stream_get("a", timeout=60)
    out.fail("of the test")
    with pytest.raises(TransferFailed):
        stream.wait()
    assert named(spans.all(), "kvlink get")
    assert named(spans.all(), "kvlink put")


def test_it_is_not_imported() -> None:
    code = """
import sys, omni_kvlink, omni_kvlink.telemetry.tracing
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UnavailableError, match=r"omni-kvlink\[tracing\]"):
        tracing.enable()
