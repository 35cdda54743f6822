"""A forked child that uses its parent's link raises ClosedError at once, whatever was locked."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from omni_kvlink import KVLink, UnavailableError
from omni_kvlink.aio import AsyncKVConsumer, AsyncKVProducer
from omni_kvlink.connectors.registry import backend, split_url
from omni_kvlink.link.put_operation import FIRST_STEP_NBYTES
from omni_kvlink.lookup import LookupConsumer, LookupProducer, PrefixStore
from omni_kvlink.lowlevel import begin_get, can_retry, open_delivery
from omni_kvlink.testing.caches import Recipe, chunk, hash_chunk, hash_tensors
from omni_kvlink.testing.rig import until
from support.link.ends import delivery_of
from support.processes.locks import held, locks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from omni_kvlink import KVConsumer, KVProducer

pytestmark = pytest.mark.usefixtures("zmq_started", "leaves_nothing")
URLS = {
    "inproc": "inproc://fork-{n}?inline=0",
    "shm": "shm://fork-{n}?inline=0",
    "sealed": "shm://fork-{n}?mode=sealed&inline=0",
    "zmq": "zmq+ipc://{root}/{n}.sock",
    "auto": "auto://fork-{n}",
}
_numbers = itertools.count()
SMALL = Recipe("small").make()
LARGE = Recipe("large", layers=2, tokens=20_000, heads=8, dim=64).make()
STREAM: Any = Recipe("stream", layers=2).make()


@pytest.fixture(params=URLS)
def pair(request: pytest.FixtureRequest, sockets: str) -> Iterator[tuple[KVProducer, KVConsumer]]:
    url = URLS[request.param].format(n=next(_numbers), root=sockets)
    try:
        backend(split_url(url)[0])
    except UnavailableError as error:
        pytest.skip(str(error))
    options: dict[str, Any] = {"directory": sockets, "quota": 64 << 20}
    with (
        KVLink.serve(url, **options) as producer,
        KVLink.connect(producer.url, timeout=60, **options) as consumer,
    ):
        yield producer, consumer


def results_in_child(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The name of the error that each call raises in a forked child; a call that hangs is last."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # ends a call that hangs
        for name, call in calls.items():
            try:
                call()
            except BaseException as error:
                result = type(error).__name__
            else:
                result = ""
            os.write(writing, json.dumps([name, result]).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = dict(map(json.loads, pipe))
    os.waitpid(child, 0)
    return found


def awaited(call: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
    return lambda: asyncio.run(call())


def test_every_call_in_a_child(pair: tuple[KVProducer, KVConsumer]) -> None:
    producer, consumer = pair
    assert LARGE.plan().nbytes > 2 * FIRST_STEP_NBYTES  # it looks for readers that wait
    receipt = producer.put(Recipe("k").make(), ttl=600)
    received = consumer.get("k", timeout=60)
    out = producer.stream_put(STREAM, ttl=600)
    stream = consumer.stream_get("stream", timeout=60)
    growing = producer.open_stream("growing", chunk(0))
    growing.append(chunk(0))
    growing.append(chunk(1))
    chunks = consumer.read_stream("growing", timeout=60)
    first = chunks.receive()
    assert first is not None
    allocation = producer.allocate(Recipe("allocated").make())
    pending = begin_get(consumer, "pending", timeout=60)
    delivery = delivery_of(received)
    until(lambda: producer.stats()["transfers"]["waiting"] == 3, "the gets wait")
    layer = [tensors[0] for tensors in STREAM.layer_blocks.values()]
    aproducer, aconsumer = AsyncKVProducer(producer), AsyncKVConsumer(consumer)
    refused: dict[str, Callable[[], object]] = {
        "put": lambda: producer.put(SMALL),
        "put large": lambda: producer.put(LARGE),
        "put direct": lambda: producer.put(LARGE, direct=True),
        "put allocated": lambda: producer.put(allocation.data),
        "allocate": lambda: producer.allocate(SMALL),
        "stream_put": lambda: producer.stream_put(SMALL),
        "fail": lambda: producer.fail("k", "x"),
        "abort": lambda: producer.abort("k"),
        "producer's stats": producer.stats,
        "receipt": lambda: receipt.wait(timeout=600),
        "write_layer": lambda: out.write_layer(0, *layer),
        "commit": out.commit,
        "fail a stream": lambda: out.fail("x"),
        "open_stream": lambda: producer.open_stream("g", chunk(0)),
        "append": lambda: growing.append(chunk(2)),
        "commit a growing stream": growing.commit,
        "fail a growing stream": lambda: growing.fail("x"),
        "read_stream": lambda: consumer.read_stream("growing", timeout=600),
        "receive": lambda: chunks.receive(timeout=600),
        "concatenate": chunks.concatenate,
        "get": lambda: consumer.get("k", timeout=600),
        "stream_get": lambda: consumer.stream_get("k", timeout=600),
        "wait_for_layer": lambda: stream.wait_for_layer(0),
        "wait": stream.wait,
        "verify": received.verify,
        "begin_get": lambda: begin_get(consumer, "k", timeout=600),
        "can_retry": lambda: can_retry(consumer, pending, timeout=600),
        "wait pending": lambda: pending.wait(timeout=600),
        "open_delivery": lambda: open_delivery(consumer, delivery, started=0.0),
        "consumer's abort": lambda: consumer.abort("k"),
        "consumer's stats": consumer.stats,
        "aio put": awaited(lambda: aproducer.put(LARGE)),
        "aio wait": awaited(lambda: aproducer.wait(receipt, timeout=600)),
        "aio get": awaited(lambda: aconsumer.get("k", timeout=600)),
    }
    allowed: dict[str, Callable[[], object]] = {
        "cancel": pending.cancel,
        "release": received.release,
        "release a stream": stream.release,
        "release a growing stream": chunks.release,
        "leave a growing stream": lambda: growing.__exit__(None, None, None),
        "release an allocation": allocation.release,
        "close a producer": producer.close,
        "close a consumer": consumer.close,
        "repr": lambda: repr((producer, consumer, receipt)),
    }
    streams = out, stream, growing, chunks, first
    with held(locks_of(producer, consumer, *streams, received, receipt, pending)) as locks:
        found = results_in_child({**refused, **allowed})
    assert locks > 8
    expected = {**dict.fromkeys(refused, "ClosedError"), **dict.fromkeys(allowed, "")}
    assert found == expected
    pending.cancel()
    out.write_layer(0, *layer)  # the parent's link is as before
    out.fail("enough")
    received.release()
    receipt.wait(timeout=60)
    allocation.release()
    stream.release()
    assert hash_tensors(first.data.tensors()) == hash_chunk(chunk(0))
    second = chunks.receive(timeout=60)
    assert second is not None
    assert hash_tensors(second.data.tensors()) == hash_chunk(chunk(1))
    growing.append(chunk(2))
    del first, second
    chunks.release()
    growing.commit().wait(timeout=60)


def test_lookups_in_a_child(sockets: str) -> None:
    questions = KVLink.serve("shm://questions", directory=sockets)
    answers = KVLink.serve("shm://answers", directory=sockets)
    reader = KVLink.connect("shm://questions", timeout=60, directory=sockets)
    link = KVLink.connect("shm://answers", timeout=60, directory=sockets)
    with (
        LookupProducer(PrefixStore(answers), [reader], model="m") as producer,
        LookupConsumer(questions, [link], model="m") as consumer,
    ):
        assert consumer.select([1, 2, 3], timeout=60).tokens == 0
        calls: dict[str, Callable[[], object]] = {
            "select": lambda: consumer.select([1, 2, 3], timeout=600),
            "consumer's stats": consumer.stats,
            "producer's stats": producer.stats,
            "listen": lambda: producer.listen(reader),
            "close a consumer": consumer.close,
            "close a producer": producer.close,
        }
        with held(locks_of(producer, consumer)):
            found = results_in_child(calls)
        assert found == {
            **dict.fromkeys(list(calls)[:4], "ClosedError"),
            **dict.fromkeys(list(calls)[4:], ""),
        }
